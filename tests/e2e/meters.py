"""What the kernel says of a stack's processes: memory, processor time, bytes over the connections between them."""

import asyncio
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvrelay.cli.node import Node
from kvrelay.cli.stack import Stack
from tests.exactness.served import ask_all

IDLE_SHARE = 0.03
"""Of a core: what a process of an idle stack may use at most."""
PARAMETERS = 134_515_008
"""Of SmolLM2-135M."""
FLAT_SHARE = 0.02
"""By which a process may grow while it serves, once it is warm."""
FLAT_BYTES = 1 << 20
"""The same of a process so small that a share of it is a few pages."""
HEADER_SHARE = 0.02
"""Of the payload: what transport, framing and control may add to it on the wire."""
BFLOAT16_TOKEN_BYTES = 30 * 2 * 3 * 64 * 2
"""Of SmolLM2's KV: 30 layers, K and V, 3 heads of 64."""
KV_CACHE_BYTES = 512 << 20

_MULTIPLIES_IN = (
    "from kvrelay.engine.loader.load import arithmetic_of as of; import torch; print(of(torch.bfloat16, 'cpu'))"
)
_TICKS = os.sysconf("SC_CLK_TCK")
_SENT = re.compile(r"\bbytes_sent:(\d+)")
_OWNER = re.compile(r"\bpid=(\d+)\b")


def decode_pod_limit() -> float:
    """What a decode pod in bfloat16 with 512 MiB of KV may hold at most, in bytes: the sum of its processes' PSS.

    Where the processor lacks bfloat16, a weight takes four bytes. Another process finds that out: torch in this one
    would share its library with the pod, whose part of it would be counted half.
    """
    told = subprocess.run([sys.executable, "-c", _MULTIPLIES_IN], capture_output=True, check=True, text=True)
    return 1.4e9 + (0 if told.stdout.strip() == "torch.bfloat16" else 2 * PARAMETERS)


def processes(stack: Stack) -> dict[str, int]:
    """Pids by what they are: router, redis, and of each pod its front and its engine."""
    named: dict[str, int] = {}
    for node in stack.nodes:
        for pid in node.pids():
            part = "" if node not in stack.pods else " front" if pid == node.pid else " engine"
            assert node.name + part not in named, f"{node.name} has one process too many"
            named[node.name + part] = pid
    return named


def engine_of(node: Node) -> int:
    """The pid of the process that owns the model and the blocks."""
    [pid] = [pid for pid in node.pids() if pid != node.pid]
    return pid


def pss_bytes(pid: int) -> int:
    """Its memory, with what it shares counted by its share."""
    return _rollup(pid)["Pss"]


def own_bytes(pid: int) -> int:
    """Its PSS without the pages of files: those are libraries, whose shares change with what else runs on the machine."""
    sizes = _rollup(pid)
    return sizes["Pss"] - sizes["Pss_File"]


def _rollup(pid: int) -> dict[str, int]:
    """Bytes by kind."""
    fields = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    return {name.rstrip(":"): int(kibibytes) * 1024 for name, kibibytes, _ in fields}


def memory(stack: Stack) -> dict[str, int]:
    """Of each process, what is its own."""
    return {name: own_bytes(pid) for name, pid in processes(stack).items()}


def pod_bytes(node: Node) -> int:
    """PSS of a pod's processes together."""
    return sum(map(pss_bytes, node.pids()))


def growth(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Bytes, by process. A process that is not the same any more is an error."""
    assert before.keys() == after.keys(), f"{sorted(before)} became {sorted(after)}"
    return {name: after[name] - before[name] for name in before}


def swollen(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, str]:
    """Those that have grown by more than a warm process may."""
    grown = growth(before, after)
    return {
        name: f"{before[name]} by {grown[name]} bytes"
        for name in grown
        if grown[name] > max(FLAT_BYTES, FLAT_SHARE * before[name])
    }


def cpu_seconds(pid: int) -> float:
    """Processor time that it has used, in user and system mode, with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def cpu_shares(stack: Stack, seconds: float) -> dict[str, float]:
    """Of a core, over that time, by process."""
    pids = processes(stack)
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    started = time.monotonic()
    time.sleep(seconds)  # what is measured is this time
    passed = time.monotonic() - started
    return {name: (cpu_seconds(pid) - before[name]) / passed for name, pid in pids.items()}


def has_socket_statistics() -> bool:
    return shutil.which("ss") is not None


def tcp_bytes(sender: int, receiver: int) -> int:
    """What the kernel has sent so far over the TCP connections from one process to another, both of this host."""
    sockets = list(_sockets())
    [to] = [{local for pid, local, _, _ in sockets if pid == receiver}]
    return sum(sent for pid, _, peer, sent in sockets if pid == sender and peer in to)


def _sockets() -> Iterator[tuple[int, str, str, int]]:
    """Owner, local address, peer's address and bytes sent of each established TCP connection."""
    lines = subprocess.run(["ss", "-tiHnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) % 2 == 0, "a line of addresses and a line of counters each"
    for head, counters in zip(lines[::2], lines[1::2], strict=True):
        owner, sent = _OWNER.search(head), _SENT.search(counters)
        if owner is not None:
            _, _, _, local, peer = head.split()[:5]
            yield int(owner[1]), local, peer, int(sent[1]) if sent is not None else 0


def random_prompts(rng: random.Random, count: int, num_tokens: int) -> list[list[int]]:
    """No two of them begin alike, as good as surely."""
    return [[rng.randrange(100, 40_000) for _ in range(num_tokens)] for _ in range(count)]


def ask(stack: Stack, prompts: Sequence[Sequence[int]], at_once: int, num_tokens: int) -> None:
    """Each prompt answered with exactly so many tokens."""
    answers = asyncio.run(
        ask_all(
            stack.url, prompts, at_once, max_tokens=num_tokens, ignore_eos=True, logprobs=None, return_token_ids=True
        )
    )
    assert all(len(choice.tokens) == num_tokens for choices in answers for choice in choices)
