"""What one store keeps for unlike pods: engines with a real model each, on one store. They share where KV is the same, or may be
converted; everything else is computed, and no answer is another's."""

import asyncio
import dataclasses
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import safetensors.torch

from kvrelay.common.ids import PodId, RequestId
from kvrelay.common.request import EngineRequest, SamplingParams
from kvrelay.engine.build import build
from kvrelay.engine.config import EngineConfig, KvStoreOptions
from kvrelay.engine.connector.port import KvStorePort, identity_of, make_connector
from kvrelay.engine.messages import PromptComputed
from kvrelay.v1 import kvstore_pb2 as pb
from kvrelay.v1 import kvstore_pb2_grpc
from tests.connector.hostile import until
from tests.connector.stores import StoreProcess
from tests.exactness.reference import Reference, References
from tests.exactness.small import make

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300, func_only=True)]

OUTPUT_TOKENS = 8
PROMPT = tuple(range(5, 5 + 37 * 150, 37))
FOUND = (len(PROMPT) - 1) // 16 * 16
CLEAR = 0.5
"""A choice whose runner-up is so much less likely (log-probability) is the same with KV of eight bits."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """Of a pod, beside its model."""

    stored: str = "auto"
    """The dtype of what it stores."""
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)

    def config(self, model: Path) -> EngineConfig:
        options = {"dtype": "float32", "kv_cache_bytes": 4 << 20, "max_model_len": 512, "threads": 1} | self.engine
        return EngineConfig(model=model, **options)


class ModelPod:
    """An engine with a model, and the store beside it, if any. What it was asked is out of its own cache by the next time."""

    def __init__(self, model: Path, kind: Kind, address: str = "") -> None:
        built = build(kind.config(model), lambda what, done, total: None)
        self._engine = built.engine
        self._changed = asyncio.Event()
        self.store: KvStorePort | None = None
        options = KvStoreOptions(addresses=(address,), load="always", dtype=kind.stored) if address else None
        connector = make_connector(options, PodId("pod"), built)
        if connector is not None:
            identity = identity_of(built, options)
            self.store = KvStorePort(
                built.engine, built.cache, identity, connector, self._changed.set, load_always=True
            )
            self.store.start()

    async def ask(self, prompt: tuple[int, ...], salt: str = "") -> tuple[tuple[int, ...], int]:
        """The tokens, and how many of the prompt's were not computed."""
        engine, tokens, cached = self._engine, list[int](), -1
        sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=1)
        engine.add(
            EngineRequest(request_id=RequestId("r"), prompt_token_ids=prompt, sampling=sampling, cache_salt=salt)
        )
        async with asyncio.timeout(60):
            while engine.has_work or engine.scheduler.loading:
                self._changed.clear()
                batch = engine.schedule()
                if batch is None:
                    await self._changed.wait()
                    continue
                update = engine.update(batch, engine.launch(batch).result())
                tokens += [token for delta in update.deltas for token in delta.token_ids]
                cached = next(
                    (n.kind.num_cached_tokens for n in update.notices if isinstance(n.kind, PromptComputed)), cached
                )
                await asyncio.sleep(0)
        seen = engine.inspect()
        assert list(seen.violations) == []
        if self.store is not None:
            store = self.store
            await until(lambda: not store.counters().waiting_blocks)
        return tuple(tokens), cached


@asynccontextmanager
async def attached(store: StoreProcess, model: Path, kind: Kind = Kind()) -> AsyncIterator[ModelPod]:
    pod = ModelPod(model, kind, store.address)
    assert pod.store is not None
    port = pod.store
    try:
        await until(lambda: port.counters().attached)
        yield pod
    finally:
        await port.close()
    await store.is_let_go()


async def answer(store: StoreProcess, model: Path, kind: Kind = Kind(), salt: str = "") -> tuple[tuple[int, ...], int]:
    """Of a pod that has nothing of its own."""
    async with attached(store, model, kind) as pod:
        return await pod.ask(PROMPT, salt)


async def cold(model: Path, kind: Kind = Kind()) -> tuple[int, ...]:
    """What a pod without a store answers."""
    tokens, cached = await ModelPod(model, kind).ask(PROMPT)
    assert cached == 0
    return tokens


@pytest.fixture(scope="module")
def small_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("small") / "model", model_dir)


@pytest.fixture(scope="module")
def exact(small_dir: Path) -> tuple[int, ...]:
    """The answer in float32."""
    return asyncio.run(cold(small_dir))


