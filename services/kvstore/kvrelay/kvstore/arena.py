"""The CPU tier's memory: one shared mapping that the pods of the node read and write, and who has which part of it."""

import contextlib
import fcntl
import mmap
import os
from bisect import bisect_left, insort
from pathlib import Path

ALIGNMENT = 4096


class Arena:
    """A file of `size` bytes in a memory file system, mapped. Parts are whole pages, first fit; neighbours that are free become one.

    Of blocks of one size none is lost between them. The file is gone with the last process that has it mapped: its name is taken away
    by `close`, and by the next arena of the same path, whose predecessor was killed. As long as it has this
    name and is mapped here it is locked (`flock`).
    """

    def __init__(self, path: Path, size: int) -> None:
        """Raises OSError where the file system has not that much room: what is granted here is there when it is written."""
        self.path = path
        self.size = size - size % ALIGNMENT
        unlocked = path.with_name(path.name + ".new")
        unlocked.unlink(missing_ok=True)
        descriptor = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the mapping keeps it
            unlocked.rename(path)
            os.posix_fallocate(descriptor, 0, self.size)
            self._map = mmap.mmap(descriptor, self.size)
        except (OSError, ValueError):
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self.view = memoryview(self._map)
        self._free: list[tuple[int, int]] = [(0, self.size)]
        """(offset, bytes) of the free parts, by offset; no two touch."""
        self._taken: dict[int, int] = {}
        self.used_bytes = 0

    def allocate(self, num_bytes: int) -> int | None:
        """The offset of a free part of at least so many bytes; None where there is none."""
        wanted = rounded(num_bytes)
        for index, (offset, length) in enumerate(self._free):
            if length >= wanted:
                if length == wanted:
                    del self._free[index]
                else:
                    self._free[index] = (offset + wanted, length - wanted)
                self._taken[offset] = wanted
                self.used_bytes += wanted
                return offset
        return None

    def free(self, offset: int) -> None:
        """Raises KeyError for what was not allocated."""
        length = self._taken.pop(offset)
        self.used_bytes -= length
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and self._free[at][0] == offset + length:
            length += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == offset:
            offset, before = self._free.pop(at - 1)
            length += before
        insort(self._free, (offset, length))

    def part(self, offset: int, num_bytes: int) -> memoryview:
        """To be released before `close`."""
        return self.view[offset : offset + num_bytes]

    def close(self) -> None:
        """The mapping goes with the last view of it."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()


def rounded(num_bytes: int) -> int:
    """What a part of so many bytes takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT
