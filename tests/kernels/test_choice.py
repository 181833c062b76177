"""Which kernels a process takes, what it does without, and what it keeps of them on disk. The processes have threads of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvrelay.kernels import ops as kernel_ops
from kvrelay.kernels.cpu import compiled, openmp
from kvrelay.kernels.cpu.ops import CompiledOps
from kvrelay.kernels.ops import choose_ops

pytestmark = pytest.mark.kernels


def test_choice() -> None:
    assert choose_ops("cpu", torch.bfloat16)[0].name == "compiled"
    assert choose_ops("cpu", torch.bfloat16, "torch")[0].name == "torch"
    assert choose_ops("cpu", torch.float16)[0].name == "torch"
    assert choose_ops("cuda:0", torch.bfloat16, "torch")[0].name == "torch"
    with pytest.raises(ValueError, match="float16"):
        choose_ops("cpu", torch.float16, "compiled")
    with pytest.raises(ValueError, match="fast"):
        choose_ops("cpu", torch.float32, "fast")


def test_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another build of torch: serving goes on with torch's own operations, and says why."""

    def none() -> openmp.OpenMp:
        raise openmp.NoThreads("torch brought no GNU OpenMP into this process")

    monkeypatch.setattr(openmp, "openmp", none)
    for kernel in (compiled.add_norm_kernel, compiled.rotate_kernel, compiled.silu_gate_kernel):
        kernel.cache_clear()
    found, reason = kernel_ops.choose_ops("cpu", torch.float32)
    assert (found.name, reason) == ("torch", "torch: torch brought no GNU OpenMP into this process")
    with pytest.raises(ValueError, match="no GNU OpenMP"):
        kernel_ops.choose_ops("cpu", torch.float32, "compiled")


CHOOSE = """
import sys
{before}
import torch
from kvrelay.kernels.ops import choose_ops, Norm
ops, reason = choose_ops("cpu", torch.float32)
x = torch.full((1, 4), 3.0)
print(reason, ops.add_norm(x, None, Norm(torch.ones(4), torch.tensor(0.0))).tolist())
"""


@pytest.mark.parametrize(
    ("before", "environment", "expected"),
    [
        ("", {"NUMBA_CACHE_DIR": "/proc/none"}, "compiled: by numba, on torch's threads"),
        ("sys.modules['numba'] = None", {}, "torch: numba is not there"),
    ],
    ids=["nowhere to keep kernels", "no numba"],
)
def test_a_process_with_less(before: str, environment: dict[str, str], expected: str) -> None:
    line = [sys.executable, "-c", CHOOSE.format(before=before)]
    done = subprocess.run(line, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(expected)
    assert done.stdout.endswith("[[1.0, 1.0, 1.0, 1.0]]\n")


RESULTS = """
import hashlib, sys
import numpy as np, torch
from kvrelay.kernels.ops import Norm
from kvrelay.kernels.cpu.ops import CompiledOps, DecodeKernel
for dtype in map(torch.__dict__.get, sys.argv[1:]):
    torch.manual_seed(0)
    rand = lambda *shape: torch.randn(shape).to(dtype)
    ops, norm = CompiledOps(dtype), Norm(torch.rand(576), torch.tensor(1e-5))
    x = [ops.add_norm(rand(200, 576), rand(200, 576), norm), ops.silu_gate(rand(200, 3072))]
    x.append(ops.rotate(rand(200, 12, 64), rand(200, 1, 64), rand(200, 1, 64), Norm(torch.rand(12, 64), torch.tensor(1e-5))))
    step = DecodeKernel(9, 3, 64, dtype, dtype).prepare(np.arange(100, dtype=np.int32).reshape(2, 50), np.array([40, 700]), 16)
    x.append(step(rand(2, 9, 64), rand(2, 3, 64), rand(2, 3, 64), rand(1600, 3, 64), rand(1600, 3, 64)))
    print(dtype, [hashlib.md5(y.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for y in x])
"""


def test_results_are_the_same_compiled_anew_and_from_the_cache(tmp_path: Path) -> None:
    """To the bit, in whatever order kernels are compiled, and on any number of threads: else a restarted pod would answer otherwise."""

    def run(cache: Path, threads: int, *dtypes: str) -> list[str]:
        line = [sys.executable, "-c", RESULTS, *dtypes]
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
        return sorted(done.stdout.splitlines())

    anew = run(tmp_path / "a", 2, "float32", "bfloat16")
    assert len(anew) == 2
    assert run(tmp_path / "a", 1, "float32", "bfloat16") == anew
    assert run(tmp_path / "b", 2, "bfloat16", "float32") == anew


def test_kernels_are_kept_on_disk() -> None:
    """A process that starts later does not compile again."""
    CompiledOps(torch.float32)
    folder = Path(compiled.__file__).parent / "__pycache__"
    assert list(folder.glob("compiled.*add_norm*.nbi"))
