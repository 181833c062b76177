"""What every tier keeps to. A tier holds blocks as bytes; what it evicts, and when, its policy says."""

from collections.abc import Iterable
from typing import Protocol

from kvrelay.common.errors import KvrelayError
from kvrelay.common.ids import BlockId
from kvrelay.transfer.block import BlockInfo


class Missing(KvrelayError):
    """The block is not in the tier (any more)."""


class TierFailed(KvrelayError):
    """The medium failed or took too long; the block may be there. The tier is to be left alone for a while."""


class Corrupt(KvrelayError):
    """The bytes are not those that were stored. The tier has removed the block."""


class Tier(Protocol):
    """Below the CPU tier. Calls are for one event loop and never block it."""

    name: str
    limit_bytes: int

    @property
    def used_bytes(self) -> int:
        """Of all that the tier holds on its medium, what is being written and what is being removed included; at no moment
        over `limit_bytes`."""
        ...

    async def open(self) -> Iterable[BlockInfo]:
        """Makes the tier ready, and gives what is in it from before. Raises TierFailed."""
        ...

    def __len__(self) -> int:
        """Blocks that can be found."""
        ...

    def ids(self) -> Iterable[BlockId]:
        """Of all blocks that can be found, as they are at the moment of the call."""
        ...

    def find(self, block_id: BlockId) -> BlockInfo | None:
        """Without touching the medium."""
        ...

    async def get(self, block_id: BlockId, into: memoryview) -> BlockInfo:
        """Reads the block into the first bytes of `into`, verified against its checksum, and counts as a use of it.

        Raises Missing, Corrupt (and removes it), TierFailed.
        """
        ...

    async def put(self, info: BlockInfo, data: memoryview) -> list[BlockInfo]:
        """Stores a block, after evicting what must go for it: that is what it gives. Once it returns, the block survives a crash of the process.

        `data` is not changed until then. Storing what is there already does nothing. Raises TierFailed, and holds nothing of it then.
        """
        ...

    async def remove(self, block_id: BlockId) -> None:
        """If it is there. Raises TierFailed."""
        ...

    async def close(self) -> None: ...


class Sinking(Tier, Protocol):
    """A tier that can have one below it."""

    def coldest(self) -> BlockInfo | None:
        """Who would go next."""
        ...

    async def evict(self, block_id: BlockId) -> None:
        """As to make room. Raises TierFailed."""
        ...
