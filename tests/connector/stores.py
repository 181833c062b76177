"""A real store of a test's own, in its own process."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio

from kvrelay.cli.ports import free_ports
from kvrelay.common.access import bearer
from kvrelay.common.rpc import CHANNEL_OPTIONS
from kvrelay.v1 import kvstore_pb2 as pb
from kvrelay.v1 import kvstore_pb2_grpc
from tests.server_process import ServerProcess

SECONDS = 30.0


class StoreProcess(ServerProcess):
    def __init__(self, folder: Path, memory_bytes: int, token: str = "") -> None:
        self.folder = folder
        self.token = token
        self.port, self._http_port = free_ports(2)
        self._tiers = [
            {"tier": "cpu", "bytes": memory_bytes, "policy": "lru"},
            {"tier": "file", "bytes": 64 << 20, "directory": str(folder / "blocks")},
        ]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Returns when it serves."""
        options = {
            "tiers": json.dumps(self._tiers),
            "grpc-port": str(self.port),
            "http-port": str(self._http_port),
            "arena-directory": str(self.folder),
            "node-id": "n0",
            "redis-url": "redis://127.0.0.1:1/0",
            "grace-seconds": "5",
        }
        if self.token:
            (self.folder / "token").write_text(self.token)
            options["auth-token-file"] = str(self.folder / "token")
        given = [part for name, value in options.items() for part in (f"--{name}", value)]
        self._launch([sys.executable, "-m", "kvrelay.kvstore.main", *given])
        async with asyncio.timeout(SECONDS):
            while True:
                assert self._process is not None
                assert self._process.poll() is None, self._log.read_text()
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await self.stat()
                    return
                await asyncio.sleep(0.05)

    @property
    def _log(self) -> Path:
        return self.folder / "store.log"

    def _launch(self, command: list[str]) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def spoil(self, offset: int) -> None:
        """Changes a few bytes of the arena."""
        (arena,) = self.folder.glob("*.arena")
        with arena.open("r+b") as file:
            file.seek(offset)
            file.write(b"\xff\x00\xff")

    async def stat(self) -> pb.StatResponse:
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            stub = kvstore_pb2_grpc.KvStoreStub(channel)
            answer: pb.StatResponse = await stub.Stat(pb.StatRequest(), metadata=bearer(self.token), timeout=10)
            return answer

    async def holds(self, num_blocks: int) -> None:
        """Until it has so many in memory at least."""
        async with asyncio.timeout(SECONDS):
            while (await self.stat()).tiers[0].num_blocks < num_blocks:
                await asyncio.sleep(0.01)

    async def is_let_go(self, num_pods: int | None = None) -> None:
        """Nothing of it is read or written, and it is whole."""
        async with asyncio.timeout(SECONDS):
            while True:
                seen = await self.stat()
                if not seen.num_pins and not seen.num_writing and num_pods in (None, seen.num_pods):
                    break
                await asyncio.sleep(0.01)
        assert list(seen.violations) == []


@contextlib.asynccontextmanager
async def running(folder: Path, memory_bytes: int = 4 << 20, token: str = "") -> AsyncIterator[StoreProcess]:
    store = StoreProcess(folder, memory_bytes, token)
    await store.start()
    try:
        yield store
    finally:
        store.kill()
