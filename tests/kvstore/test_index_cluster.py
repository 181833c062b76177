"""The index on a real Redis Cluster of three servers: prefixes that lie on several of them."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from kvrelay.cli.ports import free_ports
from kvrelay.kvstore.index import Index
from kvrelay.transfer.segments import SEGMENT_BLOCKS, heads
from tests.fixtures_redis import RedisServer
from tests.kvstore.test_index import chain, location

pytestmark = pytest.mark.integration

SLOTS = 16384


class ClusterServer(RedisServer):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        [self.bus_port] = free_ports(1)
        self.options = (
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "2000",
            "--cluster-port",
            str(self.bus_port),
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[ClusterServer]]:
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            server = ClusterServer(folder)
            stack.callback(server.kill)
            server.start()
            servers.append(server)
            server.command("CLUSTER", "ADDSLOTSRANGE", str(number * SLOTS // 3), str((number + 1) * SLOTS // 3 - 1))
        for server in servers[1:]:
            servers[0].command("CLUSTER", "MEET", "127.0.0.1", str(server.port), str(server.bus_port))
        deadline = time.monotonic() + 20
        while not all(b"cluster_state:ok" in server.command("CLUSTER", "INFO") for server in servers):
            assert time.monotonic() < deadline, "the cluster does not come together"
            time.sleep(0.05)
        yield servers


async def test_the_longest_prefix_over_several_servers(cluster: list[ClusterServer]) -> None:
    ids = chain(10 * SEGMENT_BLOCKS)
    where = location()
    index = Index(cluster[0].url, "test", sharded=True)
    try:
        assert await index.mark() == await index.mark()
        assert await index.find(ids) == []
        stored = dict.fromkeys(zip(heads(ids), ids, strict=True), where)
        del stored[heads(ids)[600], ids[600]]
        await index.update(where.node, stored)
        assert await index.find(ids) == [[where]] * 600
        sizes = [int(server.command("DBSIZE").strip(b":\r\n")) for server in cluster]
        assert sum(sizes) == 10 + 1  # a segment each, and the mark
        assert min(sizes) > 0
        await index.update(where.node, dict.fromkeys(stored, None))
        assert await index.find(ids) == []
        for server in cluster:
            server.kill()
        assert await index.find(ids) == []
        assert index.failures == 1
        with pytest.raises((RedisError, OSError)):
            await index.update(where.node, stored)
    finally:
        await index.close()
