"""Pushes over UCX between two processes, which are killed, stopped and restarted."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.errors import TransferFailed
from kvrelay.common.ids import Epoch, PodId
from kvrelay.transfer.port import TransferPort
from kvrelay.transfer.ucx import UcxTransport
from tests.transfer.kv import make_layout

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
LAYERS, ROW = 6, 128


class Child:
    """A pod's process, and what it says."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def tell(self, do: str, **arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    async def hear(self, seconds: float = 30) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), seconds)
        assert line, "the process has ended"
        heard: dict[str, Any] = json.loads(line)
        return heard

    async def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        self.tell(do, **arguments)
        return await self.hear()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def open(self, seed: int, first: int, end: int, **more: object) -> str:
        ticket: str = (await self.ask("open", seed=seed, first=first, end=end, **more))["ticket"]
        return ticket


Start = Callable[..., Coroutine[Any, Any, Child]]


@pytest.fixture
async def start() -> AsyncGenerator[Start, None]:
    children: list[Child] = []

    async def start_child(role: str, epoch: str = "e1", fingerprint: str = "model", tls: str = "tcp") -> Child:
        # Connections within this machine only.
        env = {**os.environ, "PYTHONPATH": str(ROOT), "UCX_TLS": tls, "UCX_NET_DEVICES": "lo", "OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-m", "tests.transfer.pod", role, epoch, fingerprint),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
            cwd=ROOT,
            env=env,
        )
        child = Child(process)
        children.append(child)
        await child.hear()
        return child

    yield start_child
    for child in children:
        if child.process.returncode is None:
            child.signal(signal.SIGCONT)
            assert child.process.stdin is not None
            child.process.stdin.close()
    # A process that was told to stop does, by itself.
    codes = [await asyncio.wait_for(child.process.wait(), 10) for child in children]
    assert all(code in (0, -signal.SIGKILL) for code in codes)


async def pair(start: Start, tls: str = "tcp") -> tuple[Child, Child]:
    receiver, sender = await asyncio.gather(start("receive", tls=tls), start("send", tls=tls))
    return receiver, sender


async def push_one(
    receiver: Child, sender: Child, seed: int, first: int = 0, end: int = 500, chunk: int = 128
) -> dict[str, Any]:
    ticket = await receiver.open(seed, first, end)
    pushed = await sender.ask("push", tickets=[ticket], seeds=[seed], chunk=chunk)
    assert pushed["messages"] == []
    return await receiver.ask("check", seed=seed)


async def start_held(receiver: Child, sender: Child, seed: int, **more: object) -> None:
    """A push of 12 frames that stands still after two, which have been written."""
    ticket = await receiver.open(seed, 0, 500, **more)
    sender.tell("push", tickets=[ticket], seeds=[seed], chunk=500, hold=2)
    assert (await sender.hear())["held"] == 1
    await receiver.ask("written", seed=seed, writes=2)


async def check_nothing_is_held(*children: Child) -> None:
    for child in children:
        state = await child.ask("state")
        assert (state["staging"], state["pushes"]) == (0, 0)


@pytest.mark.parametrize("tls", ["tcp", "tcp,shm,cma"])
async def test_bytes_arrive_where_they_belong(start: Start, tls: str) -> None:
    receiver, sender = await pair(start, tls)
    payload = 0
    for seed, (first, end, chunk) in enumerate(
        [(0, 500, 128), (17, 300, 300), (100, 333, 77), (0, 1, 1), (48, 48, 48)]
    ):
        assert await push_one(receiver, sender, seed, first, end, chunk) == {"equal": True, "prompt": end}
        payload += (end - first) * LAYERS * ROW
    sent, received = await sender.ask("state"), await receiver.ask("state")
    assert sent["payload_bytes_sent"] == received["payload_bytes_received"] == payload
    assert sent["bytes_sent"] == received["bytes_received"] > payload
    assert (sent["links_opened"], sent["transfers_completed"], received["transfers_completed"]) == (1, 5, 5)
    assert sent["staging"] == received["staging"] == 0


async def test_two_hundred_pushes_at_once(start: Start) -> None:
    receiver, sender = await pair(start)
    seeds = list(range(200))
    tickets = [await receiver.open(seed, seed % 16, 100 + seed) for seed in seeds]
    assert (await sender.ask("push", tickets=tickets, seeds=seeds, chunk=64))["errors"] == []
    for seed in seeds:
        assert (await receiver.ask("check", seed=seed))["equal"]
    await check_nothing_is_held(receiver, sender)


async def test_a_killed_receiver_and_its_successor(start: Start) -> None:
    receiver, sender = await pair(start)
    await start_held(receiver, sender, 1)
    receiver.signal(signal.SIGKILL)
    failed = await sender.hear()
    assert failed["errors"] == ["TransferFailed"]
    assert failed["seconds"] < 2
    successor = await start("receive", "e2")
    assert (await push_one(successor, sender, 2))["equal"]
    await check_nothing_is_held(sender, successor)


async def test_a_receiver_killed_while_frames_fly(start: Start) -> None:
    receiver, sender = await pair(start)
    seeds = list(range(40))
    tickets = [await receiver.open(seed, 0, 2000) for seed in seeds]
    sender.tell("push", tickets=tickets, seeds=seeds, chunk=500)
    await receiver.ask("written", seed=0, writes=1)
    receiver.signal(signal.SIGKILL)
    failed = await sender.hear()
    assert set(failed["errors"]) == {"TransferFailed"}
    await check_nothing_is_held(sender)


