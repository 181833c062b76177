"""The shared arena: parts never overlap, nothing is lost, and what is granted exists."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kvstore.arena import ALIGNMENT, Arena, rounded

pytestmark = pytest.mark.unit

SHM = Path("/dev/shm")


@pytest.fixture
def path() -> Path:
    return SHM / f"kvrelay-test-arena-{os.getpid()}"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000), st.integers(0, 30)), max_size=80))
def test_random_use(operations: list[tuple[bool, int, int]]) -> None:
    arena = Arena(SHM / f"kvrelay-test-arena-{os.getpid()}-random", 200_000)
    try:
        held: list[tuple[int, int]] = []
        for take, size, index in operations:
            if take:
                offset = arena.allocate(size)
                if offset is not None:
                    held.append((offset, rounded(size)))
                else:
                    assert all(length < rounded(size) for _, length in arena._free)
            elif held:
                arena.free(held.pop(index % len(held))[0])
            parts = sorted([*held, *arena._free])
            assert parts[0][0] == 0
            assert all(
                a + length == b for (a, length), (b, _) in zip(parts, [*parts[1:], (arena.size, 0)], strict=True)
            )
            assert arena.used_bytes == sum(length for _, length in held) <= arena.size
            assert not any(a + length == b for (a, length), (b, _) in zip(arena._free, arena._free[1:], strict=False))
        for offset, _ in held:
            arena.free(offset)
        assert arena._free == [(0, arena.size)]
        with pytest.raises(KeyError):
            arena.free(0)
    finally:
        arena.close()


def test_blocks_of_one_size_leave_nothing_over(path: Path) -> None:
    arena = Arena(path, 10 * 3 * ALIGNMENT)
    offsets = [arena.allocate(3 * ALIGNMENT - 100) for _ in range(10)]
    assert sorted(offset for offset in offsets if offset is not None) == [i * 3 * ALIGNMENT for i in range(10)]
    assert arena.allocate(1) is None
    arena.close()


def test_another_process_sees_what_is_written(path: Path) -> None:
    arena = Arena(path, 1 << 20)
    offset = arena.allocate(5)
    assert offset is not None
    arena.part(offset, 5)[:] = b"block"
    reader, writer = os.pipe()
    if os.fork() == 0:
        with path.open("rb") as file:
            file.seek(offset)
            os.write(writer, file.read(5))
        os._exit(0)
    os.wait()
    assert os.read(reader, 5) == b"block"
    os.close(reader)
    os.close(writer)
    arena.close()
    assert not path.exists()


def test_a_killed_predecessor_leaves_no_file(path: Path) -> None:
    path.write_bytes(b"of a killed process")
    arena = Arena(path, 1 << 20)
    assert bytes(arena.part(0, 4)) == bytes(4)
    arena.close()


def test_no_room_is_said_at_once(path: Path) -> None:
    stat = os.statvfs(SHM)
    # More than all of it, which is refused before a page is taken: what is only more than is free would use up memory first.
    with pytest.raises(OSError, match="No space left"):
        Arena(path, stat.f_blocks * stat.f_frsize + (1 << 30))
    assert not path.exists()
