"""`kvrelay status`: the processes of the local stack, for eyes or for programs."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrelay.cli.inspection import PodReport, inspect
from kvrelay.cli.kv import print_json, tiers_table
from kvrelay.cli.node import Node
from kvrelay.cli.stack import Stack
from kvrelay.cli.store import StoreError, StoreReport, stat
from kvrelay.cli.terminal import terminal
from kvrelay.cli.up import RUN_DIR
from kvrelay.common.access import PodAccess, bearer

POD_KINDS = ("prefill", "decode", "both")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One process as it was when it was asked."""

    name: str
    kind: str
    state: str
    """ready, starting (or what else it says of itself), or dead."""
    pid: int
    http_port: int
    """0: none."""
    grpc_port: int
    log: str
    pod: PodReport | None
    """None where it is no pod, or does not answer."""


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    status = commands.add_parser("status", help="pods and KV stores, what they hold, bytes pushed")
    status.add_argument("--run-dir", type=Path, default=RUN_DIR, help="[%(default)s]")
    status.add_argument("--json", action="store_true", help="for programs")
    status.set_defaults(run=run_status)


def run_status(args: argparse.Namespace, console: Console) -> int:
    """0 where all is ready, else 1."""
    stack = Stack.attach(args.run_dir)
    if stack is None:
        if args.json:
            print_json({"ready": False, "url": "", "processes": [], "kvstores": []})
        console.print(f"nothing is up in {args.run_dir}")
        return 1
    seen = [_look(node, stack.pod_token) for node in stack.nodes]
    stores, problems = _stores(stack)
    ready = stack.ready
    if args.json:
        url = next((node.http_address for node in stack.nodes if node.kind == "router"), "")
        held = [{"store": name, **asdict(report)} for name, report in stores.items()]
        print_json({"ready": ready, "url": url, "processes": list(map(asdict, seen)), "kvstores": held})
    else:
        terminal().print(_table(seen))
        if stores:
            terminal().print(tiers_table(stores))
    for problem in problems:
        console.print(escape(problem))
    return 0 if ready else 1


def _look(node: Node, token: str) -> Seen:
    if not node.alive:
        state = "dead"
    elif node.http_port:
        said = node.readiness()
        state = "ready" if said.ready else said.text
    else:
        state = "up"
    asked = node.kind in POD_KINDS and state != "dead"
    return Seen(
        name=node.name,
        kind=node.kind,
        state=state,
        pid=node.pid,
        http_port=node.http_port,
        grpc_port=node.grpc_port,
        log=str(node.process.log),
        pod=inspect(node.grpc_address, token) if asked else None,
    )


def _stores(stack: Stack) -> tuple[dict[str, StoreReport], list[str]]:
    """Reports by name, and why there is none of the others."""
    reports, problems = {}, []
    for node in stack.kvstores:
        try:
            reports[node.name] = stat(node.grpc_address, PodAccess(bearer(stack.pod_token)))
        except StoreError as error:
            problems.append(str(error))
    return reports, problems


def _table(processes: Sequence[Seen]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("name", "state", "pid", "HTTP", "gRPC", "reqs", "blocks", "free", "sent", "received"):
        table.add_column(heading, no_wrap=True)
    for seen in processes:
        table.add_row(*_row(seen))
    return table


def _row(seen: Seen) -> tuple[str, ...]:
    colour = {"ready": "green", "dead": "red", "up": "default"}.get(seen.state, "yellow")
    known = seen.name, f"[{colour}]{escape(seen.state)}[/]", str(seen.pid)
    if seen.state == "dead":
        return known
    ports = str(seen.http_port or ""), str(seen.grpc_port)
    if seen.pod is None:
        return *known, *ports
    blocks = str(seen.pod.num_requests), str(seen.pod.num_blocks), str(seen.pod.free_blocks)
    moved = mebibytes(seen.pod.payload_bytes_sent), mebibytes(seen.pod.payload_bytes_received)
    return *known, *ports, *blocks, *moved


def mebibytes(count: int) -> str:
    return f"{count / (1 << 20):.2f} MiB"
