"""Rotary embeddings with the norm of each head, alone or together with the write of KV into its blocks.

Heads are in the half-split order of Hugging Face checkpoints: element i turns with element i + D / 2.
"""

import torch
import triton
import triton.language as tl

from kvrelay.kernels.ops import Norm
from kvrelay.kernels.triton.early import begin, early

_FEW_TOKENS = 64
"""Up to which the heads of a token are spread over more programs."""


@triton.jit
def _turn(
    first,
    second,
    cos_first,
    cos_second,
    sin_first,
    sin_second,
    weight,
    eps,
    inside,
    NORM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Halves of heads [heads, half] in float32, normed and turned. `weight` points to the elements of the first halves."""
    if NORM:
        length = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        scale = tl.rsqrt(length / DIM + tl.load(eps))
        first *= scale * tl.load(weight, mask=inside, other=0.0)
        second *= scale * tl.load(weight + DIM // 2, mask=inside, other=0.0)
    return first * cos_first + second * sin_first, second * cos_second + first * sin_second


@triton.jit
def _rotate(
    heads,
    stride,
    count,
    cos,
    sin,
    weight,
    eps,
    NORM: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF)[None, :]
    inside = (head < count) & (at < DIM // 2)
    place = heads + token * stride + head * DIM + at
    first = tl.load(place, mask=inside, other=0.0)
    second = tl.load(place + DIM // 2, mask=inside, other=0.0)
    turn = token * DIM + at
    real = at < DIM // 2
    turned_first, turned_second = _turn(
        first.to(tl.float32),
        second.to(tl.float32),
        tl.load(cos + turn, mask=real, other=0.0).to(tl.float32),
        tl.load(cos + turn + DIM // 2, mask=real, other=0.0).to(tl.float32),
        tl.load(sin + turn, mask=real, other=0.0).to(tl.float32),
        tl.load(sin + turn + DIM // 2, mask=real, other=0.0).to(tl.float32),
        weight + head * DIM + at,
        eps,
        inside,
        NORM,
        DIM,
    )
    tl.store(place, turned_first.to(first.dtype), mask=inside)
    tl.store(place + DIM // 2, turned_second.to(first.dtype), mask=inside)


@triton.jit
def _rotate_and_store(
    qkv, stride, num_q, num_kv, cos, sin, positions, slots, weight, eps, q, kv, keys, values,
    NORM: tl.constexpr, KEEP: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        begin()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF)[None, :]
    real = at < DIM // 2
    inside = (head < num_q + 2 * num_kv) & real
    source = qkv + token * stride + head * DIM + at
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + DIM // 2, mask=inside, other=0.0)

    turn = tl.load(positions + token).to(tl.int64) * (DIM // 2) + at
    real_cos = tl.load(cos + turn, mask=real, other=0.0)
    real_sin = tl.load(sin + turn, mask=real, other=0.0)
    turns = inside & (head < num_q + num_kv)
    turned_first, turned_second = _turn(
        first.to(tl.float32), second.to(tl.float32), real_cos, real_cos, -real_sin, real_sin,
        weight + head * DIM + at, eps, turns, NORM, DIM,
    )  # fmt: skip
    first = tl.where(turns, turned_first.to(first.dtype), first)
    second = tl.where(turns, turned_second.to(second.dtype), second)

    is_q = inside & (head < num_q)
    to_q = q + (token * num_q + head) * DIM + at
    tl.store(to_q, first, mask=is_q)
    tl.store(to_q + DIM // 2, second, mask=is_q)

    if KEEP:
        # Keys of all tokens, then values of all.
        is_kv = inside & (head >= num_q)
        is_value = head >= num_q + num_kv
        side = tl.where(is_value, tl.num_programs(0).to(tl.int64) * num_kv, 0)
        to_kv = kv + (side + token * num_kv + head - num_q - tl.where(is_value, num_kv, 0)) * DIM + at
        tl.store(to_kv, first, mask=is_kv)
        tl.store(to_kv + DIM // 2, second, mask=is_kv)

    slot = tl.load(slots + token)
    kept = inside & (slot >= 0)
    row = slot * num_kv * DIM + at
    first = first.to(tl.float32).to(keys.dtype.element_ty)
    second = second.to(tl.float32).to(keys.dtype.element_ty)
    is_k = kept & (head >= num_q) & (head < num_q + num_kv)
    to_k = keys + row + (head - num_q) * DIM
    tl.store(to_k, first, mask=is_k)
    tl.store(to_k + DIM // 2, second, mask=is_k)
    is_v = kept & (head >= num_q + num_kv)
    to_v = values + row + (head - num_q - num_kv) * DIM
    tl.store(to_v, first, mask=is_v)
    tl.store(to_v + DIM // 2, second, mask=is_v)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """See `Ops.rotate`. The result lies where `heads` were."""
    tokens, count, dim = heads.shape
    if tokens:
        half, block, warps = _shape(tokens, count, dim)
        weight, eps = (cos, cos) if norm is None else (norm.weight, norm.eps)
        _rotate[(tokens, triton.cdiv(count, block))](
            heads, heads.stride(0), count, cos, sin, weight, eps,
            NORM=norm is not None, DIM=dim, HALF=half, HEADS=block, num_warps=warps,
        )  # fmt: skip
    return heads


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    norm: Norm | None,
    out: torch.Tensor | None = None,
    kv_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.rotate_and_store`, whose results it gives but for rounding. A token's `qkv` are contiguous; `out` and
    `kv_out` are."""
    tokens, heads, dim = qkv.shape
    num_kv = keys.shape[1]
    num_q = heads - 2 * num_kv
    if out is None:
        out = qkv.new_empty((tokens, num_q, dim))
    if tokens:
        half, block, warps = _shape(tokens, heads, dim)
        weight, eps = (cos, cos) if norm is None else (norm.weight, norm.eps)
        _rotate_and_store[(tokens, triton.cdiv(heads, block))](
            qkv, qkv.stride(0), num_q, num_kv, cos, sin, positions, slots, weight, eps, out,
            out if kv_out is None else kv_out, keys, values, NORM=norm is not None, KEEP=kv_out is not None,
            DIM=dim, HALF=half, HEADS=block, num_warps=warps, **early(qkv),
        )  # fmt: skip
    return out


def _shape(tokens: int, heads: int, dim: int) -> tuple[int, int, int]:
    """Elements of half a head, heads of a program, warps: 8 elements of each half a thread, as one load takes."""
    half = triton.next_power_of_2(dim // 2)
    block = min(4 if tokens <= _FEW_TOKENS else 16, triton.next_power_of_2(heads))
    return half, block, min(max(block * half // 256, 1), 8)
