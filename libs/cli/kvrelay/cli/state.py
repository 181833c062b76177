"""What is on disk of a running stack: which processes it started, at which ports. Enough to end exactly those."""

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from kvrelay.cli.options import StackOptions
from kvrelay.cli.process import Process

FILE = "state.json"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One process of the stack and the command that started it."""

    process: Process
    kind: str
    """redis, kvstore, prefill, decode, both or router."""
    command: tuple[str, ...]
    env: dict[str, str]
    http_port: int = 0
    grpc_port: int = 0

    @property
    def name(self) -> str:
        return self.process.name


@dataclass(frozen=True, kw_only=True)
class State:
    options: StackOptions
    entries: tuple[Entry, ...] = ()

    def with_entry(self, entry: Entry) -> "State":
        """With `entry` added, or in place of the one of its name."""
        names = [known.name for known in self.entries]
        if entry.name not in names:
            return replace(self, entries=(*self.entries, entry))
        return replace(self, entries=tuple(entry if known.name == entry.name else known for known in self.entries))


def load(run_dir: Path) -> State | None:
    """None where no stack was started. Raises ValueError for a file that is no state."""
    try:
        data = (run_dir / FILE).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=State, dec_hook=_decode)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{run_dir / FILE} is not a stack's state: {error}") from error


def save(run_dir: Path, state: State) -> None:
    """Whole or not at all."""
    scratch = run_dir / f".{FILE}.{os.getpid()}"
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(asdict(state), enc_hook=_encode)))
    scratch.replace(run_dir / FILE)


def _encode(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} does not belong into a state")


def _decode(kind: type, value: object) -> object:
    if kind is Path:
        return Path(str(value))
    raise TypeError(f"{kind.__name__} does not belong into a state")


def discard(run_dir: Path) -> None:
    (run_dir / FILE).unlink(missing_ok=True)
