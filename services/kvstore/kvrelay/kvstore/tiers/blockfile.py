"""One block in one file: the format, and what threads do to such files. Nothing here knows of the tier or of its event loop.

    header   one page: magic, version, length of the msgpack, BlockInfo as msgpack, zeros, XXH3-64 of all before it
    payload  the block's bytes, and zeros up to a whole page

A file is exactly `occupied_bytes` long, with buffered I/O as well as with O_DIRECT, so that either reads what the other wrote.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import struct
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import xxhash

from kvrelay.common.ids import BlockId
from kvrelay.transfer.block import BlockInfo, checksum

PAGE_BYTES = 4096
"""Of a header, and what O_DIRECT wants buffers, offsets and lengths to be multiples of."""
MAGIC = b"KVRBLOCK"
VERSION = 1
BLOCK_SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"
LOCK_NAME = ".kvrelay-files"
FOLDERS = tuple(f"{first:02x}" for first in range(256))
ID_BYTES = 16

_PREFIX = struct.Struct("<8sII")
_DIGEST = struct.Struct("<Q")
_DIGEST_AT = PAGE_BYTES - _DIGEST.size
_decoder = msgspec.msgpack.Decoder(BlockInfo)
_scratch = threading.local()


class Damaged(Exception):
    """The file is not the block that it is named for, or not whole."""


class Abandoned(Exception):
    """The caller waits no more: what it asked for has not been done."""


class Remains(OSError):
    """A write failed, and what it left on the disk could not be removed."""


class Claim:
    """Whether the caller still waits for what a thread does for it. Once it does not, its buffers are its own again:
    nothing is written into them, and what was read from them is thrown away."""

    __slots__ = ("_lock", "abandoned")

    def __init__(self) -> None:
        self.abandoned = False
        self._lock = threading.Lock()

    def abandon(self) -> None:
        """Waits for a copy that has begun: for one block, in memory."""
        with self._lock:
            self.abandoned = True

    def check(self) -> None:
        if self.abandoned:
            raise Abandoned

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The caller's buffers may be written to meanwhile, by what takes as long as a copy in memory. Raises Abandoned."""
        with self._lock:
            self.check()
            yield


