"""The kernels in plain torch: what they are tested against, and what runs where they do not."""

import functools
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import xxhash

from kvrelay.kernels.scaled import Scaled, quantize

if TYPE_CHECKING:
    from kvrelay.kernels.ops import Norm

LEAF_BYTES = 16 << 10
"""As `transfer.checksum` has it."""
FEW_TOKENS = 16
"""Up to which a product with a weight in 8 bits takes the tokens as they are: most of its time is the weight's reading, not the arithmetic."""


class ReferenceOps:
    """See `Ops`."""

    name = "torch"

    def add_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: "Norm") -> torch.Tensor:
        if delta is not None:
            hidden.add_(delta if delta.dim() == 2 else functools.reduce(torch.add, delta).to(hidden.dtype))
        return rms_norm(hidden, norm)

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: "Norm | None") -> torch.Tensor:
        if norm is not None:
            heads = rms_norm(heads, norm)
        # The sine carries the sign, so that swapping the halves is all that is left.
        return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)

    def silu_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | Scaled,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if isinstance(weight, Scaled):
            return scaled_product(x, weight, bias, dtype)
        if dtype is None or dtype is x.dtype:
            return F.linear(x, weight, bias)
        if x.is_cuda and bias is None:
            return torch.mm(x, weight.T, out_dtype=dtype)
        return F.linear(x, weight, bias).to(dtype)

    def added_product(
        self, x: torch.Tensor, weight: torch.Tensor | Scaled, bias: torch.Tensor | None, hidden: torch.Tensor
    ) -> torch.Tensor | None:
        return self.product(x, weight, bias)

    def gated_product(
        self, x: torch.Tensor, weight: torch.Tensor | Scaled, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.silu_gate(self.product(x, weight, bias))


def rms_norm(x: torch.Tensor, norm: "Norm") -> torch.Tensor:
    """Along the last dimension of x [..., H], in float32. Fewer, cheaper operations than torch's own on a CPU."""
    wide = x.to(torch.float32)
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(norm.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    return (wide * scale).mul_(norm.weight).to(x.dtype)


def scaled_product(
    x: torch.Tensor, weight: Scaled, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [T, K] by `weight` [N, K] → [T, N], as `dtype` or x's: sums of float32, times the scales, and the bias, rounded once.

    More than `FEW_TOKENS` are quantized first, each with a scale of its own.
    """
    factor = weight.values.to(torch.float32)
    if len(x) <= FEW_TOKENS:
        y = F.linear(x.to(torch.float32), factor) * weight.scale
    else:
        rows = quantize(x)
        y = F.linear(rows.values.to(torch.float32), factor) * rows.scale.unsqueeze(1) * weight.scale
    return (y if bias is None else y + bias).to(dtype or x.dtype)


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    lens: torch.Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """`q` [S, Hq, D], one token a sequence, on the first `lens` [S] tokens of its blocks; zeros for none. Cached `keys` and
    `values` [blocks, block size, Hkv, D]; `block_tables` [S, …]. See `paged_prefill`."""
    starts = lens.clamp(max=1).cumsum(0)
    starts = torch.cat((starts.new_zeros(1), starts))
    packed = paged_prefill(q[lens > 0], keys, values, block_tables, starts, lens, window=window, softcap=softcap)
    return q.new_zeros(q.shape).masked_scatter_((lens > 0)[:, None, None], packed)


def paged_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Parts of S sequences: `q` [T, Hq, D], a part's tokens from `query_starts` [S + 1] on, the last ones of the first
    `context_lens` [S] tokens of its blocks; zeros behind the last part. Causal; the last `window` tokens alone, the query's own
    with them; scores bent to ±`softcap` by tanh. Cached `keys` and `values` [blocks, block size, Hkv, D]; `block_tables` [S, …]."""
    out = torch.zeros_like(q)
    starts = query_starts.tolist()
    for (begin, end), table, context in zip(pairwise(starts), block_tables, context_lens.tolist(), strict=True):
        blocks = table[: -(-context // keys.shape[1])]
        k, v = (side[blocks].flatten(0, 1)[:context].to(q.dtype) for side in (keys, values))
        grouped = q[begin:end].unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("qhgd,nhd->hgqn", grouped, k) * q.shape[2] ** -0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(context - (end - begin), context, device=q.device)[:, None] - torch.arange(
            context, device=q.device
        )
        hidden = (behind < 0) | (behind >= (window or context))
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hgqn,nhd->qhgd", weights, v).flatten(1, 2)
    return out


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    norm: "Norm | None",
    kv_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Heads `qkv` [T, Hq + 2 Hkv, D] of tokens at `positions` [T]: queries and keys are normed, if so asked (`norm` is of
    [Hq + Hkv, D]), and turned by the float32 tables `cos` and `sin` [positions, D / 2]. Keys and values go into the cached
    `keys` and `values` [slots, Hkv, D] at `slots` int64 [T], nowhere where that is -1; those of all tokens into `kv_out`
    [2, T, Hkv, D] as well, in the model's dtype. Gives the queries, [T, Hq, D].

    Everything is float32 until a result is rounded to the model's dtype; from that, the cache's (what is too large for
    8 bits becomes the largest).
    """
    num_kv = keys.shape[1]
    num_turned = qkv.shape[1] - num_kv
    turned = qkv[:, :num_turned].to(torch.float32)
    if norm is not None:
        turned = rms_norm(turned, norm)
    first, second = turned.chunk(2, -1)
    real_cos, real_sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    turned = torch.cat((first * real_cos - second * real_sin, second * real_cos + first * real_sin), -1).to(qkv.dtype)
    kept = slots >= 0
    for cached, new in ((keys, turned[:, -num_kv:]), (values, qkv[:, num_turned:])):
        cached[slots[kept]] = narrow(new[kept], cached.dtype)
    if kv_out is not None:
        kv_out[0], kv_out[1] = turned[:, -num_kv:], qkv[:, num_turned:]
    return turned[:, :-num_kv].contiguous()


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To a cache's dtype. torch itself would make NaN of what is too large for 8 bits."""
    if dtype is torch.float8_e4m3fn:
        x = x.clamp(-448.0, 448.0)
    return x.to(dtype)


def pack(planes: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor) -> None:
    """Runs of L rows each out of all P planes (keys and values of layers): from `planes` [P, slots, E], beginning at `slots`
    int64 [N], into `packed` [N, P, L, E], as its dtype. Bits are copied where dtypes are the same."""
    packed.copy_(_as(planes[:, _rows(slots, packed)].transpose(0, 1), packed.dtype))


def unpack(planes: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor) -> None:
    """What `pack` gave, into `planes`, as their dtype. No row is in two runs."""
    planes[:, _rows(slots, packed)] = _as(packed.transpose(0, 1), planes.dtype)


def _rows(slots: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return slots[:, None] + torch.arange(packed.shape[2], device=slots.device)


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype is dtype else narrow(x, dtype)


def leaves(data: torch.Tensor) -> torch.Tensor:
    """XXH3-64 of each 16 KiB, and of what is left, of each of `data` uint8 [N, size]: uint64 [N, leaves]."""
    rows = data.cpu().numpy()
    starts = range(0, data.shape[1], LEAF_BYTES)
    found = [[xxhash.xxh3_64_intdigest(row[start : start + LEAF_BYTES]) for start in starts] for row in rows]
    return torch.tensor(found, dtype=torch.uint64, device=data.device).view(len(data), len(starts))
