"""Where Triton's kernels are tested: on a GPU, or in the interpreter (see `conftest`)."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
KV_DTYPES = DTYPES + [torch.float8_e4m3fn] * ON_GPU
"""The interpreter cuts off where it should round, for those two."""
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""The step between neighbours, relative to the smaller at most: how far results are apart that were rounded from numbers close by."""
