"""FlashAttention-4 and FlashInfer: which is chosen and why, and what they compute beside attention computed outright.

Where there is no GPU, what stands for them takes the same arguments, demands what they demand, and computes by the twin.
"""

import importlib
import itertools
import random
import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import kvrelay.engine.attention
from kvrelay.common.errors import Unsupported
from kvrelay.engine.attention.prefill import Operands, Prefill, attend
from kvrelay.engine.attention.registry import choose_device
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.gpu.inputs import DeviceInputs, Prompt
from kvrelay.engine.models.config import ModelConfig
from kvrelay.engine.models.rope import RopeSettings
from kvrelay.kernels.ops import SampleParams
from kvrelay.kernels.reference import paged_prefill
from tests.kernels.paged import Paged, check
from tests.kernels.triton_device import DEVICE, ON_GPU

pytestmark = pytest.mark.kernels

DTYPE = torch.bfloat16 if ON_GPU else torch.float16
PACKAGES = {"flash-attention-4": "flash_attn.cute", "flashinfer": "flashinfer"}
MODULES = {"flash-attention-4": "flash", "flashinfer": "flashinfer"}
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=256,
    intermediate_size=10,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    max_positions=4096,
    tie_embeddings=False,
    rope=RopeSettings(),
)


def _flash_attn_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    causal: bool = False,
    out: torch.Tensor,
) -> tuple[torch.Tensor, None]:
    count = len(cu_seqlens_q) - 1
    lengths = [given for given in (cu_seqlens_q, cu_seqlens_k, seqused_k, page_table) if given is not None]
    assert all(given.dtype == torch.int32 and given.stride(-1) == 1 for given in lengths)
    assert q.dtype == k.dtype == v.dtype == out.dtype
    assert out.shape == q.shape
    assert out.is_contiguous()
    assert causal
    if page_table is None:
        assert k.ndim == 3
        assert cu_seqlens_k is not None
        lens = cu_seqlens_k.diff()
        # All keys are one block that begins where the sequence does.
        for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens_k.tolist())):
            one = torch.tensor([0, end - begin])
            tables = torch.zeros(1, 1, dtype=torch.int32)
            out[begin:end] = paged_prefill(
                q[begin:end].float(), k[None, begin:end], v[None, begin:end], tables, one, lens[i : i + 1]
            )
        return out, None
    assert cu_seqlens_k is None
    assert seqused_k is not None
    assert seqused_k.shape == (count,)
    assert page_table.shape[0] == count
    assert k.shape == v.shape == (len(k), k.shape[1], k.shape[2], q.shape[2])
    out.copy_(paged_prefill(q.float(), k, v, page_table, cu_seqlens_q, seqused_k))
    return out, None


class Wrapper:
    """FlashInfer's."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        q_data_type: torch.dtype,
    ) -> None:
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(numbers.dtype == torch.int32 and numbers.is_contiguous() for numbers in given)
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert bool(((paged_kv_last_page_len > 0) & (paged_kv_last_page_len <= page_size)).all())
        assert causal
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self.dtype = q_data_type
        self.starts = qo_indptr
        blocks = paged_kv_indptr.diff().tolist()
        self.tables = torch.nn.utils.rnn.pad_sequence(list(paged_kv_indices.split(blocks)), batch_first=True)
        self.lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        keys, values = paged_kv_cache
        assert q.shape == out.shape == (int(self.starts[-1]), self.shape[0], self.shape[2])
        assert keys.shape[1:] == values.shape[1:] == (self.shape[3], self.shape[1], self.shape[2])
        assert keys.stride() == values.stride()
        assert q.dtype == keys.dtype == out.dtype == self.dtype
        return out.copy_(paged_prefill(q.float(), keys, values, self.tables, self.starts, self.lens))


class Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def forget(name: str) -> None:
    """The module that calls the package, so that it is imported anew."""
    sys.modules.pop(f"kvrelay.engine.attention.{MODULES[name]}", None)
    vars(kvrelay.engine.attention).pop(MODULES[name], None)


@pytest.fixture(params=list(PACKAGES))
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One that is there."""
    name: str = request.param
    if ON_GPU:
        if find_spec(PACKAGES[name].partition(".")[0]) is None:
            pytest.skip(f"{PACKAGES[name]} is not installed")
        yield name
        return
    cute, interface, infer = (types.ModuleType(each) for each in ("cute", "interface", "flashinfer"))
    vars(interface)["_flash_attn_fwd"] = _flash_attn_fwd
    vars(infer)["BatchPrefillWithPagedKVCacheWrapper"] = Wrapper
    packages = {"flash_attn": types.ModuleType("flash_attn"), "flash_attn.cute": cute, "flashinfer": infer}
    for package, module in (packages | {"flash_attn.cute.interface": interface}).items():
        monkeypatch.setitem(sys.modules, package, module)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    forget(name)
    yield name
    forget(name)


@pytest.fixture(params=list(PACKAGES))
def absent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name: str = request.param
    monkeypatch.setitem(sys.modules, PACKAGES[name].partition(".")[0], None)
    forget(name)
    yield name
    forget(name)


