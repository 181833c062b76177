"""Inputs of attention on paged KV, and how far from its twin in float64 a result may be.

A result is the mean of values by weights, so whatever changes each weight by a relative e changes it by
at most e times the mean of the values' magnitudes, `spread`, which the twin gives too. Weights are rounded to the values' type
(u: 2^-8 for bfloat16, 2^-11 for float16) and so is the result. Scores are sums of D products in float32, whose error is at
most √D 2^-24 |q| |k|, 2^-12 for D = 256 and normal q and k, on the weight and on what it is divided by. Roundings have no
common sign, so what is seen in float32 is about the root of that; 2^-16 would still catch products in tf32 (2^-11).
float16 has nothing under 2^-24: each weight may lose half of that of the largest, which is 1.
"""

import torch

from tests.kernels.triton_device import DEVICE

TOLERANCE = {torch.float32: 2**-16, torch.float16: 2 * 2**-11 + 2**-11, torch.bfloat16: 2 * 2**-8 + 2**-11}


class Paged:
    """Sequences of these lengths whose blocks lie in no order; every slot that no sequence owns holds NaN."""

    def __init__(self, lens: list[int], heads: int, dim: int, block_size: int, dtype: torch.dtype) -> None:
        self.block_size = block_size
        # A column more than the longest needs, in rows of a wider table.
        width = max(-(-length // block_size) for length in lens) + 1
        blocks = sum(-(-length // block_size) for length in lens) + 3
        order = torch.randperm(blocks)
        self.tables = torch.full((len(lens), width + 5), 2**30, dtype=torch.int32)[:, :width]
        slots = []
        for table, length in zip(self.tables, lens, strict=True):
            needed = -(-length // block_size)
            table[:needed], order = order[:needed], order[needed:]
            tokens = torch.arange(length)
            slots.append(table[tokens // block_size].long() * block_size + tokens % block_size)
        owned = torch.cat(slots).to(DEVICE)
        shape = (blocks * block_size, heads, dim)
        self.keys, self.values = (torch.full(shape, float("nan"), dtype=dtype, device=DEVICE) for _ in "kv")
        for side in (self.keys, self.values):
            side[owned] = torch.randn(len(owned), heads, dim, device=DEVICE).to(dtype)
        self.tables = self.tables.to(DEVICE)
        self.lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)

    def blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As the twins take them."""
        keys, values = (side.unflatten(0, (-1, self.block_size)) for side in (self.keys, self.values))
        return keys, values


def check(out: torch.Tensor, expected: torch.Tensor, spread: torch.Tensor, tokens: int) -> None:
    allowed = TOLERANCE[out.dtype] * spread
    if out.dtype is torch.float16:
        allowed += tokens * 2**-25 * 5
    excess = (out.double() - expected).abs() - allowed
    assert not out.isnan().any()
    assert float(excess.max()) <= 0, f"by up to {float((out.double() - expected).abs().max())}"
