"""Changes of single logits before a token is chosen: bias, penalties, tokens that may not come."""

import dataclasses

import torch
import triton
import triton.language as tl

_BLOCK = 256


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Edits:
    """Of N logits, on the device, each [N]; in this order, as the engine's `penalties` has it."""

    at: torch.Tensor
    """int64: row × vocabulary + token, each once; -1 is padding"""
    bias: torch.Tensor
    """float32, is added"""
    repetition: torch.Tensor
    """float32, divides what is positive and multiplies the rest; 1 for none"""
    frequency: torch.Tensor
    """float32, is subtracted: the penalty times the token's count"""
    presence: torch.Tensor
    """float32, is subtracted then; 0 where the count is"""
    masked: torch.Tensor
    """bool: becomes -inf"""


@triton.jit
def _edit(logits, places, biases, repetitions, frequencies, presences, masks, count, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    at = tl.load(places + entry, mask=inside, other=-1)
    real = at >= 0
    x = tl.load(logits + at, mask=real, other=0.0).to(tl.float32)
    x += tl.load(biases + entry, mask=inside, other=0.0)
    repetition = tl.load(repetitions + entry, mask=inside, other=1.0)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x -= tl.load(frequencies + entry, mask=inside, other=0.0)
    x -= tl.load(presences + entry, mask=inside, other=0.0)
    x = tl.where(tl.load(masks + entry, mask=inside, other=0) != 0, float("-inf"), x)
    tl.store(logits + at, x.to(logits.dtype.element_ty), mask=real)


def edit(logits: torch.Tensor, edits: Edits) -> None:
    """Changes `logits` [R, V], contiguous, in place; float32 until they are stored. In float32 bit for bit as on a CPU."""
    count = len(edits.at)
    if count:
        _edit[(triton.cdiv(count, _BLOCK),)](
            logits, edits.at, edits.bias, edits.repetition, edits.frequency, edits.presence, edits.masked, count,
            BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
