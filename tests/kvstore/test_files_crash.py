"""The file tier of a process that is killed while it writes. The same directory lives through all the kills."""

import asyncio
import hashlib
import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.common.layout import KvDtype
from kvrelay.kvstore.policy import Lru
from kvrelay.kvstore.tiers import blockfile
from kvrelay.kvstore.tiers.files import FileTier
from kvrelay.transfer.block import BlockInfo, checksum

CRASHES = int(os.environ.get("KVRELAY_CRASHES", "50"))
LIMIT_BYTES = 2 << 20
MAX_BLOCK_BYTES = 300_000
WRITERS = 4


def payload_of(block_id: BlockId) -> bytes:
    """Size and bytes follow from the id, so that whoever finds the block knows what it must hold."""
    size = int.from_bytes(block_id[:4], "little") % MAX_BLOCK_BYTES + 1
    return hashlib.shake_128(block_id).digest(size)


def block_of(block_id: BlockId) -> tuple[BlockInfo, memoryview]:
    payload = memoryview(payload_of(block_id))
    info = BlockInfo(
        id=block_id,
        head=block_id,
        fingerprint=Fingerprint("model"),
        shape="5d0c",
        dtype=KvDtype.BFLOAT16,
        size=len(payload),
    )
    return msgspec.structs.replace(info, checksum=checksum(info, payload)), payload


# The process that is killed


def say(word: str, block_id: BlockId) -> None:
    """In one write, which a kill does not divide."""
    os.write(1, f"{word} {block_id.hex()}\n".encode())


class SaysVictims(Lru):
    """Before anything happens to them: what it has not named must survive."""

    def victim(self, incoming: BlockId, evictable: Callable[[BlockId], bool]) -> BlockId | None:
        block_id = super().victim(incoming, evictable)
        if block_id is not None:
            say("victim", block_id)
        return block_id


async def store_for_ever(directory: str, direct: bool) -> None:
    tier = FileTier(directory, LIMIT_BYTES, SaysVictims(), direct=direct, threads=WRITERS, timeout_s=60)
    await tier.open()

    async def store() -> None:
        while True:
            block_id = BlockId(os.urandom(16))
            await tier.put(*block_of(block_id))
            say("stored", block_id)

    await asyncio.gather(*(store() for _ in range(WRITERS)))


# The one that kills it


def start(directory: Path, direct: bool) -> subprocess.Popen[bytes]:
    """It waits for a line before it opens the tier: what it takes to start passes while the last one's work is checked."""
    command = [sys.executable, __file__, str(directory), "direct" if direct else "buffered"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def kill_after(process: subprocess.Popen[bytes], num_lines: int) -> list[tuple[str, BlockId]]:
    """Lets it open the tier. Gives all that it said before it was killed, which was as soon as it had said `num_lines`."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(b"\n")
        process.stdin.flush()
        lines = list(itertools.islice(process.stdout, num_lines))
        process.kill()
        lines += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL
    assert len(lines) >= num_lines
    said = (line.decode().split() for line in lines)
    return [(word, BlockId(bytes.fromhex(name))) for word, name in said]


def files_of(directory: Path) -> dict[str, int]:
    found = {path.name: path.stat().st_size for path in directory.rglob("*") if path.is_file()}
    assert found.pop(blockfile.LOCK_NAME) == 0
    return found


def check_whole(directory: Path) -> None:
    """Whatever has a block's name is all of it, also before anyone has cleared up: only temporary files are torn."""
    for path in directory.rglob(f"*{blockfile.BLOCK_SUFFIX}"):
        info, payload = block_of(BlockId(bytes.fromhex(path.stem)))
        size = blockfile.occupied_bytes(info.size)
        assert path.read_bytes() == (blockfile.encode_header(info) + payload).ljust(size, b"\0")


async def check(directory: Path, expected: set[BlockId], direct: bool) -> set[BlockId]:
    """Opens the tier, checks all that it holds, and says what that is."""
    tier = FileTier(directory, LIMIT_BYTES, Lru(), direct=direct, threads=WRITERS, timeout_s=60)
    infos = await tier.open()
    ids = {info.id for info in infos}
    assert expected <= ids
    for info in infos:
        into = bytearray(info.size)
        assert await tier.get(info.id, memoryview(into)) == block_of(info.id)[0]
        assert into == payload_of(info.id)
    on_disk = files_of(directory)
    assert on_disk == {f"{info.id.hex()}.kv": blockfile.occupied_bytes(info.size) for info in infos}
    assert tier.used_bytes == sum(on_disk.values()) <= LIMIT_BYTES
    await tier.close()
    return ids


@pytest.mark.integration
def test_kills_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    rng = random.Random(11)
    expected: set[BlockId] = set()
    num_stored = num_victims = num_temporary = 0
    process = start(tmp_path, direct=False)
    for crash in range(CRASHES):
        for word, block_id in kill_after(process, rng.randrange(1, 50)):
            if word == "stored":
                expected.add(block_id)
                num_stored += 1
            else:
                expected.discard(block_id)
                num_victims += 1
        check_whole(tmp_path)
        left = files_of(tmp_path)
        num_temporary += sum(name.endswith(blockfile.TEMPORARY_SUFFIX) for name in left)
        assert sum(left.values()) <= LIMIT_BYTES
        process = start(tmp_path, direct=crash % 2 == 0)
        expected = asyncio.run(check(tmp_path, expected, direct=crash % 2 == 0))
    with process:
        process.kill()
    print(f"{CRASHES} kills, {num_stored} stored, {num_victims} victims, {num_temporary} temporary files found")
    # Kills that never interrupt a write would show nothing.
    assert CRASHES < 20 or (num_temporary and num_victims)


if __name__ == "__main__":
    if sys.stdin.readline():
        asyncio.run(store_for_ever(sys.argv[1], sys.argv[2] == "direct"))
