"""Blocks as files of one directory, on a local disk: they outlive the process."""

import asyncio
import contextlib
import dataclasses
import errno
import functools
import itertools
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Literal, NoReturn, TypeVar

from kvrelay.common.ids import BlockId, new_epoch
from kvrelay.kvstore.policy import Policy
from kvrelay.kvstore.tiers import blockfile
from kvrelay.kvstore.tiers.base import Corrupt, Missing, TierFailed
from kvrelay.kvstore.tiers.blockfile import Claim, occupied_bytes
from kvrelay.kvstore.tiers.threads import Threads
from kvrelay.transfer.block import BlockInfo

T = TypeVar("T")


@dataclasses.dataclass(slots=True, eq=False)
class _Block:
    info: BlockInfo
    room: int
    """Bytes of its file."""
    readers: int = 0
    """While there are any it is not evicted."""
    unlinked: bool = False


class FileTier:
    """Of `directory`, which is this tier's alone: another process that opens it is refused. See `base.Tier` for the calls.

    `limit_bytes` bounds the lengths of all files: headers, temporary files and files being removed included, folders not.
    Files, 256 folders of them, change in threads of the tier's own, `threads` of them with memory for one block each; everything
    else belongs to the event loop. A block is in `_blocks` while its file is there, whole, and nothing changes it.

    A call ends after `timeout_s`, as TierFailed, or when it is cancelled; its thread goes on behind. The room of a block that it
    writes stays counted until it is done, and then nothing of the block remains. The caller's buffer is its own again at once:
    nothing is written into it any more, and what is read from it is thrown away; only its memory is held until the thread is done.

    A file that cannot be removed after a failed write stays counted until the tier is opened again, and goes then. Removals are not
    synced: after a power cut a removed block may be back, and one that was just stored may be gone.

    `direct`: O_DIRECT, so that blocks do not push other things out of the page cache; "auto": where the filesystem takes it.
    """

    name = "file"  # of `location.TIERS`

    def __init__(
        self,
        directory: str | os.PathLike[str],
        limit_bytes: int,
        policy: Policy,
        *,
        direct: bool | Literal["auto"],
        threads: int,
        timeout_s: float,
    ) -> None:
        if limit_bytes < 1 or threads < 1 or timeout_s <= 0:
            raise ValueError("limit_bytes, threads and timeout_s must be positive")
        self.directory = os.fspath(directory)
        self.limit_bytes = limit_bytes
        self.timeout_s = timeout_s
        self._policy = policy
        self._direct = direct
        self._num_threads = threads
        self._flags = 0
        self._epoch = new_epoch()
        self._numbers = itertools.count()
        self._state: Literal["closed", "opening", "open"] = "closed"
        self._lock: int | None = None
        self._used = 0
        self._blocks: dict[BlockId, _Block] = {}
        self._changing: dict[BlockId, asyncio.Future[None]] = {}
        """Ids whose file is being written or removed; done when it no longer is."""
        self._evicted: dict[BlockId, BlockInfo] = {}
        """What no put has given yet."""
        self._turn = asyncio.Lock()
        """Of the one put that makes room: no other takes it meanwhile."""
        self._news = asyncio.Event()
        """There may be more room, or more to evict, or no one who waits for it."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_reading = 0
        self._idle = asyncio.Event()
        """The tier is closed, and nothing runs for it."""

    @property
    def used_bytes(self) -> int:
        return self._used

    def __len__(self) -> int:
        return len(self._blocks)

    def ids(self) -> list[BlockId]:
        return list(self._blocks)

    def find(self, block_id: BlockId) -> BlockInfo | None:
        block = self._blocks.get(block_id)
        return block.info if block else None

    async def open(self) -> list[BlockInfo]:
        """What is in the directory, the longest ago written first; what is over the limit has gone, in that order.

        Fails where nothing happens for `timeout_s`; altogether it may take longer.
        """
        if self._lock is not None or self._state != "closed":
            raise TierFailed(f"{self.directory}: open already, or a thread of it still runs")
        self._state = "opening"
        self._threads = Threads(self._num_threads, "kvrelay-files")
        try:
            await self._progress(self._take_directory())
            infos = await self._take_over()
            self._state = "open"
        except OSError as error:
            raise self._failed("opening", error) from error
        finally:
            if self._state != "open":
                await self.close()
        return infos

    async def get(self, block_id: BlockId, into: memoryview) -> BlockInfo:
        """A block being stored is Missing. `into` has the verified bytes, and of a block that is Corrupt zeros or what it had. Who does not
        wait for the end may find bytes there that are not verified.

        No task of its own: from the page cache the read itself takes no longer than that.
        """
        self._check_open()
        block = self._blocks.get(block_id)
        if block is None:
            raise Missing(f"{block_id.hex()} is not in {self.directory}")
        if into.nbytes < block.info.size:
            raise ValueError(f"{into.nbytes} bytes for a block of {block.info.size}")
        claim, over = Claim(), asyncio.get_running_loop().create_future()
        block.readers += 1
        self._num_reading += 1
        then = functools.partial(self._read, block, over)
        self._threads.call(then, blockfile.read_block, self._path(block_id), block.info, into, claim, self._flags)
        if not await self._in_time(over, claim):
            raise self._late("reading")
        if self._blocks.get(block_id) is block:
            self._policy.used(block_id)
        return block.info

    async def put(self, info: BlockInfo, data: memoryview) -> list[BlockInfo]:
        """Gives all that has been evicted since the last put that succeeded: when puts overlap, it may be another's.

        Trusts `info.checksum`: only a get computes it.
        """
        if data.nbytes != info.size:
            raise ValueError(f"{data.nbytes} bytes for a block of {info.size}")
        await self._call("storing", lambda claim: self._store(info, data, claim))
        evicted, self._evicted = self._evicted, {}
        return list(evicted.values())

    async def remove(self, block_id: BlockId) -> None:
        """Also where it is being stored: after that."""
        await self._call("removing", lambda claim: self._remove(block_id, claim))

    def coldest(self) -> BlockInfo | None:
        """Who would go next."""
        victim = self._policy.victim(BlockId(bytes(blockfile.ID_BYTES)), self._evictable)
        return None if victim is None else self._blocks[victim].info

    async def evict(self, block_id: BlockId) -> None:
        """As a put would to make room, if the block is there and no one reads it."""
        await self._call("evicting", lambda claim: self._evict_one(block_id, claim))

    async def close(self) -> None:
        """Waits for what is running, `timeout_s` at most. The directory is another's to open when the last thread is done."""
        if self._state == "closed":
            return
        self._state = "closed"
        self._news.set()
        self._idle.clear()
        if self._tasks or self._num_reading:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), self.timeout_s)
        self._threads.close()
        self._release()

    def _read(self, block: _Block, over: asyncio.Future[bool], _: None, error: BaseException | None) -> None:
        """The thread is done. A block whose file is damaged is forgotten first, also where no one waits any more."""
        if isinstance(error, FileNotFoundError | blockfile.Damaged):
            task = self._begin(self._lose(block, error))
            task.add_done_callback(lambda _: self._read_to_the_end(block, over, self._error(task)))
        else:
            self._read_to_the_end(block, over, error)

    async def _lose(self, block: _Block, why: FileNotFoundError | blockfile.Damaged) -> NoReturn:
        await self._forget(block)
        path = self._path(block.info.id)
        if isinstance(why, FileNotFoundError):
            raise Missing(f"{path} has been removed by someone else")
        raise Corrupt(f"{path}: {why}")

    def _error(self, task: asyncio.Task[NoReturn]) -> BaseException | None:
        return TierFailed(f"{self.directory}: closed") if task.cancelled() else task.exception()

    def _read_to_the_end(self, block: _Block, over: asyncio.Future[bool], error: BaseException | None) -> None:
        block.readers -= 1
        self._num_reading -= 1
        self._settle(block)
        self._release()
        _end(over, self._failed("reading a block", error) if isinstance(error, OSError) else error)

    async def _store(self, info: BlockInfo, data: memoryview, claim: Claim) -> None:
        header = blockfile.encode_header(info)
        await self._settled(info.id)
        claim.check()
        if info.id in self._blocks:
            return
        block = _Block(info, occupied_bytes(info.size))
        with self._change(info.id):
            await self._reserve(block, claim)
            try:
                await self._write(block, header, data, claim)
            except blockfile.Remains:
                raise
            except BaseException:  # cancelled as well: the room that was taken is given back
                self._free(block)
                raise
            self._blocks[info.id] = block
        self._evicted.pop(info.id, None)
        self._policy.stored(info.id, block.room)
        self._news.set()

    async def _write(self, block: _Block, header: bytes, data: memoryview, claim: Claim) -> None:
        path = self._path(block.info.id)
        temporary = f"{path}.{self._epoch}-{next(self._numbers)}{blockfile.TEMPORARY_SUFFIX}"
        await self._threads.run(blockfile.write_block, path, temporary, header, data, claim, self._flags)
        if claim.abandoned:
            try:
                await self._threads.run(blockfile.remove_file, path)
            except OSError as error:
                raise blockfile.Remains(*error.args) from error
        claim.check()

    async def _reserve(self, block: _Block, claim: Claim) -> None:
        """Takes the room for a block, in order of asking, when what must go for it is gone from the disk."""
        if block.room > self.limit_bytes:
            raise TierFailed(f"{self.directory}: a block of {block.room} bytes is over the limit, {self.limit_bytes}")
        async with self._turn:
            while True:
                claim.check()
                if self._state != "open":
                    raise TierFailed(f"{self.directory}: closed")
                if self._used + block.room <= self.limit_bytes:
                    break
                self._news.clear()
                victim = self._policy.victim(block.info.id, self._evictable)
                if victim is None:
                    await self._news.wait()
                else:
                    await self._evict(self._blocks[victim])
            self._used += block.room

    def _evictable(self, block_id: BlockId) -> bool:
        block = self._blocks.get(block_id)
        return block is not None and not block.readers

    async def _evict(self, block: _Block) -> None:
        await self._unlink(block)
        self._policy.evicted(block.info.id)
        self._evicted[block.info.id] = block.info

    async def _evict_one(self, block_id: BlockId, claim: Claim) -> None:
        await self._settled(block_id)
        claim.check()
        if self._evictable(block_id):
            await self._unlink(self._blocks[block_id])
            self._policy.evicted(block_id)

    async def _remove(self, block_id: BlockId, claim: Claim) -> None:
        await self._settled(block_id)
        claim.check()
        if block := self._blocks.get(block_id):
            await self._forget(block)

    async def _forget(self, block: _Block) -> None:
        if self._blocks.get(block.info.id) is block:
            await self._unlink(block)
            self._policy.removed(block.info.id)

    async def _unlink(self, block: _Block) -> None:
        """The block is not found any more at once. Where its file cannot be removed it is found again, and OSError raised."""
        block_id = block.info.id
        del self._blocks[block_id]
        with self._change(block_id):
            try:
                await self._threads.run(blockfile.remove_file, self._path(block_id))
            except OSError:
                self._blocks[block_id] = block
                raise
        block.unlinked = True
        self._settle(block)

    def _settle(self, block: _Block) -> None:
        """A file has its bytes on the disk until it is unlinked and no one reads it."""
        if block.readers == 0:
            if block.unlinked:
                self._free(block)
            self._news.set()

    def _free(self, block: _Block) -> None:
        self._used -= block.room
        self._news.set()

    @contextlib.contextmanager
    def _change(self, block_id: BlockId) -> Iterator[None]:
        """Of one block's file there is one change at a time."""
        done = self._changing[block_id] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._changing[block_id]
            done.set_result(None)

    async def _settled(self, block_id: BlockId) -> None:
        while (change := self._changing.get(block_id)) is not None:
            await asyncio.wait([change])

    async def _take_directory(self) -> None:
        self._lock = await self._threads.run(blockfile.take_directory, self.directory)
        self._flags = 0
        if self._direct:
            try:
                self._flags = await self._threads.run(blockfile.direct_flag, self.directory)
            except OSError as error:
                if self._direct is True or error.errno != errno.EINVAL:
                    raise

    async def _take_over(self) -> list[BlockInfo]:
        for block_id in self._blocks:
            self._policy.removed(block_id)
        self._blocks.clear()
        self._evicted.clear()
        folders = [os.path.join(self.directory, folder) for folder in blockfile.FOLDERS]
        scans = await self._progress(
            *(self._threads.run(blockfile.scan_folder, folder, self._flags) for folder in folders)
        )
        found = sorted((block for scan in scans for block in scan), key=lambda block: block[0])
        self._used = sum(occupied_bytes(info.size) for _, info in found)
        for _, info in found:
            room = occupied_bytes(info.size)
            if self._used > self.limit_bytes:
                await self._progress(self._threads.run(blockfile.remove_file, self._path(info.id)))
                self._used -= room
            else:
                self._blocks[info.id] = _Block(info, room)
                self._policy.stored(info.id, room)
        return [block.info for block in self._blocks.values()]

    def _path(self, block_id: BlockId) -> str:
        return os.path.join(self.directory, blockfile.relative_path(block_id))

    async def _call(self, what: str, work: Callable[[Claim], Coroutine[Any, Any, T]]) -> T:
        """What `work` gives, unless it takes too long. It is never cancelled: it keeps the accounts."""
        self._check_open()
        claim, over = Claim(), asyncio.get_running_loop().create_future()
        task = self._begin(work(claim))
        task.add_done_callback(lambda _: _end(over))
        if not await self._in_time(over, claim) and not task.done():
            raise self._late(what)
        try:
            return task.result()
        except OSError as error:
            raise self._failed(f"{what} a block", error) from error

    async def _in_time(self, over: asyncio.Future[bool], claim: Claim) -> bool:
        """Whether `over` is in time, which is this one's to wait for. Else, or where the caller is cancelled, the claim is given up."""
        timer = asyncio.get_running_loop().call_later(self.timeout_s, _end, over, None, False)
        in_time = False
        try:
            in_time = await over
        finally:
            timer.cancel()
            if not in_time:
                claim.abandon()
                self._news.set()
        return in_time

    def _late(self, what: str) -> TierFailed:
        return TierFailed(f"{self.directory}: {what} a block took longer than {self.timeout_s} s")

    def _check_open(self) -> None:
        if self._state != "open":
            raise TierFailed(f"{self.directory}: not open")

    async def _progress(self, *jobs: Coroutine[Any, Any, T]) -> list[T]:
        """What all give, in order, as long as one of them ends every `timeout_s`."""
        tasks = [self._begin(job) for job in jobs]
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise TierFailed(f"{self.directory}: nothing has happened for {self.timeout_s} s")
            for task in done:
                task.result()
        return [task.result() for task in tasks]

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # heard, also where no caller waits for it any more
        self._release()

    def _release(self) -> None:
        if self._state == "closed" and not self._tasks and not self._num_reading:
            self._idle.set()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _failed(self, what: str, error: OSError) -> TierFailed:
        return TierFailed(f"{self.directory}: {what}: {error.strerror or error}")


def _end(over: asyncio.Future[bool], error: BaseException | None = None, in_time: bool = True) -> None:
    if over.done():
        return
    if error is None:
        over.set_result(in_time)
    else:
        over.set_exception(error)