def config_of(**options: Any) -> EngineConfig:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128}
    return EngineConfig(model=Path("none"), device=DEVICE, **(sizes | options))


def test_what_is_asked_for_and_absent(absent: str) -> None:
    with pytest.raises(Unsupported, match=rf"{absent}: [\w-]+ is not there .* there are .*{absent} \(cuda\)") as caught:
        choose_device(config_of(attention=absent), MODEL, DTYPE, DTYPE)
    assert caught.value.param == "attention"


def test_what_is_asked_for_and_there(backend: str) -> None:
    made, reason = choose_device(config_of(attention=backend, max_num_seqs=300), MODEL, DTYPE, DTYPE)
    assert made.name == backend
    assert reason.startswith(f"{backend}: prompts by ")
    assert reason.endswith("(asked for)")


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "why"),
    [(torch.float32, torch.float32, "no kernels for torch.float32"), (DTYPE, torch.float8_e4m3fn, "KV is stored as")],
)
def test_types_that_are_refused(backend: str, dtype: torch.dtype, kv_dtype: torch.dtype, why: str) -> None:
    with pytest.raises(Unsupported, match=f"{backend}: .*{why}"):
        choose_device(config_of(attention=backend), MODEL, dtype, kv_dtype)


def test_kernels_that_cannot_be_made(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the error, which may be a compiler's whole output, the first line is told."""

    def fail(self: Any, *args: Any, **options: Any) -> None:
        raise ValueError("no nvcc\nand more")

    calling = importlib.import_module(f"kvrelay.engine.attention.{MODULES[backend]}")
    if backend == "flashinfer":
        monkeypatch.setattr(calling.BatchPrefillWithPagedKVCacheWrapper, "plan", fail)
    else:
        monkeypatch.setattr(calling, "_flash_attn_fwd", fail)
    with pytest.raises(Unsupported, match=rf"\({backend}: ValueError: no nvcc\)"):
        choose_device(config_of(attention=backend), MODEL, DTYPE, DTYPE)


@pytest.mark.skipif(ON_GPU, reason="there cuDNN comes before FlashInfer")
@pytest.mark.parametrize("backend", ["flash-attention-4"], indirect=True)
def test_the_first_that_can_is_chosen(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason says what those before it lack."""
    made, reason = choose_device(config_of(), MODEL, DTYPE, DTYPE)
    assert made.name == "flash-attention-4"
    assert "(the first for this device)" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    made, reason = choose_device(config_of(), MODEL, DTYPE, DTYPE)
    assert made.name == "flashinfer"
    assert "flash-attention-4: it has no kernels on paged KV for compute capability 8.0" in reason
    assert "cudnn: " in reason


@pytest.mark.skipif(ON_GPU, reason="there cuDNN is the first that can")
def test_without_them_triton_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, package in PACKAGES.items():
        monkeypatch.setitem(sys.modules, package.partition(".")[0], None)
        forget(name)
    made, reason = choose_device(config_of(), MODEL, DTYPE, DTYPE)
    assert made.name == "triton"
    assert "flash-attn-4 is not there" in reason
    assert "flashinfer-python is not there" in reason


def prefill_of(backend: str, num_heads: int, num_kv_heads: int, dim: int, block_size: int) -> Prefill:
    calling = importlib.import_module(f"kvrelay.engine.attention.{MODULES[backend]}")
    if backend == "flashinfer":
        planner = calling.Planner(num_heads, num_kv_heads, dim, block_size, DTYPE, DEVICE)
        return Prefill(backend, planner.part)
    made: Prefill = calling.flash_prefill(block_size)
    return made


def step_of(parts: list[tuple[int, int]], num_decodes: int, cache: Paged) -> DeviceInputs:
    """Of parts (tokens, context): what attention reads of it."""
    starts = [0, *itertools.accumulate(tokens for tokens, _ in parts)]
    none = torch.empty(0, device=DEVICE)
    prompts = [
        Prompt(begin, end, context)
        for (begin, end), (_, context) in zip(itertools.pairwise(starts), parts, strict=True)
    ]
    return DeviceInputs(
        token_ids=none,
        positions=none,
        slots=none,
        query_starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        context_lens=cache.lens,
        block_tables=cache.tables,
        last=None,
        feed_rows=none,
        sampling=SampleParams(none, none, none, none, none, none, none),
        num_decodes=num_decodes,
        prompts=tuple(prompts[num_decodes:]),
    )


Step = tuple[list[tuple[int, int]], int, int, int, int, int]
"""Parts (tokens, context), how many of them are decodes, KV heads, query heads of each, head dim, block size."""
STEPS: list[Step] = [
    ([(1, 40), (1, 3), (5, 5), (17, 60), (33, 33), (16, 16), (1, 1), (2, 100)], 2, 2, 2, 64, 16),
    ([(70, 70)], 0, 1, 4, 128, 32),
    ([(3, 64), (1, 65)], 0, 2, 1, 64, 64),
]


def draw(seed: int) -> Step:
    source = random.Random(seed)
    longest = source.choice([40, 300, 2000])
    num_decodes = source.choice([0, 0, 3])
    parts = [(1, source.randint(1, longest)) for _ in range(num_decodes)]
    for _ in range(source.choice([1, 2, 5, 20])):
        tokens = source.choice([1, source.randint(1, longest), longest])
        parts.append((tokens, tokens + source.choice([0, 0, 1, source.randint(1, 4000)])))
    heads = source.choice([1, 2, 8])
    return (
        parts,
        num_decodes,
        heads,
        source.choice([1, 2, 4, 8]),
        source.choice([64, 128, 256]),
        source.choice([16, 32, 64]),
    )


@pytest.mark.parametrize("step", STEPS + [draw(seed) for seed in range(12)] * ON_GPU)
def test_a_step(backend: str, step: Step) -> None:
    """What is behind the step's tokens, in blocks' unused slots and of prompts that are not whole at hand, is NaN: none is read."""
    parts, num_decodes, heads, group, dim, block_size = step
    torch.manual_seed(0)
    cache = Paged([context for _, context in parts], heads, dim, block_size, DTYPE)
    inputs = step_of(parts, num_decodes, cache)
    starts = inputs.query_starts
    num_tokens = int(starts[-1])
    room = torch.full((num_tokens + 7, heads * group, dim), float("nan"), dtype=DTYPE, device=DEVICE)
    q = room[:num_tokens].normal_()
    keys, values = cache.blocks()
    at_hand = torch.full((2, num_tokens, heads, dim), float("nan"), dtype=DTYPE, device=DEVICE)
    for row, prompt in enumerate(inputs.prompts, num_decodes):
        if prompt.whole:
            blocks = cache.tables[row, : -(-prompt.context // block_size)]
            for side, of in enumerate((keys, values)):
                at_hand[side, prompt.start : prompt.end] = of[blocks].flatten(0, 1)[: prompt.context]
    planned = prefill_of(backend, heads * group, heads, dim, block_size).plan(inputs)
    out = torch.full_like(q, float("nan"))
    given = Operands(room, at_hand if any(part.at_hand for part in planned) else None, cache.keys, cache.values)
    assert all(part.rows <= num_tokens for part in planned)
    assert attend(planned, given, out) is out
    assert out[: starts[num_decodes]].isnan().all()
    expected, spread = (
        paged_prefill(q.double(), keys, side, cache.tables, starts, cache.lens) for side in (values, values.abs())
    )
    prompts = slice(int(starts[num_decodes]), None)
    check(out[prompts], expected[prompts], spread[prompts], max(context for _, context in parts))


@pytest.mark.parametrize("backend", ["flash-attention-4"], indirect=True)
def test_runs_that_flash_attention_takes(backend: str) -> None:
    """Whole ones together, on keys at hand; those between them in the cache."""
    parts = [(1, 9), (4, 4), (6, 6), (3, 8), (2, 2)]
    inputs = step_of(parts, 1, Paged([context for _, context in parts], 1, 64, 16, DTYPE))
    planned = prefill_of(backend, 1, 1, 64, 16).plan(inputs)
    assert [(part.tokens, part.at_hand) for part in planned] == [
        (slice(1, 11), True),
        (slice(11, 14), False),
        (slice(14, 16), True),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="nothing is compiled where there is no GPU")
@pytest.mark.parametrize("backend", ["flash-attention-4"], indirect=True)
def test_no_step_waits_for_the_compiler(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flash = importlib.import_module("kvrelay.engine.attention.flash")
    flash.rehearse(8, 2, 128, 16, DTYPE, DEVICE, 512, 300)

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("compiled within a step")

    monkeypatch.setattr(importlib.import_module("flash_attn.cute.interface").cute, "compile", refuse)
    for parts in ([(1, 1)], [(2, 2)] * 256, [(1, 5)] * 299, [(1, 1)] * 299, [(300, 300), (40, 3000), (17, 17)]):
        cache = Paged([context for _, context in parts], 2, 128, 16, DTYPE)
        inputs = step_of(parts, 0, cache)
        q = torch.randn(inputs.prompts[-1].end, 8, 128, device=DEVICE).to(DTYPE)
        at_hand = torch.randn(2, len(q), 2, 128, device=DEVICE).to(DTYPE)
        out = torch.empty_like(q)
        attend(prefill_of(backend, 8, 2, 128, 16).plan(inputs), Operands(q, at_hand, cache.keys, cache.values), out)
        assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="there is no device to wait for")
def test_no_step_waits_for_the_device(backend: str) -> None:
    parts = [(1, 9), (200, 200), (64, 500)]
    cache = Paged([context for _, context in parts], 2, 64, 16, DTYPE)
    inputs = step_of(parts, 1, cache)
    prefill = prefill_of(backend, 4, 2, 64, 16)
    q = torch.randn(265, 4, 64, device=DEVICE).to(DTYPE)
    at_hand = torch.randn(2, 265, 2, 64, device=DEVICE).to(DTYPE)

    def step() -> None:
        attend(prefill.plan(inputs), Operands(q, at_hand, cache.keys, cache.values), torch.empty_like(q))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