async def test_a_killed_sender_and_its_successor(start: Start) -> None:
    receiver, sender = await pair(start)
    await start_held(receiver, sender, 1)
    sender.signal(signal.SIGKILL)
    failed = await receiver.ask("check", seed=1)
    assert failed["error"] == "TransferFailed"
    assert failed["seconds"] < 2
    successor = await start("send", "e2")
    assert (await push_one(receiver, successor, 2))["equal"]
    await check_nothing_is_held(receiver, successor)


async def test_a_sender_killed_while_frames_fly(start: Start) -> None:
    receiver, sender = await pair(start)
    seeds = list(range(40))
    tickets = [await receiver.open(seed, 0, 2000) for seed in seeds]
    sender.tell("push", tickets=tickets, seeds=seeds, chunk=500)
    await receiver.ask("written", seed=0, writes=1)
    sender.signal(signal.SIGKILL)
    await sender.process.wait()
    ends = [await receiver.ask("check", seed=seed) for seed in seeds]
    assert any("error" in end for end in ends)
    assert all(end.get("error", "TransferFailed") == "TransferFailed" for end in ends)
    assert all(end.get("equal", True) for end in ends)
    await check_nothing_is_held(receiver)


async def test_a_stopped_receiver_costs_no_more_than_the_deadline(start: Start) -> None:
    receiver, sender = await pair(start)
    ticket = await receiver.open(1, 0, 20_000, timeout_ms=1000)
    receiver.signal(signal.SIGSTOP)
    sender.tell("push", tickets=[ticket], seeds=[1], chunk=500)
    failed = await sender.hear()
    assert failed["errors"] == ["TransferFailed"]
    assert failed["seconds"] < 1.8
    await check_nothing_is_held(sender)
    receiver.signal(signal.SIGCONT)
    await receiver.ask("revoke", seed=1)
    assert (await push_one(receiver, sender, 2))["equal"]
    await check_nothing_is_held(receiver, sender)


async def test_a_receiver_stopped_in_the_middle(start: Start) -> None:
    receiver, sender = await pair(start)
    await start_held(receiver, sender, 1, timeout_ms=1000)
    receiver.signal(signal.SIGSTOP)
    sender.tell("release")
    heard = [await sender.hear(), await sender.hear()]
    failed = next(answer for answer in heard if "errors" in answer)
    assert failed["errors"] == ["TransferFailed"]
    await check_nothing_is_held(sender)
    receiver.signal(signal.SIGCONT)
    assert (await receiver.ask("check", seed=1))["error"] == "TransferFailed"
    assert (await push_one(receiver, sender, 2))["equal"]
    await check_nothing_is_held(receiver, sender)


async def test_a_sender_stopped_while_frames_fly_does_not_hold_staging(start: Start) -> None:
    receiver, sender = await pair(start)
    seeds = list(range(20))
    tickets = [await receiver.open(seed, 0, 2000) for seed in seeds]
    sender.tell("push", tickets=tickets, seeds=seeds, chunk=500)
    await receiver.ask("written", seed=0, writes=1)
    sender.signal(signal.SIGSTOP)
    for seed in seeds:
        await receiver.ask("revoke", seed=seed)
    await check_nothing_is_held(receiver)
    sender.signal(signal.SIGCONT)
    assert set((await sender.hear())["errors"]) <= {"TransferFailed", "StaleEpoch"}
    assert (await push_one(receiver, sender, 99))["equal"]
    await check_nothing_is_held(receiver, sender)


async def test_a_corrupt_frame(start: Start) -> None:
    receiver, sender = await pair(start)
    ticket = await receiver.open(1, 0, 500)
    assert (await sender.ask("push", tickets=[ticket], seeds=[1], chunk=500, corrupt=True))["errors"] == [
        "TransferFailed"
    ]
    failed = await receiver.ask("check", seed=1)
    assert (failed["error"], failed["untouched"]) == ("TransferFailed", True)
    state = await receiver.ask("state")
    assert (state["checksum_errors"], state["transfers_failed"]) == (1, 1)
    assert (await push_one(receiver, sender, 2))["equal"]
    await check_nothing_is_held(receiver, sender)


async def test_a_revoked_ticket(start: Start) -> None:
    receiver, sender = await pair(start)
    await start_held(receiver, sender, 1)
    await receiver.ask("revoke", seed=1)
    assert (await sender.hear())["errors"] == ["StaleEpoch"]
    assert (await push_one(receiver, sender, 2))["equal"]
    await check_nothing_is_held(receiver, sender)


async def test_another_model_is_refused(start: Start) -> None:
    receiver, sender = await asyncio.gather(start("receive"), start("send", fingerprint="another"))
    ticket = await receiver.open(1, 0, 500)
    refused = await sender.ask("push", tickets=[ticket], seeds=[1], chunk=500)
    assert refused["errors"] == ["IncompatibleLayout"]
    assert "another model" in refused["messages"][0]
    assert (await receiver.ask("state"))["links_refused"] == 1


async def test_a_malformed_address_is_an_error_and_not_the_end() -> None:
    """UCX itself would end the process."""
    transport = UcxTransport()
    port = TransferPort(transport, PodId("decode"), Epoch("e"), make_layout())
    port.start()
    for address in (b"", b"x" * 100, transport.address[:-1], transport.address[:-1] + b"?", bytes(5000)):
        with pytest.raises(TransferFailed):
            transport.connect(address, lambda error: None)
    await port.close()
    with pytest.raises(TransferFailed):
        transport.connect(transport.address, lambda error: None)


async def test_idle_costs_nothing(start: Start) -> None:
    receiver, sender = await pair(start)
    assert (await push_one(receiver, sender, 1))["equal"]
    for child in (receiver, sender):
        child.tell("idle", seconds=2.0)
    for child in (receiver, sender):
        assert (await child.hear())["cpu"] < 0.02
