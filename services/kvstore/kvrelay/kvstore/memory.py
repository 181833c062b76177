"""The CPU tier: blocks in the shared arena, which pods write and read themselves.

A part of the arena has one owner at each moment: who allocated it, until the block is committed or given up; then the tier, and
whoever pins the block may read it. A pinned block is neither evicted nor removed from memory before its last pin is gone; it is only no
longer found.
"""

import dataclasses

import msgspec

from kvrelay.common.ids import BlockId
from kvrelay.kvstore.arena import Arena, rounded
from kvrelay.kvstore.policy import Policy
from kvrelay.transfer.block import BlockInfo, checksum


@dataclasses.dataclass(slots=True, eq=False)
class Slot:
    """A block's bytes: `info.size` of them from `offset` on."""

    info: BlockInfo
    offset: int
    pins: int = 0
    doomed: bool = False
    """Goes with its last pin."""


class MemoryTier:
    """Not for concurrent use. The limit is the arena's size, and holds by itself."""

    def __init__(self, arena: Arena, policy: Policy) -> None:
        self.arena = arena
        self._policy = policy
        self._slots: dict[BlockId, Slot] = {}
        self._writing: dict[BlockId, Slot] = {}
        self._doomed: set[Slot] = set()

    @property
    def used_bytes(self) -> int:
        return self.arena.used_bytes

    @property
    def limit_bytes(self) -> int:
        return self.arena.size

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._slots

    def ids(self) -> list[BlockId]:
        return list(self._slots)

    @property
    def num_writing(self) -> int:
        return len(self._writing)

    def slots(self) -> list[Slot]:
        """All that the arena has parts for."""
        return [*self._slots.values(), *self._writing.values(), *self._doomed]

    def holds(self, slot: Slot) -> bool:
        """The slot is that of a block that can be found."""
        return self._slots.get(slot.info.id) is slot

    def find(self, block_id: BlockId) -> BlockInfo | None:
        slot = self._slots.get(block_id)
        return slot.info if slot else None

    # Writing.

    def allocate(self, info: BlockInfo) -> Slot | None:
        """Room for a block that is not here; None where there is none without an eviction, or where another writes it already."""
        if info.id in self._slots or info.id in self._writing:
            return None
        offset = self.arena.allocate(info.size)
        if offset is None:
            return None
        slot = self._writing[info.id] = Slot(info, offset)
        return slot

    def is_writing(self, block_id: BlockId) -> bool:
        return block_id in self._writing

    def commit(self, slot: Slot, checksum: int) -> None:
        """All bytes are written: the block can be found."""
        del self._writing[slot.info.id]
        if slot.info.checksum != checksum:
            slot.info = msgspec.structs.replace(slot.info, checksum=checksum)
        self._slots[slot.info.id] = slot
        self._policy.stored(slot.info.id, rounded(slot.info.size))

    def give_up(self, slot: Slot) -> None:
        """What was to be written will not be. Nothing may be written into it after this."""
        del self._writing[slot.info.id]
        self.arena.free(slot.offset)

    # Reading.

    def pin(self, block_id: BlockId) -> Slot | None:
        """Counts as a use. The block's bytes stay until `unpin`."""
        slot = self._slots.get(block_id)
        if slot is not None:
            self._policy.used(block_id)
            slot.pins += 1
        return slot

    def unpin(self, slot: Slot) -> None:
        slot.pins -= 1
        if slot.doomed and not slot.pins:
            self._doomed.remove(slot)
            self.arena.free(slot.offset)

    # Leaving.

    def coldest(self, incoming: BlockId) -> Slot | None:
        """Who should go for `incoming`; None where all are pinned."""
        victim = self._policy.victim(incoming, lambda block_id: not self._slots[block_id].pins)
        return None if victim is None else self._slots[victim]

    def evict(self, block_id: BlockId) -> None:
        """Raises KeyError for a block that is not here; it is not pinned."""
        self._policy.evicted(block_id)
        self.arena.free(self._slots.pop(block_id).offset)

    def remove(self, block_id: BlockId) -> None:
        """If it is here. It is found no more; its bytes go with the last pin."""
        slot = self._slots.pop(block_id, None)
        if slot is None:
            return
        self._policy.removed(block_id)
        if slot.pins:
            slot.doomed = True
            self._doomed.add(slot)
        else:
            self.arena.free(slot.offset)

    def data(self, slot: Slot) -> memoryview:
        """For its owner or who has it pinned. To be released."""
        return self.arena.part(slot.offset, slot.info.size)

    def is_whole(self, slot: Slot) -> bool:
        """Whether its bytes have its checksum; for its owner or who has it pinned."""
        with self.data(slot) as data:
            return checksum(slot.info, data) == slot.info.checksum
