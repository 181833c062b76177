"""Whole prompts on their own keys: against attention computed outright, and which parts of a step are such."""

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend

from kvrelay.engine.attention.prefill import divide
from kvrelay.engine.attention.whole import WholePrompts, padded
from kvrelay.engine.gpu.inputs import Prompt
from tests.kernels.triton_device import DEVICE, ON_GPU

pytestmark = pytest.mark.kernels

BACKENDS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION] + [SDPBackend.CUDNN_ATTENTION] * ON_GPU
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def outright(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (side.double().repeat_interleave(q.shape[1] // side.shape[1], 1) for side in (k, v))
    scores = torch.einsum("qhd,nhd->hqn", q.double(), k) * q.shape[2] ** -0.5
    scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu_(1), float("-inf"))
    return torch.einsum("hqn,nhd->qhd", scores.softmax(-1), v)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [2, 64, 65, 100] + [1024, 1300, 3000] * ON_GPU)
def test_a_prompt_between_others(backend: SDPBackend, length: int) -> None:
    """What the next prompt and the room behind hold, NaN here, does not matter."""
    torch.manual_seed(0)
    start, end = 3, 3 + length
    attend = WholePrompts(backend, 8, 2, 64, DTYPE, DEVICE)
    q, kv = torch.full((start + padded(length) + 5, 8, 64), float("nan")), torch.full((2, end + 2, 2, 64), float("nan"))
    q[start:end], kv[:, start:end] = torch.randn(length, 8, 64), torch.randn(2, length, 2, 64)
    q, kv = q.to(DEVICE, DTYPE), kv.to(DEVICE, DTYPE)
    out = attend(q, kv, start, end)
    assert out.shape == (length, 8, 64)
    expected = outright(q[start:end], kv[0, start:end], kv[1, start:end])
    tolerance = 2**-6 if ON_GPU else 2**-16
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_lengths_are_few_and_near() -> None:
    lengths = {length: padded(length) for length in range(1, 16385)}
    assert all(length <= rows <= length * 9 / 8 + 1 for length, rows in lengths.items())
    assert len({rows for length, rows in lengths.items() if length >= 1024}) == 33
    assert all(padded(rows) == rows for rows in lengths.values())


def test_rehearsal_names_all_lengths() -> None:
    attend = WholePrompts(SDPBackend.MATH, 2, 1, 64, torch.float32, DEVICE, from_tokens=60)
    assert attend.rehearse(100) == [60, 64, 72, 80, 88, 96, 104]
    assert attend.rehearse(59) == []


def test_what_is_computed_as_whole() -> None:
    sizes = [(5, False), (9, True), (2, True), (3, False), (10, True), (12, True), (20, False)]
    ends = itertools.accumulate(size for size, _ in sizes)
    prompts = tuple(
        Prompt(end - size, end, size if whole else size + 1) for (size, whole), end in zip(sizes, ends, strict=True)
    )
    assert [(run.first, run.prompts, run.whole, run.tokens) for run in divide(prompts, 9)] == [
        (0, prompts[:1], False, slice(0, 5)),
        (1, prompts[1:2], True, slice(5, 14)),
        (2, prompts[2:4], False, slice(14, 19)),
        (4, prompts[4:6], True, slice(19, 41)),
        (6, prompts[6:], False, slice(41, 61)),
    ]
    (run,) = divide(prompts, 100)
    assert (run.prompts, run.whole) == (prompts, False)
    assert divide((), 1) == []


@pytest.mark.skipif(ON_GPU, reason="there cuDNN can be had")
def test_without_a_gpu_cudnn_cannot() -> None:
    assert WholePrompts(SDPBackend.CUDNN_ATTENTION, 8, 2, 64, torch.float16, "cpu").reason_against_cudnn()
