"""The CPU backend against attention written out, over mixed batches; the KV cache's rows and conversions."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrelay.common.errors import Unsupported
from kvrelay.common.ids import Fingerprint
from kvrelay.common.layout import KvDtype
from kvrelay.engine.attention import cpu, gathered
from kvrelay.engine.attention.base import AttentionBatch
from kvrelay.engine.attention.registry import choose
from kvrelay.engine.cache import TORCH_DTYPES, KvCache, kv_dtype_of
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.convert import convert
from kvrelay.engine.gpu.cache import DeviceKvCache
from kvrelay.engine.models.config import ModelConfig
from kvrelay.engine.models.rope import RopeSettings
from kvrelay.transfer.copies import Part

pytestmark = pytest.mark.unit

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=48,
    intermediate_size=10,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    max_positions=4096,
    tie_embeddings=False,
    rope=RopeSettings(),
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def cache(block_size: int = 16, dtype: KvDtype = KvDtype.FLOAT32, num_bytes: int = 2 << 20) -> KvCache:
    return KvCache(MODEL, dtype, block_size, num_bytes)


def device_cache(dtype: KvDtype) -> KvCache:
    """The GPU's, here in the memory of the CPU."""
    return DeviceKvCache(MODEL, dtype, 16, 2 << 20, torch.device("cpu"))


