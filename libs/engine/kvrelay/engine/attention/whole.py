"""Attention of whole prompts by torch's fused kernels, one call a prompt: cuDNN's, where it can."""

import warnings

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvrelay.engine.attention.prefill import Operands, Run
from kvrelay.engine.gpu.inputs import DeviceInputs

FROM_TOKENS = 1024
"""Shorter prompts fill a GPU together, not one by one."""


def padded(length: int) -> int:
    """Tokens that a prompt of `length` is computed as. They are few numbers, since cuDNN makes a plan for each, which takes
    it a part of a second; an eighth too many at most."""
    step = 1 << max(0, (length - 1).bit_length() - 4)
    return -(-length // step) * step


class WholePrompts:
    """For queries of `num_heads` [T, Hq, D], keys and values [T, Hkv, D] of `dtype`, on one device."""

    def __init__(
        self,
        backend: SDPBackend,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        from_tokens: int = FROM_TOKENS,
    ) -> None:
        self.from_tokens = from_tokens
        self._backend = backend
        self._shapes = (num_heads, head_dim), (2, num_kv_heads, head_dim)
        self._dtype, self._device = dtype, device

    def rehearse(self, max_tokens: int) -> list[int]:
        """Makes cuDNN's plans for prompts of up to `max_tokens`, which serve the thread that calls this alone. Gives the
        lengths they are for. Raises RuntimeError where cuDNN fails."""
        lengths = sorted({padded(length) for length in range(self.from_tokens, max_tokens + 1)})
        for length in lengths:
            self(*self._like(length), 0, length)
        return lengths

    def reason_against_cudnn(self) -> str | None:
        """What keeps cuDNN from computing these shapes here, in its words."""
        q, kv = self._like(padded(self.from_tokens))
        params = SDPAParams(_batch(q), _batch(kv[0]), _batch(kv[1]), None, 0.0, True, True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if can_use_cudnn_attention(params, debug=True):
                return None
        return "; ".join(str(warning.message) for warning in said) or "torch says so"

    def __call__(self, q: torch.Tensor, kv: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """The prompt that is tokens `start` to `end` of `q` [≥ start + padded(end - start), Hq, D] and of keys and values `kv`
        [2, T, Hkv, D]: [end - start, Hq, D]."""
        length = end - start
        rows = padded(length)
        kv = kv[:, start:end]
        # Padding keys are seen by none but padding queries. Still they must be numbers, as 0 · NaN is NaN; queries need not.
        k, v = kv if rows == length else F.pad(kv, (0, 0, 0, 0, 0, rows - length))
        with sdpa_kernel(self._backend):
            out = F.scaled_dot_product_attention(
                _batch(q[start : start + rows]), _batch(k), _batch(v), is_causal=True, enable_gqa=True
            )
        return out[0].transpose(0, 1)[:length]

    def part(self, inputs: DeviceInputs, run: Run) -> "WholePart":
        return WholePart(self, run)

    def _like(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        q_shape, (sides, *kv_shape) = self._shapes
        return (
            torch.zeros(length, *q_shape, dtype=self._dtype, device=self._device),
            torch.zeros(sides, length, *kv_shape, dtype=self._dtype, device=self._device),
        )


class WholePart:
    at_hand = True

    def __init__(self, attend: WholePrompts, run: Run) -> None:
        self.tokens = run.tokens
        # What is read behind the last token are queries of padding.
        self.rows = max(prompt.start + padded(prompt.end - prompt.start) for prompt in run.prompts)
        self._attend = attend
        self._prompts = run.prompts

    def attend(self, given: Operands, out: torch.Tensor) -> torch.Tensor:
        assert given.at_hand is not None, "asked for"
        for start, end in ((prompt.start, prompt.end) for prompt in self._prompts):
            mixed = self._attend(given.q, given.at_hand, start, end)
            if len(mixed) == len(out):
                return mixed
            out[start - self.tokens.start : end - self.tokens.start] = mixed
        return out


def _batch(x: torch.Tensor) -> torch.Tensor:
    """[T, H, D] → [1, H, T, D]."""
    return x.transpose(0, 1)[None]
