"""KV out of its blocks into one contiguous piece of memory, and back, all layers in one launch."""

import torch
import triton
import triton.language as tl

_PROGRAM_BYTES = 16 << 10
"""That a program moves at most, counted in the wider of the two types: eight times 16 bytes a thread."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@triton.jit
def _move(
    planes, plane_stride, slots, packed, run_stride, side_stride, num_planes,
    ROW: tl.constexpr, RUN: tl.constexpr, PACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    run, plane = program // num_planes, program % num_planes
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < RUN
    cached = planes + plane * plane_stride + tl.load(slots + run) * ROW + at
    moved = packed + run * run_stride + plane * side_stride + at
    source, target = (cached, moved) if PACK else (moved, cached)
    x = tl.load(source, mask=inside)
    if source.dtype.element_ty != target.dtype.element_ty:
        x = x.to(tl.float32).to(target.dtype.element_ty)
    tl.store(target, x, mask=inside)


def pack(planes: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor) -> None:
    """See `reference.pack`. A token's row in a plane, and a run of rows in `packed`, are contiguous."""
    _launch(planes, slots, packed, is_pack=True)


def unpack(planes: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor) -> None:
    """See `reference.unpack`."""
    _launch(planes, slots, packed, is_pack=False)


def _launch(planes: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor, *, is_pack: bool) -> None:
    runs, num_planes, length, row = packed.shape
    if not packed.numel():
        return
    widest = max(planes.itemsize, packed.itemsize)
    if planes.dtype is packed.dtype:  # bits as they are, and no compilation for each type
        planes, packed = (x.view(_BITS[widest]) for x in (planes, packed))
    block = min(triton.next_power_of_2(length * row), _PROGRAM_BYTES // widest)
    _move[(runs * num_planes, triton.cdiv(length * row, block))](
        planes, planes.stride(0), slots, packed, packed.stride(0), packed.stride(1), num_planes,
        ROW=row, RUN=length * row, PACK=is_pack, BLOCK=block, num_warps=min(max(block * widest // 4096, 1), 4),
    )  # fmt: skip
