"""RMS norm of a residual stream and what is added to it, in one pass over memory."""

import torch
import triton
import triton.language as tl

from kvrelay.kernels.triton.early import begin, early

WIDEST = 32768
"""Elements of a row that one program holds in registers."""


@triton.jit
def _add_norm(
    hidden, delta, weight, eps, out, width, PARTS: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`delta` [parts, T, H]"""
    at = tl.arange(0, BLOCK)
    inside = at < width
    factor = tl.load(weight + at, mask=inside, other=0.0)
    if EARLY:
        begin()
    start = tl.program_id(0).to(tl.int64) * width
    x = tl.load(hidden + start + at, mask=inside, other=0.0)
    if PARTS:
        added = tl.load(delta + start + at, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            added += tl.load(delta + (part * tl.num_programs(0) * width + start) + at, mask=inside, other=0.0).to(
                tl.float32
            )
        x = (x.to(tl.float32) + added.to(x.dtype).to(tl.float32)).to(x.dtype)
        tl.store(hidden + start + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / width + tl.load(eps))
    tl.store(out + start + at, (wide * scale * factor).to(x.dtype), mask=inside)


def add_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Adds `delta` to `hidden` [T, H] in place, rounded to its dtype, and norms what is then there, in float32: [T, H].

    `delta` [T, H], or parts of it [parts, T, H], which are added first, in their order, and rounded as well. `weight` [H] and `eps` are float32. Raises ValueError for rows over `WIDEST`.
    """
    rows, width = hidden.shape
    if width > WIDEST:
        raise ValueError(f"rows of {width} are over {WIDEST}")
    if out is None:
        out = torch.empty_like(hidden)
    if rows:
        block = triton.next_power_of_2(width)
        warps = min(max(block // 256, 1), 16)
        parts = 0 if delta is None else delta.numel() // hidden.numel()
        _add_norm[(rows,)](
            hidden, hidden if delta is None else delta, weight, eps, out, width, PARTS=parts, BLOCK=block, num_warps=warps,
            **early(hidden),
        )  # fmt: skip
    return out