KINDS = pytest.mark.parametrize("make", [cache, device_cache])


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`q` [T, Hq, D] are the last of the L tokens of `k`, `v` [L, Hkv, D]; in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("thd,lhd->htl", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu_(len(k) - len(q) + 1)
    return torch.einsum("htl,lhd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


class Batch:
    """Sequences of (computed before, computed now), whose blocks are shuffled."""

    def __init__(self, kv: KvCache, parts: list[tuple[int, int]]) -> None:
        generator = torch.Generator().manual_seed(len(parts))
        self.kv = kv
        self.parts = parts
        free = torch.randperm(kv.num_blocks, generator=generator).tolist()
        self.blocks = [[free.pop() for _ in range(-(-sum(part) // kv.block_size))] for part in parts]
        self.k, self.v = (
            [torch.randn(sum(part), MODEL.num_kv_heads, MODEL.head_dim, generator=generator) for part in parts]
            for _ in range(2)
        )
        self.q = [torch.randn(now, MODEL.num_heads, MODEL.head_dim, generator=generator) for _, now in parts]

    def slots(self, index: int, first: int, count: int) -> torch.Tensor:
        return torch.from_numpy(self.kv.slots(self.blocks[index], first, count))

    def run(self, layer: int, padding: int = 0, attention: str = "auto") -> torch.Tensor:
        for i, (before, _) in enumerate(self.parts):
            self.kv.write(
                layer, self.slots(i, 0, before), *(x[i][:before].to(self.kv.data.dtype) for x in (self.k, self.v))
            )
        width = max(len(blocks) for blocks in self.blocks)
        counts = np.array([now for _, now in self.parts])
        batch = AttentionBatch(
            query_starts=np.concatenate(([0], counts.cumsum())),
            context_lens=np.array([sum(part) for part in self.parts]),
            # Beyond a sequence's own blocks stand numbers that must not matter.
            block_tables=np.array([b + [self.kv.num_blocks - 1] * (width - len(b)) for b in self.blocks], np.int32),
            slots=np.concatenate([self.slots(i, before, now).numpy() for i, (before, now) in enumerate(self.parts)]),
            num_decodes=int((counts == 1).cumprod().sum()),
        )

        def now(rows: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(
                [
                    *(x[len(x) - n :] for x, n in zip(rows, counts, strict=True)),
                    rows[0].new_ones((padding, *rows[0].shape[1:])),
                ]
            )

        config = EngineConfig(model=Path("none"), attention=attention)
        backend, _ = choose(config, MODEL, torch.float32, self.kv.data.dtype)
        return backend.prepare(batch, self.kv).attend(layer, now(self.q), now(self.k), now(self.v), self.kv)

    def expected(self) -> torch.Tensor:
        return torch.cat([plain(q, k, v) for q, k, v in zip(self.q, self.k, self.v, strict=True)]).float()


MIXES = {
    "one decode": [(40, 1)],
    "first token": [(0, 1)],
    "decodes": [(40, 1), (3, 1), (0, 1), (15, 1), (16, 1), (31, 1)],
    "decodes of far lengths": [(5, 1), (700, 1), (20, 1), (650, 1), (300, 1)],
    "prompt": [(0, 50)],
    "prompts": [(0, 17), (0, 33), (0, 2)],
    "continued": [(48, 20)],
    "continued inside a block": [(13, 40), (1, 2)],
    "all": [(40, 1), (3, 1), (0, 30), (25, 9), (200, 40), (0, 1)],
}


BACKENDS = ["paged-cpu", "torch-cpu"]


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("name", MIXES)
def test_equals_plain_attention(name: str, block_size: int, attention: str) -> None:
    batch = Batch(cache(block_size), MIXES[name])
    torch.testing.assert_close(batch.run(1, attention=attention), batch.expected(), rtol=1e-5, atol=1e-5)


def test_pieces_of_a_long_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MASK_ELEMENTS", 16 * 300)
    batch = Batch(cache(), [(230, 70), (100, 35), (7, 1)])
    torch.testing.assert_close(batch.run(0), batch.expected(), rtol=1e-5, atol=1e-5)


def test_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = cache()
    monkeypatch.setattr(gathered, "GROUP_BYTES", 64 * kv.token_bytes)
    batch = Batch(kv, [(30, 1), (29, 1), (28, 1), (90, 1), (10, 1)])
    torch.testing.assert_close(batch.run(0, attention="torch-cpu"), batch.expected(), rtol=1e-5, atol=1e-5)
    workspace = gathered._split(np.array([31, 30, 29, 91, 11]), kv)
    assert [group.tolist() for group in workspace] == [[3], [0, 1], [2, 4]]


@pytest.mark.parametrize("attention", BACKENDS)
def test_padding_is_neither_written_nor_computed(attention: str) -> None:
    kv = cache()
    batch = Batch(kv, [(20, 1), (0, 9)])
    plain_out = batch.run(0, attention=attention)
    padded = batch.run(0, padding=6, attention=attention)
    torch.testing.assert_close(padded[:10], plain_out)
    assert not padded[10:].any()
    used = {slot for i, part in enumerate(batch.parts) for slot in batch.slots(i, 0, sum(part)).tolist()}
    written = kv.data[0, 0].flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist()
    assert set(written) == used


@pytest.mark.parametrize("attention", BACKENDS)
def test_narrow_kv_is_what_every_step_attends_to(attention: str) -> None:
    """A prompt computed at once and in two parts sees the same rounded keys."""
    whole = Batch(cache(dtype=KvDtype.BFLOAT16), [(0, 40)])
    split = Batch(cache(dtype=KvDtype.BFLOAT16), [(39, 1)])
    split.k, split.v, split.q = whole.k, whole.v, [whole.q[0][-1:]]
    torch.testing.assert_close(
        whole.run(0, attention=attention)[-1:], split.run(0, attention=attention), rtol=1e-5, atol=1e-5
    )


def test_unknown_backend() -> None:
    config = EngineConfig(model=Path("none"), attention="flash")
    with pytest.raises(Unsupported, match="torch-cpu"):
        choose(config, MODEL, torch.float32, torch.float32)


def test_what_the_compiled_kernel_cannot_do_is_torchs() -> None:
    odd = dataclasses.replace(MODEL, head_dim=6)
    backend, reason = choose(EngineConfig(model=Path("none")), odd, torch.float32, torch.float32)
    assert (backend.name, "heads of 6" in reason) == ("torch-cpu", True)
    backend, reason = choose(EngineConfig(model=Path("none")), MODEL, torch.float32, torch.float16)
    assert (backend.name, "float16" in reason) == ("torch-cpu", True)
    backend, _ = choose(EngineConfig(model=Path("none"), kernels="torch"), MODEL, torch.float32, torch.float32)
    assert backend.name == "torch-cpu"
    with pytest.raises(Unsupported, match="heads of 6"):
        choose(EngineConfig(model=Path("none"), attention="paged-cpu"), odd, torch.float32, torch.float32)


class TestCache:
    @pytest.mark.parametrize("theirs", list(TORCH_DTYPES))
    @pytest.mark.parametrize("own", list(TORCH_DTYPES))
    @KINDS
    def test_rows_are_converted_as_torch_does(
        self, make: Callable[..., KvCache], own: KvDtype, theirs: KvDtype
    ) -> None:
        kv = make(dtype=own)
        kv.data.copy_(torch.randn(kv.data.shape) * torch.logspace(-12, 6, kv.data.shape[-1]))
        kv.data[1, 0, 0, 0, 0, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
        slots = kv.slots([7, 0, 3], 5, 40)
        out = np.empty(2 * 40 * MODEL.kv_size * theirs.itemsize, np.uint8)
        kv.read_part(Part(1, 1, 5, 40, theirs), [7, 0, 3], out, hashed=False).result()
        rows = kv.data[1].flatten(1, 2).flatten(2)[:, torch.from_numpy(slots)]
        expected = rows.to(TORCH_DTYPES[theirs])
        found = torch.from_numpy(out).view(TORCH_DTYPES[theirs]).view(expected.shape)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)

        other = make(dtype=own)
        elsewhere = other.slots([1, 2, 9, 4], 3, 40)
        other.write_part(Part(0, 1, 3, 40, theirs), [1, 2, 9, 4], out, None).result()
        back = other.data[0].flatten(1, 2).flatten(2)[:, torch.from_numpy(elsewhere)]
        torch.testing.assert_close(back, expected.to(back.dtype), rtol=0, atol=0, equal_nan=True)
        assert int((other.data != 0).any(-1).any(-1).sum()) <= 2 * 40

    @KINDS
    def test_blocks_are_copied(self, make: Callable[..., KvCache]) -> None:
        kv = make(dtype=KvDtype.FLOAT32)
        kv.data.copy_(torch.randn(kv.data.shape))
        before = kv.data.clone()
        kv.copy_blocks([(3, 5), (3, 1), (7, 2)])
        before[:, :, [5, 1, 2]] = before[:, :, [3, 3, 7]]
        assert torch.equal(kv.data, before)

    def test_ties_go_to_even(self) -> None:
        kv = cache()
        values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8), 3.4e38, 1e-40, 0.0, -0.0])
        kv.data[0, :, 0, 0, 0] = values
        out = np.empty(2 * MODEL.kv_size * 2, np.uint8)
        kv.read_part(Part(0, 1, 0, 1, KvDtype.BFLOAT16), [0], out, hashed=False).result()
        found = torch.from_numpy(out).view(torch.bfloat16)[:8]
        assert torch.equal(found.view(torch.int16), values.bfloat16().view(torch.int16))

    @pytest.mark.parametrize("theirs", [*TORCH_DTYPES, KvDtype.FLOAT8_E4M3])
    @pytest.mark.parametrize("own", list(TORCH_DTYPES))
    @KINDS
    def test_spans_are_read_and_written_as_any_type(
        self, make: Callable[..., KvCache], own: KvDtype, theirs: KvDtype
    ) -> None:
        kv = make(dtype=own)
        kv.data.copy_(torch.randn(kv.data.shape))
        torch_dtype = torch.float8_e4m3fn if theirs is KvDtype.FLOAT8_E4M3 else TORCH_DTYPES[theirs]
        out = np.empty(kv.span_bytes(theirs), np.uint8)
        kv.read_span(3 * 16, out, theirs)
        expected = kv.data[:, :, 3].to(torch_dtype)
        assert torch.from_numpy(out).view(torch_dtype).float().equal(expected.float().flatten())
        other = make(dtype=own)
        other.write_span(5 * 16, out, theirs)
        assert other.data[:, :, 5].equal(expected.to(TORCH_DTYPES[own]))
        assert int((other.data != 0).flatten(3).any(-1).flatten(0, 1).any(0).sum()) == 1, "no other block is written"

    def test_eight_bits_are_rounded_to_nearest_and_kept_within_range(self) -> None:
        edges = [
            448.0,
            463.9,
            464.0,
            480.0,
            2**-6,
            2**-7,
            2**-9,
            2**-10,
            3 * 2**-10,
            2**-11,
            float("inf"),
            float("nan"),
            -0.0,
        ]
        values = torch.cat(
            [torch.tensor(edges), -torch.tensor(edges), torch.randn(20_000) * torch.logspace(-5, 3, 20_000)]
        )
        codes = np.empty(len(values), np.uint8)
        convert(values.numpy().view(np.uint32), KvDtype.FLOAT32, codes, KvDtype.FLOAT8_E4M3)
        expected = values.clamp(-448, 448).to(torch.float8_e4m3fn)
        torch.testing.assert_close(
            torch.from_numpy(codes).view(torch.float8_e4m3fn).float(), expected.float(), rtol=0, atol=0, equal_nan=True
        )
        every = torch.arange(256, dtype=torch.uint8)
        back = np.empty(256, np.uint32)
        convert(every.numpy(), KvDtype.FLOAT8_E4M3, back, KvDtype.FLOAT32)
        expected = every.view(torch.float8_e4m3fn).float()
        torch.testing.assert_close(torch.from_numpy(back.view(np.float32)), expected, rtol=0, atol=0, equal_nan=True)

    def test_unknown_type(self) -> None:
        with pytest.raises(Unsupported) as caught:
            kv_dtype_of("float8_e4m3", torch.float32)
        assert caught.value.param == "kv_dtype"

    def test_copies_in_order(self) -> None:
        kv = cache()
        kv.data.normal_()
        first = kv.data[:, :, 3].clone()
        kv.copy_blocks([(3, 5), (5, 6)])
        assert torch.equal(kv.data[:, :, 5], first)
        assert torch.equal(kv.data[:, :, 6], first)

    def test_size_and_layout(self) -> None:
        kv = cache(block_size=32, dtype=KvDtype.BFLOAT16, num_bytes=1 << 20)
        block_bytes = 2 * 2 * 32 * 2 * 8 * 2
        assert kv.num_blocks == (1 << 20) // block_bytes
        layout = kv.layout(Fingerprint("f"))
        assert layout.token_bytes == kv.token_bytes * 2 == block_bytes // 32
        with pytest.raises(Unsupported) as caught:
            cache(num_bytes=5000)
        assert caught.value.param == "kv_cache_bytes"
        with pytest.raises(Unsupported, match="cannot be had: Cannot allocate memory"):
            cache(num_bytes=1 << 60)

    def test_memory_grows_with_use_only(self) -> None:
        def resident() -> int:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        before = resident()
        kv = cache(num_bytes=1 << 30)
        kv.data[0, 0, 5] = 1.0
        assert not kv.data[1, 1, -1].any()
        assert resident() - before < 64 << 20
