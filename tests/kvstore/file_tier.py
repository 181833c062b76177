"""File tiers for tests, what is on their disk, files that hang, and filesystems of their own."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvrelay.kvstore.policy import Lru
from kvrelay.kvstore.tiers import blockfile
from kvrelay.kvstore.tiers.blockfile import LOCK_NAME, occupied_bytes
from kvrelay.kvstore.tiers.files import FileTier
from kvrelay.transfer.block import BlockInfo

Open = Callable[..., Any]
Hang = Callable[[str], Callable[[], bool]]
MIB = 1 << 20
T = TypeVar("T")


def files_of(directory: Path) -> dict[str, int]:
    """Lengths of all files but the lock, by path; a file that goes meanwhile is left out."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                found[os.path.join(folder, name)] = os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    assert found.pop(str(directory / LOCK_NAME), 0) == 0
    return found


def check_disk(tier: FileTier, infos: list[BlockInfo]) -> None:
    """These blocks and nothing else are in the directory, found and counted."""
    files = files_of(Path(tier.directory))
    assert files == {path_of(tier, info): occupied_bytes(info.size) for info in infos}
    assert tier.used_bytes == sum(files.values()) <= tier.limit_bytes
    assert all(tier.find(info.id) == info for info in infos)


def path_of(tier: FileTier, info: BlockInfo) -> str:
    return os.path.join(tier.directory, blockfile.relative_path(info.id))


def contents(path: str) -> bytes:
    return Path(path).read_bytes()


def flip(path: str | Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


async def begun(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A call whose own task has begun as well."""
    task = asyncio.create_task(work)
    for _ in range(3):
        await asyncio.sleep(0)
    return task


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    """Opens tiers, of one directory unless told, and closes them in the end."""
    tiers = []

    async def open_tier(directory: Path = tmp_path / "blocks", **options: Any) -> FileTier:
        given = {"limit_bytes": 64 * MIB, "policy": Lru(), "direct": "auto", "threads": 3, "timeout_s": 20.0} | options
        tier = FileTier(directory, **given)
        tiers.append(tier)
        await tier.open()
        return tier

    yield open_tier
    for tier in tiers:
        await tier.close()


@pytest.fixture
def hang(tmp_path: Path) -> Iterator[Hang]:
    """Who opens this file hangs from now on, until the function given says that it has let someone go, who finds it empty then."""
    pipes: list[Path] = []

    def release(pipe: Path) -> bool:
        try:
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # no one is there
            return False
        return True

    def replace(path: str) -> Callable[[], bool]:
        pipe = tmp_path / f"pipe{len(pipes)}"
        os.mkfifo(pipe)
        os.unlink(path)
        os.link(pipe, path)
        pipes.append(pipe)
        return lambda: release(pipe)

    yield replace
    for pipe in pipes:
        release(pipe)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    mounted: list[Path] = []

    def make(kind: str, options: str = "rw") -> Path:
        path = tmp_path / f"mount{len(mounted)}"
        path.mkdir()
        if reason := mount_at(path, kind, options):
            pytest.skip(reason)
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        unmount(path)


def mount_at(path: Path, kind: str, options: str = "rw") -> str:
    """Why it cannot be done; empty: it is."""
    try:
        done = subprocess.run(
            ["mount", "-t", kind, "-o", options, "kvrelay-test", str(path)], capture_output=True, text=True
        )
    except FileNotFoundError:
        return "there is no mount command"
    return f"a {kind} cannot be mounted here: {done.stderr.strip()}" if done.returncode else ""


def unmount(path: Path) -> None:
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def remount(path: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)
