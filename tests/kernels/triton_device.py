"""Where Triton's kernels are tested: on a GPU, or in Triton's interpreter. That must be chosen before a kernel is imported, so
this module is imported first."""

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

ON_GPU = DEVICE == "cuda"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
KV_DTYPES = DTYPES + [torch.float8_e4m3fn] * ON_GPU
"""The interpreter cuts off where it should round, for those two."""
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""The step between neighbours, relative to the smaller at most: how far results are apart that were rounded from numbers close by."""