@pytest.fixture(scope="module")
def one_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    store = StoreProcess(tmp_path_factory.mktemp("store"), memory_bytes=4 << 20)
    try:
        asyncio.run(store.start())
        yield store
    finally:
        store.kill()


@pytest.fixture
async def store(one_store: StoreProcess) -> StoreProcess:
    """Empty."""
    async with grpc.aio.insecure_channel(one_store.address) as channel:
        await kvstore_pb2_grpc.KvStoreStub(channel).Remove(pb.RemoveRequest(all=True))
    assert sum(tier.num_blocks for tier in (await one_store.stat()).tiers) == 0
    return one_store


def other_weights(folder: Path) -> None:
    """One value of the last layer's, by a trifle."""
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["model.layers.3.mlp.down_proj.weight"][0, 0] += 1e-3
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def other_tokenizer(folder: Path) -> None:
    """The same, but for a space that means nothing."""
    file = folder / "tokenizer.json"
    file.write_text(file.read_text() + " ")


def other_rope(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("change", [other_weights, other_tokenizer, other_rope])
async def test_models_that_differ_share_nothing(
    store: StoreProcess, small_dir: Path, exact: tuple[int, ...], tmp_path: Path, change: Callable[[Path], None]
) -> None:
    other = shutil.copytree(small_dir, tmp_path / "other")
    change(other)
    second = await cold(other)
    assert (exact != second) == (change is other_rope), "of the three only this one is meant to show in the answer"
    for found in (0, FOUND):
        assert await answer(store, small_dir) == (exact, found)
        assert await answer(store, other) == (second, found)


async def test_salts_that_differ_share_nothing(store: StoreProcess, small_dir: Path, exact: tuple[int, ...]) -> None:
    for found in (0, FOUND):
        for salt in ("", "one", "two"):
            assert await answer(store, small_dir, salt=salt) == (exact, found), f"salt {salt!r}"


COMPUTED = Kind(engine={"dtype": "bfloat16"})
KEPT = Kind(engine={"kv_dtype": "bfloat16"})


@pytest.mark.parametrize("other", [COMPUTED, KEPT, Kind(stored="float8_e4m3")], ids=["computed", "kept", "stored"])
async def test_what_is_of_another_dtype_is_a_miss(
    store: StoreProcess, small_dir: Path, exact: tuple[int, ...], other: Kind
) -> None:
    """Where a pod was not told that it may take it."""
    assert await answer(store, small_dir, other) == (await cold(small_dir, other), 0)
    assert await answer(store, small_dir) == (exact, 0)


@pytest.mark.parametrize("other", [COMPUTED, KEPT], ids=["computed", "kept"])
async def test_what_is_exact_is_a_miss_for_another_dtype(
    store: StoreProcess, small_dir: Path, exact: tuple[int, ...], other: Kind
) -> None:
    assert await answer(store, small_dir) == (exact, 0)
    assert await answer(store, small_dir, other) == (await cold(small_dir, other), 0)
    assert await answer(store, small_dir) == (exact, FOUND), "it lies there as before"


@pytest.mark.parametrize("size", [32, 48])
async def test_another_block_size_is_converted(
    store: StoreProcess, small_dir: Path, exact: tuple[int, ...], size: int
) -> None:
    assert await answer(store, small_dir) == (exact, 0)
    assert await answer(store, small_dir, Kind(engine={"block_size": size})) == (exact, FOUND // size * size)


@pytest.mark.parametrize(
    ("writes", "reads"),
    [
        (Kind(), Kind(stored="float32", engine={"kv_dtype": "bfloat16"})),
        (Kind(stored="bfloat16"), Kind(stored="bfloat16")),
        (Kind(stored="float8_e4m3"), Kind(stored="float8_e4m3")),
    ],
    ids=["down", "up", "eight bits"],
)
async def test_another_dtype_is_converted_where_that_is_allowed(
    store: StoreProcess, small_dir: Path, writes: Kind, reads: Kind
) -> None:
    """Rounded KV moves what is likely, and no choice that is clear."""
    reference = References(small_dir).of(PROMPT, OUTPUT_TOKENS)
    assert await answer(store, small_dir, writes) == (reference.tokens, 0)
    tokens, found = await answer(store, small_dir, reads)
    assert found == FOUND
    check_clear(reference, tokens)


def check_clear(reference: Reference, tokens: tuple[int, ...]) -> None:
    clear = next((i for i, gap in enumerate(reference.gaps) if gap < CLEAR), len(reference.gaps))
    assert clear >= 2, f"the prompt is meant to have clear choices, and not {reference.gaps}"
    assert tokens[:clear] == reference.tokens[:clear]
