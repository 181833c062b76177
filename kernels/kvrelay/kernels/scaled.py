"""Matrices in 8 bits, with a scale for each row."""

import dataclasses

import torch

LARGEST = 448.0
"""Of float8_e4m3fn."""
LEAST = 2.0**-100
"""What a row's largest magnitude counts as at least: scales and their inverses are normal numbers, also of a row of zeros."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """Of a weight: a scale an output channel; of activations: one a token."""

    values: torch.Tensor
    """float8_e4m3fn, [R, K]; with its scale, a row's largest is 448."""
    scale: torch.Tensor
    """float32, [R]"""

    def __len__(self) -> int:
        return len(self.values)

    def wide(self, dtype: torch.dtype) -> torch.Tensor:
        """What it stands for, rounded to `dtype`."""
        return (self.values.to(torch.float32) * self.scale.unsqueeze(1)).to(dtype)


def quantize(x: torch.Tensor) -> Scaled:
    """x [R, K], rounded to nearest. A row that is not finite has a NaN in it still."""
    wide = x.to(torch.float32)
    largest = wide.abs().amax(1).clamp(min=LEAST)
    # By a tensor, as torch rounds twice where a number is divided, and on a GPU where one divides.
    bound = torch.full_like(largest, LARGEST)
    values = (wide * (bound / largest).unsqueeze(1)).clamp_(-LARGEST, LARGEST)
    return Scaled(values.to(torch.float8_e4m3fn), largest / bound)
