"""The blocks that one pod can have: what its own node holds, and what others are known to."""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from kvrelay.common.ids import BlockId, Fingerprint, PodId
from kvrelay.common.layout import KvDtype
from kvrelay.kvstore.chain import Chain
from kvrelay.kvstore.index import Entry
from kvrelay.kvstore.level import Health, Offer
from kvrelay.kvstore.memory import Slot
from kvrelay.kvstore.promotion import Coming
from kvrelay.transfer.block import BlockInfo
from kvrelay.transfer.segments import heads

MAX_KNOWN = 4096
"""Blocks, beyond which those are forgotten that are believed no more."""
KNOWN_SECONDS = 5.0
"""For which what others hold is believed without asking again: from a pod's find to its load, say."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod says of itself."""

    pod_id: PodId
    fingerprint: Fingerprint
    shape: str
    dtype: KvDtype
    """In which it writes."""
    readable: frozenset[KvDtype]

    def reads(self, info: BlockInfo) -> bool:
        return (
            info.fingerprint == self.fingerprint
            and info.shape == self.shape
            and info.dtype in self.readable
            and info.encoding == "exact"
        )


class Elsewhere(Protocol):
    """Other nodes' blocks."""

    @property
    def exists(self) -> bool:
        """There is another node to ask for."""
        ...

    async def locate(self, entries: Sequence[Entry], hello: Hello) -> Mapping[BlockId, Offer]:
        """Where these can be had, as far as they can. Ends within a bound, with nothing where the index is slow or away."""
        ...


class Nowhere:
    """There are no other nodes."""

    exists = False

    async def locate(self, entries: Sequence[Entry], hello: Hello) -> Mapping[BlockId, Offer]:
        return {}


class Supply:
    def __init__(self, chain: Chain, elsewhere: Elsewhere, hello: Hello) -> None:
        self._chain = chain
        self._elsewhere = elsewhere
        self._hello = hello
        self._known: dict[BlockId, tuple[float, Offer]] = {}
        """Until when it is believed, in monotonic time."""

    def reads(self, info: BlockInfo) -> bool:
        return self._hello.reads(info)

    def find(self, block_id: BlockId) -> tuple[BlockInfo, str, Health | None] | None:
        """With its tier, and how that has been; None: it is in memory."""
        found = self._chain.find(block_id)
        if found is not None and self.reads(found[0]):
            return *found, self._chain.health(found[1])
        offer = self._elsewhere_at(block_id)
        return None if offer is None else (offer.info, offer.source.health.name, offer.source.health)

    def _elsewhere_at(self, block_id: BlockId) -> Offer | None:
        until, offer = self._known.get(block_id, (0.0, None))
        return offer if time.monotonic() < until else None

    def lacks(self, ids: Sequence[BlockId], first: int) -> bool:
        """Whether there is reason to `look`."""
        return self._elsewhere.exists and not all(self.find(block_id) for block_id in ids[first:])

    async def look(self, ids: Sequence[BlockId], first: int) -> None:
        """Asks where those blocks of the chain can be had that are not here: from then on they are found. Bounded."""
        in_heads = heads(ids)
        missing = [(in_heads[at], ids[at]) for at in range(first, len(ids)) if self.find(ids[at]) is None]
        found = await self._elsewhere.locate(missing, self._hello)
        now = time.monotonic()
        if len(self._known) > MAX_KNOWN:
            self._known = {block_id: known for block_id, known in self._known.items() if known[0] > now}
        self._known |= {block_id: (now + KNOWN_SECONDS, offer) for block_id, offer in found.items()}

    def bring(self, block_id: BlockId) -> Slot | Coming:
        """See `Chain.bring`."""
        return self._chain.bring(block_id, self._elsewhere_at(block_id))

    def missed(self, block_id: BlockId) -> None:
        """It was found, and could not be had."""
        self._known.pop(block_id, None)

    def drop(self, coming: Slot | Coming) -> None:
        self._chain.drop(coming)