def occupied_bytes(size: int) -> int:
    """Of the file of a block of `size` bytes: the header's page and whole pages of payload."""
    return PAGE_BYTES + -(-size // PAGE_BYTES) * PAGE_BYTES


def relative_path(block_id: BlockId) -> str:
    name = block_id.hex()
    return f"{name[:2]}/{name}{BLOCK_SUFFIX}"


def encode_header(info: BlockInfo) -> bytes:
    """Raises ValueError where `info` does not fit a page."""
    body = msgspec.msgpack.encode(info)
    page = (_PREFIX.pack(MAGIC, VERSION, len(body)) + body).ljust(_DIGEST_AT, b"\0")
    if len(page) > _DIGEST_AT:
        raise ValueError(f"what describes the block takes {len(body)} bytes, too many for a page")
    return page + _DIGEST.pack(xxhash.xxh3_64_intdigest(page))


def decode_header(page: memoryview) -> BlockInfo:
    """Of the first page of a file. Raises Damaged."""
    if xxhash.xxh3_64_intdigest(page[:_DIGEST_AT]) != _DIGEST.unpack_from(page, _DIGEST_AT)[0]:
        raise Damaged("the header does not match its checksum")
    magic, version, length = _PREFIX.unpack_from(page)
    if magic != MAGIC or version != VERSION or _PREFIX.size + length > _DIGEST_AT:
        raise Damaged("not a header of this version")
    try:
        info = _decoder.decode(page[_PREFIX.size : _PREFIX.size + length])
    except msgspec.MsgspecError as error:
        raise Damaged(f"the header cannot be read: {error}") from error
    if len(info.id) != ID_BYTES or info.size < 0:
        raise Damaged("the header describes no block")
    return info


def read_block(path: str, info: BlockInfo, into: memoryview, claim: Claim, flags: int) -> None:
    """Brings the payload into the first bytes of `into`, verified. Where it is damaged they are zeros, or as they were.

    Raises FileNotFoundError, Damaged, Abandoned, OSError.
    """
    claim.check()
    size = occupied_bytes(info.size)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
    try:
        if not flags & os.O_DIRECT and not claim.abandoned and _read_cached(fd, info, into, claim):
            return
        found = os.fstat(fd).st_size
        if found != size:
            raise Damaged(f"{found} bytes long instead of {size}")
        file = _aligned(size)
        _read(fd, file)
    finally:
        os.close(fd)
    payload = file[PAGE_BYTES : PAGE_BYTES + info.size]
    _verify(info, file[:PAGE_BYTES], payload, file[PAGE_BYTES + info.size :])
    with claim.held():
        _copy(payload, into)


def _read_cached(fd: int, info: BlockInfo, into: memoryview, claim: Claim) -> bool:
    """Whether the page cache had the whole file, and nothing more: then it has been read straight into `into`, without a second copy.

    What the disk must be waited for is not read so, since a caller that gives up waits for this.
    """
    ends = _aligned(2 * PAGE_BYTES)
    header, rest = ends[:PAGE_BYTES], ends[PAGE_BYTES : PAGE_BYTES + -info.size % PAGE_BYTES]
    with claim.held():
        payload = into[: info.size].cast("B")
        try:
            count = os.preadv(fd, [header, payload, rest, bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError:  # EAGAIN, or a filesystem that cannot; another error will be there again
            return False
    if count != occupied_bytes(info.size):
        return False
    try:
        _verify(info, header, payload, rest)
    except Damaged:
        with claim.held():  # else it was changed by its owner meanwhile
            _copy(memoryview(bytes(info.size)), payload)
        raise
    return True


def _verify(info: BlockInfo, header: memoryview, payload: memoryview, rest: memoryview) -> None:
    """Of a whole file. Raises Damaged."""
    if decode_header(header) != info:
        raise Damaged("the header is of another block")
    if checksum(info, payload) != info.checksum or rest != bytes(rest.nbytes):
        raise Damaged("the payload does not match its checksum")


def write_block(path: str, temporary: str, header: bytes, data: memoryview, claim: Claim, flags: int) -> None:
    """Leaves the whole block, its bytes on the disk, or nothing; a crash may leave `temporary` besides.

    The folder is not synced, which would take as long as all else: after a power cut the block may be gone, but is never torn.

    Raises Abandoned, OSError, and Remains where a file is left after all.
    """
    claim.check()
    written = temporary
    try:
        _fill(temporary, header, data, flags)
        claim.check()
        os.rename(temporary, path)
        written = path
    except BaseException as error:
        try:
            remove_file(written)
        except OSError as left:
            raise Remains(left.errno, f"{left.strerror}, removing what is left after: {error!r}") from error
        raise


def remove_file(path: str) -> None:
    """If it is there; what is not there cannot be removed from a read-only filesystem either. Raises OSError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path)
            raise error


def scan_folder(folder: str, flags: int) -> list[tuple[int, BlockInfo]]:
    """Blocks and when they were written, in ns. Reads headers only. Removes all else: temporary files, damaged ones, strange ones."""
    with os.scandir(folder) as listing:
        entries = list(listing)
    found = []
    for entry in entries:
        try:
            found.append(_examine(entry, os.path.basename(folder), flags))
        except Damaged:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                remove_file(entry.path)
    return found


def take_directory(directory: str) -> int:
    """Makes the directory ready for one process, this one, as long as the descriptor that it gives is open.

    Refuses one that holds other things, and so would lose them. Raises OSError.
    """
    if not os.path.isdir(directory):
        os.makedirs(directory)
        sync_folder(os.path.dirname(os.path.abspath(directory)))
    if set(os.listdir(directory)) - {"lost+found"} and not os.path.exists(os.path.join(directory, LOCK_NAME)):
        raise OSError(errno.ENOTEMPTY, "the directory is not empty and not a kvstore's")
    # Read-only, so that it does not keep its filesystem from being remounted.
    lock = os.open(os.path.join(directory, LOCK_NAME), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(error.errno, "the directory is in use by another process") from error
        for folder in FOLDERS:
            os.makedirs(os.path.join(directory, folder), exist_ok=True)
        sync_folder(directory)
    except BaseException:  # whatever it was, an interrupt as well: the lock is not left held
        os.close(lock)
        raise
    return lock


def direct_flag(directory: str) -> int:
    """O_DIRECT, which the directory's filesystem takes. Raises OSError where it does not."""
    fd = os.open(os.path.join(directory, LOCK_NAME), os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    try:
        os.preadv(fd, [_aligned(PAGE_BYTES)], 0)
    finally:
        os.close(fd)
    return os.O_DIRECT


def sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _examine(entry: os.DirEntry[str], folder: str, flags: int) -> tuple[int, BlockInfo]:
    if not entry.name.endswith(BLOCK_SUFFIX) or not entry.is_file(follow_symlinks=False):
        raise Damaged("not a block by its name")
    fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
    try:
        status = os.fstat(fd)
        page = _aligned(PAGE_BYTES)
        _read(fd, page)
    except OSError as error:
        if error.errno == errno.EIO:
            raise Damaged("the header cannot be read") from error
        raise
    finally:
        os.close(fd)
    info = decode_header(page)
    if f"{folder}/{entry.name}" != relative_path(info.id) or status.st_size != occupied_bytes(info.size):
        raise Damaged("not the block that it is named for, or not whole")
    return status.st_mtime_ns, info


def _fill(temporary: str, header: bytes, data: memoryview, flags: int) -> None:
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
    try:
        size = occupied_bytes(data.nbytes)
        if flags & os.O_DIRECT:
            file = _aligned(size)
            file[:PAGE_BYTES] = header
            _copy(data, file[PAGE_BYTES:])
            rest = size - PAGE_BYTES - data.nbytes
            file[size - rest :] = bytes(rest)
            _write(fd, [file])
        else:
            _write(fd, [memoryview(header), data.cast("B"), memoryview(bytes(size - PAGE_BYTES - data.nbytes))])
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _write(fd: int, parts: list[memoryview]) -> None:
    offset = 0
    while parts:
        written = os.pwritev(fd, parts, offset)
        offset += written
        while parts and written >= parts[0].nbytes:
            written -= parts.pop(0).nbytes
        if written:
            parts[0] = parts[0][written:]


def _read(fd: int, into: memoryview) -> None:
    offset = 0
    while offset < into.nbytes:
        count = os.preadv(fd, [into[offset:]], offset)
        if not count:
            raise Damaged(f"ends after {offset} bytes")
        offset += count


def _copy(source: memoryview, into: memoryview) -> None:
    """Into the first bytes; by numpy, which lets other threads run meanwhile."""
    np.copyto(np.frombuffer(into, np.uint8)[: source.nbytes], np.frombuffer(source, np.uint8))


def _aligned(size: int) -> memoryview:
    """Page-aligned memory, the calling thread's own and the same at each call: as much as the largest that it asked for."""
    region: mmap.mmap | None = getattr(_scratch, "region", None)
    if region is None or len(region) < size:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _scratch.region = region
    return memoryview(region)[:size]
