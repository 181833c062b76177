"""What a link is found to go by, how fast it is, and which links are not used."""

import asyncio

import numpy as np
import pytest

from kvrelay.common.errors import TransferFailed
from kvrelay.common.ids import Epoch, PodId
from kvrelay.transfer.linkcheck import LinkRules
from kvrelay.transfer.loopback import LoopbackNetwork
from kvrelay.transfer.port import PortConfig, TransferPort
from tests.transfer.kv import ArraySink, ArraySource, feed, kv_of, make_layout, make_ticket

pytestmark = pytest.mark.unit

FRAME = 1 << 12


class Ports:
    """A sender's with these rules, and a receiver's."""

    def __init__(self, rules: LinkRules) -> None:
        self.network = LoopbackNetwork()
        config = PortConfig(frame_bytes=FRAME, depth=2, handshake_seconds=0.5, rules=rules)
        self.p, self.d = (
            TransferPort(self.network.transport(), PodId(name), Epoch("e1"), make_layout(2), config)
            for name in ("prefill", "decode")
        )
        self.p.start()
        self.d.start()

    async def push(self) -> None:
        ticket, sink = make_ticket(self.d.address, "e1", make_layout(2), 0, 20), ArraySink(2, 20)
        self.d.receiver.open(ticket, sink)
        kv = kv_of(1, 2, 20)
        handle = self.p.sender.push(ticket, ArraySource(kv))
        feed(handle, 2, 20, 20)
        try:
            await handle.done
        finally:
            self.d.receiver.close(ticket)
        np.testing.assert_array_equal(sink.kv, kv)

    async def close(self) -> None:
        for port in (self.p, self.d):
            staging = port.sender.staging if port is self.p else port.receiver.staging
            assert (staging.num_free, staging.used_bytes) == (staging.num_slots, 0)
            await port.close()


async def test_a_link_is_measured_once() -> None:
    ports = Ports(LinkRules(probe_bytes=10 * FRAME))
    assert ports.p.links == []
    for _ in range(3):
        await ports.push()
    (link,) = ports.p.links
    assert link.remote.pod_id == "decode"
    assert link.speed.carriers == ("loopback",)
    assert link.speed.bytes_per_second > 0
    probed = ports.d.transport.bytes_received - ports.d.counters.payload_bytes_received
    assert 11 * FRAME < probed < 13 * FRAME, "one message to warm up, ten that are measured, and what is said beside"
    await ports.close()


async def test_nothing_is_measured_where_nothing_may_be_sent() -> None:
    ports = Ports(LinkRules(probe_bytes=0))
    await ports.push()
    assert ports.p.links[0].speed.bytes_per_second == 0
    assert ports.d.transport.bytes_received < ports.d.counters.payload_bytes_received + FRAME
    await ports.close()


async def test_a_slow_link_is_not_measured_for_long() -> None:
    ports = Ports(LinkRules(probe_bytes=1 << 30, probe_seconds=0.05))
    ports.network.delay_seconds = 0.01
    await ports.push()
    assert 0 < ports.p.links[0].speed.bytes_per_second < 2 * FRAME / 0.01
    await ports.close()


async def test_a_link_by_something_else_is_refused_each_time(caplog: pytest.LogCaptureFixture) -> None:
    ports = Ports(LinkRules(require=("cuda_ipc", "rc"), probe_bytes=FRAME))
    for _ in range(2):
        with pytest.raises(TransferFailed, match=r"decode goes by loopback, none of cuda_ipc, rc"):
            await ports.push()
    assert ports.p.links == []
    assert ports.p.counters.links_refused == 2
    await ports.close()


async def test_or_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ports = Ports(LinkRules(require=("cuda_ipc",), refuse=False, probe_bytes=FRAME))
    await ports.push()
    assert "goes by loopback, none of cuda_ipc" in caplog.text
    assert len(ports.p.links) == 1
    await ports.close()


async def test_a_receiver_that_stops_in_the_middle_of_it() -> None:
    ports = Ports(LinkRules(probe_bytes=100 * FRAME))
    taken = ports.d.transport.bytes_received
    push = asyncio.create_task(ports.push())
    async with asyncio.timeout(5):
        while ports.d.transport.bytes_received < taken + 10 * FRAME:
            await asyncio.sleep(0)
    ports.d.transport.freeze()  # type: ignore[attr-defined]
    with pytest.raises(TransferFailed, match="handshake"):
        await push
    ports.d.transport.thaw()  # type: ignore[attr-defined]
    await ports.push()
    await ports.close()


@pytest.mark.parametrize(
    ("require", "carriers", "allowed"),
    [
        ((), ("tcp/eth0",), True),
        (("cuda_ipc",), ("cuda_ipc/cuda", "tcp/eth0"), True),
        (("cuda_ipc",), ("cuda_copy/cuda", "tcp/eth0"), False),
        (("rc",), ("rc_mlx5/mlx5_0:1",), True),
        (("rc", "tcp"), ("tcp/lo",), True),
        (("rc",), ("rcx/mlx5_0:1",), False),
        (("rc",), (), False),
    ],
)
def test_names(require: tuple[str, ...], carriers: tuple[str, ...], allowed: bool) -> None:
    assert LinkRules(require=require).allows(carriers) == allowed
