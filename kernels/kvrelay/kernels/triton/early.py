"""Programmatic dependent launch: a kernel's programs take their places while those of the kernel before still run, and wait
for its results only where they need them.

A kernel waits in each of its programs, so that one that is over has all those before it behind it; until then it reads but
what no kernel writes.
"""

import functools
from typing import TypedDict

import torch
import triton
import triton.language as tl
from triton.language import core
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class Launch(TypedDict):
    """Arguments of a launch."""

    EARLY: bool
    launch_pdl: bool


def early(like: torch.Tensor, wanted: bool = True) -> Launch:
    """For kernels on what is on `like`'s device: early where it can be."""
    able = wanted and like.is_cuda and _is_able(like.device)
    return {"EARLY": able, "launch_pdl": able}


@functools.cache
def _is_able(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@core.extern
def begin(_semantic=None):
    """Lets the next kernel launch, and waits for the one before. No function of Triton's: the interpreter is slow at those."""
    gdc_launch_dependents(_semantic=_semantic)
    gdc_wait(_semantic=_semantic)


@triton.jit
def fetch_rows(begin, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Asks memory for rows, which begin at `begin` [ROWS, 1] and are contiguous, into the second-level cache."""
    LINE: tl.constexpr = 1024 // begin.dtype.element_ty.primitive_bitwidth
    lines = tl.arange(0, triton.next_power_of_2((COLUMNS + LINE - 1) // LINE))
    at = begin + tl.minimum(lines * LINE, COLUMNS - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )
