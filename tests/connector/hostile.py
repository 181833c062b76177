"""A server that speaks the store's protocol as the test says, and lies where the test wants it to."""

import asyncio
import contextlib
import mmap
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio

from kvrelay.common.access import PodAccess, bearer
from kvrelay.common.discovery import RetryPolicy
from kvrelay.common.ids import BlockId, PodId
from kvrelay.common.layout import KvDtype
from kvrelay.common.rpc import SERVER_OPTIONS
from kvrelay.engine.connector.base import Run, Stored
from kvrelay.engine.connector.kvstore import KvStoreAccess, KvStoreConnector
from kvrelay.transfer.block import BlockInfo, checksum
from kvrelay.v1 import kvstore_pb2 as pb
from kvrelay.v1 import kvstore_pb2_grpc

SIZE = 10_000
ARENA_BYTES = 64 * 12_288
QUICK = RetryPolicy(initial_seconds=0.01, maximum_seconds=0.05)
FOUND = (Run("cpu", 1, SIZE, 0.0),)
"""What a load is told was found, where it does not matter."""


class HostileStore(kvstore_pb2_grpc.KvStoreServicer):
    """One session at a time. It says nothing by itself but where the arena is."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "hostile.arena"
        self.path.write_bytes(bytes(ARENA_BYTES))
        self.said_bytes = ARENA_BYTES
        """Of the arena, as pods are told."""
        self.heard: list[pb.AttachRequest] = []
        self.num_sessions = 0
        self._out: asyncio.Queue[pb.AttachResponse | None] = asyncio.Queue()

    async def Attach(
        self, requests: object, context: "grpc.aio.ServicerContext[pb.AttachRequest, pb.AttachResponse]"
    ) -> None:  # type: ignore[override]
        first = await context.read()
        assert isinstance(first, pb.AttachRequest)
        assert first.WhichOneof("kind") == "hello"
        self.num_sessions += 1
        self._out = asyncio.Queue()
        attached = pb.Attached(epoch="e", arena_path=str(self.path), arena_bytes=self.said_bytes)
        await context.write(pb.AttachResponse(attached=attached))
        reading = asyncio.create_task(self._read(context))
        try:
            while (message := await self._out.get()) is not None:
                await context.write(message)
        finally:
            reading.cancel()

    async def _read(self, context: "grpc.aio.ServicerContext[pb.AttachRequest, pb.AttachResponse]") -> None:
        while isinstance(message := await context.read(), pb.AttachRequest):
            self.heard.append(message)

    def say(self, **message: object) -> None:
        self._out.put_nowait(pb.AttachResponse(**message))  # type: ignore[arg-type]

    def hang_up(self) -> None:
        self._out.put_nowait(None)

    def write(self, offset: int, payload: bytes) -> None:
        with self.path.open("r+b") as file, mmap.mmap(file.fileno(), ARENA_BYTES) as arena:
            arena[offset : offset + len(payload)] = payload

    async def hears(self, kind: str, count: int = 1) -> pb.AttachRequest:
        """The `count`-th message of the kind."""
        await until(lambda: len(self.of(kind)) >= count)
        return self.of(kind)[count - 1]

    def of(self, kind: str) -> list[pb.AttachRequest]:
        return [message for message in self.heard if message.WhichOneof("kind") == kind]

    def released(self) -> list[int]:
        return sorted(offset for message in self.of("release") for offset in message.release.offsets)

    def given_up(self) -> list[int]:
        return sorted(offset for message in self.of("commit") for offset in message.commit.given_up)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def access(address: str, identity: BlockInfo, token: str = "") -> KvStoreAccess:
    return KvStoreAccess(
        address=address,
        rpc=PodAccess(bearer(token)),
        pod_id=PodId("pod"),
        fingerprint=identity.fingerprint,
        shape=identity.shape,
        dtype=identity.dtype,
        readable=(identity.dtype,),
    )


@contextlib.asynccontextmanager
async def attached(address: str, identity: BlockInfo, token: str = "") -> AsyncIterator[KvStoreConnector]:
    """A connector that is ready. Its task is alive at the end, whatever it went through."""
    connector = KvStoreConnector(access(address, identity, token), QUICK)
    connector.start()
    try:
        await until(lambda: connector.ready)
        yield connector
        assert connector._task is not None
        assert not connector._task.done()
    finally:
        await connector.close()


@contextlib.asynccontextmanager
async def serving(store: HostileStore) -> AsyncIterator[str]:
    """Its address."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(store, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def block_at(offset: int, **fields: object) -> pb.LoadedBlock:
    given = {"offset": offset, "size": SIZE, "dtype": "float32", "encoding": pb.ENCODING_EXACT, "checksum": 1}
    return pb.LoadedBlock(**{**given, **fields})  # type: ignore[arg-type]


def is_whole(span: Stored) -> bool:
    return checksum(span.info, span.data.data) == span.info.checksum


def kind(fingerprint: str = "f" * 64, size: int = SIZE) -> BlockInfo:
    """A pod's spans, of no model."""
    no_id = BlockId(bytes(16))
    return BlockInfo(
        id=no_id,
        head=no_id,
        fingerprint=fingerprint,
        shape="00112233445566ff",
        dtype=KvDtype.FLOAT32,
        size=size,  # type: ignore[arg-type]
    )
