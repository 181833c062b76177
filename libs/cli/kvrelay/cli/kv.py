"""`kvrelay kv`: what KV stores hold and have done, checking it, removing it."""

import argparse
import itertools
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrelay.cli import state as states
from kvrelay.cli.commands import HOST
from kvrelay.cli.options import KVSTORE_PORT
from kvrelay.cli.store import StoreReport, Verified, blocks, remove, stat, verify
from kvrelay.cli.terminal import terminal
from kvrelay.common.access import PodAccess, read_token
from kvrelay.common.errors import Internal

RUN_DIR = Path("var/run")
SHOWN_BLOCKS = 50
_ID = re.compile(r"[0-9a-f]{32}")


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    kv = commands.add_parser("kv", help="what the KV stores hold")
    actions = kv.add_subparsers(required=True, metavar="ACTION")
    found = _action(actions, "ls", "the blocks", run_ls)
    found.add_argument("--fingerprint", default="", help="of one model alone")
    found.add_argument("--limit", type=int, default=SHOWN_BLOCKS, help="blocks of each store; 0: all [%(default)s]")
    _action(actions, "stat", "tiers, and what they have done", run_stat)
    gone = _action(actions, "rm", "remove blocks from all tiers", run_rm)
    gone.add_argument("ids", nargs="*", metavar="ID", help="32 hexadecimal digits, as ls shows them")
    gone.add_argument("--all", action="store_true", help="every block")
    _action(actions, "verify", "read every block and remove what is corrupt; exit status 1 if anything was", run_verify)


def _action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str, run: object
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text)
    parser.add_argument("--address", help=f"HOST:PORT of a store [those of the running stack, or {_default()}]")
    parser.add_argument("--run-dir", type=Path, default=RUN_DIR, help="of the stack [%(default)s]")
    parser.add_argument("--auth-token-file", type=Path, metavar="FILE", help="with the token that the store asks for")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="who signs the store's certificate; with it, TLS")
    parser.add_argument("--tls-name", default="", metavar="NAME", help="in that certificate [the address's host]")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="of your own, for stores that want one")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="of that certificate")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)
    return parser


def _default() -> str:
    return f"{HOST}:{KVSTORE_PORT}"


def stores(args: argparse.Namespace) -> tuple[dict[str, str], PodAccess]:
    """Addresses by name, and how they are asked. Raises ValueError."""
    state = None if args.address else states.load(args.run_dir)
    token_file = args.auth_token_file
    found = {args.address: args.address} if args.address else {}
    if state is not None:
        found = {entry.name: f"{HOST}:{entry.grpc_port}" for entry in state.entries if entry.kind == "kvstore"}
        if not found:
            raise ValueError(f"the stack in {args.run_dir} has no KV store")
        token_file = token_file or (state.options.pod_auth_token_file and Path(state.options.pod_auth_token_file))
    return found or {_default(): _default()}, _access(args, read_token(token_file) if token_file else "")


def _access(args: argparse.Namespace, token: str) -> PodAccess:
    own = {"cert": args.tls_cert, "key": args.tls_key}
    if args.tls_ca is None and (args.tls_name or any(own.values())):
        raise ValueError("options --tls-cert, --tls-key and --tls-name need --tls-ca")
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ValueError("options --tls-cert and --tls-key go together")
    try:
        return PodAccess.load(token, ca=args.tls_ca, name=args.tls_name, **own)
    except Internal as error:
        raise ValueError(error.message) from error


def run_ls(args: argparse.Namespace, console: Console) -> int:
    addresses, access = stores(args)
    limit = args.limit or None
    found = {
        name: list(itertools.islice(blocks(address, args.fingerprint, access), limit))
        for name, address in addresses.items()
    }
    if args.json:
        print_json([{"store": name, **asdict(block)} for name, held in found.items() for block in held])
        return 0
    table = _table("store", "block", "tier", "bytes", "dtype", "checksum", "model")
    for name, held in found.items():
        for block in held:
            model = block.fingerprint[:12]
            table.add_row(name, block.id, block.tier, str(block.size), block.dtype, block.checksum, model)
    terminal().print(table)
    if any(len(held) == limit for held in found.values()):
        console.print(f"the first {limit} of each store: --limit 0 shows all")
    return 0


def run_stat(args: argparse.Namespace, console: Console) -> int:
    addresses, access = stores(args)
    reports = {name: stat(address, access) for name, address in addresses.items()}
    if args.json:
        print_json([{"store": name, **asdict(report)} for name, report in reports.items()])
    else:
        terminal().print(tiers_table(reports))
        for name, report in reports.items():
            held = f"{report.num_pods} pods, which pin {report.num_pins} blocks and write {report.num_writing}"
            terminal().print(f"{name}: {report.node_id}, {held}; {report.announcer_backlog} to be announced")
    broken = [f"{name}: {what}" for name, report in reports.items() for what in report.violations]
    for what in broken:
        console.print(f"[red]{escape(what)}[/]")
    return 1 if broken else 0


def run_rm(args: argparse.Namespace, console: Console) -> int:
    if args.all == bool(args.ids):
        raise ValueError("name the blocks, or say --all")
    for block_id in args.ids:
        if not _ID.fullmatch(block_id):
            raise ValueError(f"{block_id!r} is no block's id: it has 32 hexadecimal digits")
    addresses, access = stores(args)
    counts = {name: remove(address, args.ids, access) for name, address in addresses.items()}
    if args.json:
        print_json([{"store": name, "num_removed": count} for name, count in counts.items()])
    else:
        console.print(", ".join(f"{name}: {count} blocks removed" for name, count in counts.items()))
    return 0


def run_verify(args: argparse.Namespace, console: Console) -> int:
    addresses, access = stores(args)
    last: dict[tuple[str, str], Verified] = {}
    with console.status("reading") as status:
        for name, address in addresses.items():
            for seen in verify(address, access):
                last[name, seen.tier] = seen
                status.update(f"{name}, {seen.tier}: {seen.num_whole} whole")
    if args.json:
        print_json([{"store": name, **asdict(seen)} for (name, _), seen in last.items()])
    else:
        table = _table("store", "tier", "whole", "corrupt", "not read")
        for (name, _), seen in last.items():
            table.add_row(name, seen.tier, str(seen.num_whole), str(seen.num_corrupt), str(seen.num_failed))
        terminal().print(table)
    return 1 if any(seen.num_corrupt or seen.num_failed for seen in last.values()) else 0


def tiers_table(reports: Mapping[str, StoreReport]) -> Table:
    table = _table(
        "store", "tier", "state", "blocks", "used", "limit", "hits", "misses", "evicted", "dropped", "corrupt"
    )
    for name, report in reports.items():
        for tier in report.tiers:
            shown = "[green]healthy[/]" if tier.healthy else f"[yellow]{escape(tier.reason[:60])}[/]"
            sizes = _mebibytes(tier.used_bytes), _mebibytes(tier.limit_bytes)
            counts = tier.hits, tier.misses, tier.evictions, tier.dropped, tier.corrupt
            table.add_row(name, tier.tier, shown, str(tier.num_blocks), *sizes, *map(str, counts))
    return table


def _mebibytes(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value)).decode())
