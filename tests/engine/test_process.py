"""Engine processes with small random models: what a pod's front sees of their life, and KV pushed from one into the other."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvrelay.common.errors import InvalidRequest, KvrelayError, NoCapacity, StaleEpoch, Unavailable
from kvrelay.common.ids import PodId, RequestId, RouterId
from kvrelay.common.request import ChoiceDelta, EngineRequest, SamplingParams
from kvrelay.engine import messages as m
from kvrelay.engine.client import AsyncEngine
from kvrelay.engine.config import EngineConfig
from tests.engine.tiny import make

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

ROUTER = RouterId("router")
PROMPT = tuple(range(3, 83))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make(path, "llama")
    return path


def config(folder: Path, **options: object) -> EngineConfig:
    base = {"kv_cache_bytes": 4 << 20, "threads": 1, "test_hooks": True, "max_num_seqs": 8}
    return EngineConfig(model=folder, **{**base, **options})  # type: ignore[arg-type]


def request(name: str, prompt: tuple[int, ...] = PROMPT, timeout_ms: int = 60_000, **sampling: object) -> EngineRequest:
    params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "seed": 1, **sampling}
    return EngineRequest(
        request_id=RequestId(name),
        prompt_token_ids=prompt,
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
        timeout_ms=timeout_ms,
    )


@dataclasses.dataclass
class Watched:
    """An engine, and all that it has said."""

    engine: AsyncEngine
    said: list[ChoiceDelta | m.Notice] = dataclasses.field(default_factory=list)
    news: asyncio.Condition = dataclasses.field(default_factory=asyncio.Condition)

    async def consume(self) -> None:
        async for output in self.engine.outputs():
            async with self.news:
                self.said += [*output.deltas, *output.notices]
                self.news.notify_all()

    async def notice(self, kind: type[m.NoticeKind], name: str) -> m.NoticeKind:
        """The first of its kind for a request, when it has come."""

        def found() -> list[m.NoticeKind]:
            notices = [item for item in self.said if isinstance(item, m.Notice) and item.request_id == name]
            return [notice.kind for notice in notices if isinstance(notice.kind, kind)]

        async with asyncio.timeout(30), self.news:
            await self.news.wait_for(found)
        return found()[0]

    async def tokens(self, name: str, choices: int = 1) -> dict[int, list[int]]:
        """Of each choice, when all are finished."""

        def deltas() -> list[ChoiceDelta]:
            return [item for item in self.said if isinstance(item, ChoiceDelta) and item.request_id == name]

        async with asyncio.timeout(30), self.news:
            await self.news.wait_for(lambda: sum(d.finish_reason is not None for d in deltas()) == choices)
        out: dict[int, list[int]] = {choice: [] for choice in range(choices)}
        for delta in deltas():
            assert delta.index == len(out[delta.choice])
            out[delta.choice] += delta.token_ids
        return out

    async def assert_whole(self) -> None:
        async with asyncio.timeout(5):
            while True:
                seen = await self.engine.inspect()
                assert not seen.violations
                if seen.free_blocks == seen.num_blocks and not (seen.num_requests or seen.num_pushes):
                    assert seen.staging_bytes == 0
                    return


@asynccontextmanager
async def started(config: EngineConfig, name: str) -> AsyncIterator[Watched]:
    engine = AsyncEngine(config, PodId(name))
    await engine.start()
    watched = Watched(engine)
    task = asyncio.create_task(watched.consume())
    try:
        yield watched
    finally:
        await engine.close()
        await task


async def test_what_computes_alone_and_what_is_pushed_are_the_same(folder: Path) -> None:
    async with started(config(folder), "p") as p, started(config(folder, block_size=32), "d") as d:
        await d.engine.reserve(request("alone", n=2, temperature=1.0), 1, ROUTER, local_prefill=True)
        alone = await d.tokens("alone", 2)
        other = request("pushed", (*PROMPT[:7], 99, *PROMPT), n=2, temperature=1.0)
        ticket, found = await d.engine.reserve(other, 1, ROUTER)
        assert (found, ticket is None) == (0, False)
        again, _ = await d.engine.reserve(other, 1, ROUTER)
        assert again == ticket
        assert ticket is not None
        await p.engine.prefill(other, ticket)
        pushed = await d.tokens("pushed", 2)
        done = await p.notice(m.PushCompleted, "pushed")
        assert isinstance(done, m.PushCompleted)
        assert done.payload_bytes == 88 * p.engine.info.layout.token_bytes
        (link,) = p.engine.stats.links
        assert (link.pod_id, link.bytes_per_second > 0) == (d.engine.info.pod_id, True)
        assert "/" in link.transport
        assert d.engine.stats.links == ()
        await p.engine.submit(renamed(other, "here"))
        assert await p.tokens("here", 2) == pushed
        assert alone[0] != alone[1]
        await p.assert_whole()
        await d.assert_whole()


def renamed(source: EngineRequest, name: str) -> EngineRequest:
    return EngineRequest(request_id=RequestId(name), prompt_token_ids=source.prompt_token_ids, sampling=source.sampling)


async def test_another_model_is_refused_at_the_handshake(folder: Path, tmp_path: Path) -> None:
    make(tmp_path, "llama", tie_word_embeddings=True)
    async with started(config(folder), "p") as p, started(config(tmp_path), "d") as d:
        ticket, _ = await d.engine.reserve(request("r"), 1, ROUTER)
        assert ticket is not None
        await p.engine.prefill(request("r"), ticket)
        failed = await p.notice(m.PushFailed, "r")
        assert isinstance(failed, m.PushFailed)
        assert failed.code == "incompatible"
        assert "another model" in failed.message
        await p.assert_whole()
        await d.engine.abort((RequestId("r"),))
        await d.assert_whole()


async def test_a_link_by_something_else_than_required(folder: Path) -> None:
    async with started(config(folder, transfer_require="cuda_ipc"), "p") as p, started(config(folder), "d") as d:
        ticket, _ = await d.engine.reserve(request("r"), 1, ROUTER)
        assert ticket is not None
        await p.engine.prefill(request("r"), ticket)
        failed = await p.notice(m.PushFailed, "r")
        assert isinstance(failed, m.PushFailed)
        assert "none of cuda_ipc" in failed.message
        await p.assert_whole()
        await d.engine.abort((RequestId("r"),))
        await d.assert_whole()


@pytest.mark.parametrize("victim", ["p", "d"])
async def test_a_dead_engine_process(folder: Path, victim: str) -> None:
    async with started(config(folder), "p") as p, started(config(folder), "d") as d:
        await p.engine.set_hold("push", 1)
        ticket, _ = await d.engine.reserve(request("r"), 1, ROUTER)
        assert ticket is not None
        await p.engine.prefill(request("r"), ticket)
        async with asyncio.timeout(20):
            while not (await d.engine.inspect()).transfer.payload_bytes_received:
                pass
        dead, alive = (p, d) if victim == "p" else (d, p)
        os.kill(dead.engine.pid, signal.SIGKILL)
        await asyncio.wait_for(dead.engine.dead.wait(), 5)
        with pytest.raises(Unavailable):
            await dead.engine.inspect()
        await alive.notice(m.PushFailed, "r")
        await alive.engine.abort((RequestId("r"),))
        await alive.assert_whole()
        await alive.engine.submit(request("next"))
        assert len((await alive.tokens("next"))[0]) == 8


async def test_an_expired_ticket_is_computed_on_the_decode_side(folder: Path) -> None:
    async with started(config(folder, ticket_timeout_ms=200), "d") as d:
        await d.engine.reserve(request("r"), 1, ROUTER)
        await d.notice(m.RecomputeStarted, "r")
        assert len((await d.tokens("r"))[0]) == 8
        await d.assert_whole()


async def test_an_expired_ticket_fails_where_so_configured(folder: Path) -> None:
    async with started(config(folder, ticket_timeout_ms=200, on_ticket_expiry="fail"), "d") as d:
        await d.engine.reserve(request("r"), 1, ROUTER)
        failed = await d.notice(m.RequestFailed, "r")
        assert isinstance(failed, m.RequestFailed)
        assert failed.code == "transfer_failed"
        await d.assert_whole()


async def test_a_deadline_while_no_step_runs(folder: Path) -> None:
    async with started(config(folder), "e") as e:
        await e.engine.set_hold("prefill")
        await e.engine.submit(request("r", timeout_ms=300))
        failed = await e.notice(m.RequestFailed, "r")
        assert isinstance(failed, m.RequestFailed)
        assert failed.code == "deadline_exceeded"
        await e.assert_whole()


async def test_errors_are_the_askers(folder: Path) -> None:
    async with started(config(folder), "e") as e:
        with pytest.raises(InvalidRequest):
            await e.engine.reserve(request("long", tuple(range(3, 90)) * 400), 1, ROUTER)
        room = e.engine.info.num_blocks // 5
        for i in range(room):
            await e.engine.reserve(request(f"r{i}"), 1, ROUTER)
        with pytest.raises(NoCapacity):
            await e.engine.reserve(request("one too many"), 1, ROUTER)
        await e.engine.abort_router(ROUTER)
        await e.assert_whole()
        await e.engine.reserve(request("r", PROMPT), 2, ROUTER)
        with pytest.raises(StaleEpoch):
            await e.engine.reserve(request("r", PROMPT), 1, ROUTER)


async def test_hold_needs_test_hooks(folder: Path) -> None:
    async with started(config(folder, test_hooks=False), "e") as e:
        with pytest.raises(KvrelayError, match="test hooks"):
            await e.engine.set_hold("push", 1)


async def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    engine = AsyncEngine(config(tmp_path / "nothing"), PodId("e"))
    with pytest.raises(KvrelayError, match="is no directory"):
        await engine.start()
    with pytest.raises(Unavailable):
        await engine.submit(request("r"))
    await engine.close()


FRONT = """
import asyncio, sys
from pathlib import Path
from kvrelay.common.ids import PodId
from kvrelay.engine.client import AsyncEngine
from kvrelay.engine.config import EngineConfig

async def main():
    engine = AsyncEngine(EngineConfig(model=Path(sys.argv[1]), kv_cache_bytes=4 << 20, threads=1), PodId("e"))
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_front_leaves_no_engine_behind(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FRONT, str(folder)], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        engine = int(front.stdout.readline())
        assert alive(engine)
        front.kill()
        end = time.monotonic() + 10
        while alive(engine):
            assert time.monotonic() < end, "the engine outlives its front"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_wire_config_is_checked() -> None:
    good = EngineConfig(model=Path("/m")).to_wire()
    assert EngineConfig.from_wire(good).model == Path("/m")
    with pytest.raises(ValueError, match="unknown options: blocksize"):
        EngineConfig.from_wire({**good, "blocksize": 16})
    with pytest.raises(ValueError, match="multiple of 16"):
        EngineConfig.from_wire({**good, "block_size": 24})
