"""Which pod has which KV blocks: told by KV events, asked for the longest stored prefix of a prompt by every pod at once.

A key maps to the set of its sources as bits of one integer, so that all pods' prefixes are followed together: those that still
have everything are the AND of the masks so far. A source's bit is given out anew when the source is cleared; what the former bit
marks is cleaned up bit by bit with later changes, and is not seen meanwhile.

Tables hold only bytes, integers and None: Python's collector (up to 3.13) does not track such dictionaries, and so never walks
millions of keys.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import repeat, takewhile
from operator import and_

import numpy as np
import numpy.typing as npt

from kvrelay.common.blocks import SPAN
from kvrelay.common.ids import BlockId

CHUNK = 32
"""Keys that are looked at together while no pod drops out."""
FOLLOWED = 3
"""So many sources are faster followed one by one."""
FEW = 6
"""So many bits of a mask are faster taken out one by one."""
CLEANED = 64
"""Keys of former bits that each change cleans up, beside twice its own number."""

Hits = npt.NDArray[np.float64]
"""Tokens by slot; floats, as that is what they are weighed in."""


@dataclass(slots=True)
class _Source:
    block_size: int
    slot: int
    keys: dict[BlockId, None] = field(default_factory=dict)


class PrefixIndex:
    """Sources are pods, or whatever else keeps blocks, by name. Not for several threads.

    `version` moves when a source gets another slot: its place in what `hits` returns.
    """

    def __init__(self) -> None:
        self._masks: dict[BlockId, int] = {}
        self._sources: dict[str, _Source] = {}
        self._names: list[str | None] = []
        """By slot; None: no source's, or a former one's whose keys are not cleaned up yet."""
        self._free: list[int] = []
        self._former: list[tuple[int, dict[BlockId, None]]] = []
        self._classes: dict[int, int] = {}
        """Spans of a block to the mask of all sources with such blocks."""
        self.version = 0

    def __len__(self) -> int:
        """Blocks, each as often as there are sources that have it."""
        return sum(len(source.keys) for source in self._sources.values())

    def __contains__(self, source: str) -> bool:
        return source in self._sources

    def names(self) -> set[str]:
        return set(self._sources)

    def keys(self, source: str) -> set[BlockId]:
        """Of one source; empty where it is not known."""
        return set(self._sources[source].keys) if source in self._sources else set()

    def add_pod(self, pod_id: str, block_size: int) -> None:
        """Before its first block; again it changes nothing, or clears a pod that has another block size now.

        Raises ValueError where `block_size` is not a multiple of 16: such blocks have no ids.
        """
        known = self._sources.get(pod_id)
        if known is not None and known.block_size == block_size:
            return
        if block_size <= 0 or block_size % SPAN:
            raise ValueError(f"a block of {block_size} tokens is not made of spans of {SPAN}")
        self.remove_pod(pod_id)
        self._sources[pod_id] = _Source(block_size, self._take_slot(pod_id, block_size))

    def remove_pod(self, pod_id: str) -> None:
        """For good: it has no blocks, and needs `add_pod` to have some again."""
        source = self._sources.pop(pod_id, None)
        if source is not None:
            self._retire(source)

    def stored(self, pod_id: str, keys: Sequence[BlockId]) -> None:
        """Raises KeyError for a pod that was not added."""
        source = self._sources[pod_id]
        masks, bit = self._masks, 1 << source.slot
        for key in keys:
            masks[key] = masks[key] | bit if key in masks else bit
        source.keys.update(dict.fromkeys(keys))
        self._clean(len(keys))

    def removed(self, pod_id: str, keys: Sequence[BlockId]) -> None:
        """Keys and pods that are not known are no error."""
        source = self._sources.get(pod_id)
        if source is None:
            return
        self._unmark(source.slot, [key for key in keys if source.keys.pop(key, self) is None])
        self._clean(len(keys))

    def clear(self, pod_id: str) -> None:
        """It has no blocks any more, and may get new ones. Takes no longer for many blocks than for few."""
        source = self._sources.get(pod_id)
        if source is not None and source.keys:
            self._retire(source)
            self._sources[pod_id] = _Source(source.block_size, self._take_slot(pod_id, source.block_size))

    def replace(self, pod_id: str, keys: Sequence[BlockId]) -> None:
        """It has these blocks and no others. Of a large snapshot hand over the first part here and the rest to `stored`, so that
        others get their turn between. Raises KeyError for a pod that was not added."""
        self.clear(pod_id)
        self.stored(pod_id, keys)

    def match(self, ids: Sequence[BlockId]) -> dict[str, int]:
        """Tokens of the prompt's longest stored prefix by source; those that have none of it are left out.

        `ids` are those of the prompt's spans of 16 tokens, in order.
        """
        return {
            name: tokens
            for tokens, mask in self._levels(ids)
            for slot in _bits(mask)
            if (name := self._names[slot]) is not None
        }

    def hits(self, ids: Sequence[BlockId]) -> Hits:
        """As `match`, by slot: zeros for those that have none of it. At least one longer than the highest slot."""
        hits = np.zeros(len(self._names) + 1)
        num_bytes = len(self._names) // 8 + 1
        for tokens, mask in self._levels(ids):
            if mask.bit_count() <= FEW:
                for slot in _bits(mask):
                    hits[slot] = tokens
            else:
                packed = np.frombuffer(mask.to_bytes(num_bytes, "little"), np.uint8)
                hits += np.unpackbits(packed, count=len(hits), bitorder="little") * float(tokens)
        return hits

    def slots(self, sources: Iterable[str]) -> npt.NDArray[np.intp]:
        """Places in what `hits` returns, while `version` stands. That of unknown sources is the last, which is always 0."""
        known = self._sources
        return np.array([known[name].slot if name in known else -1 for name in sources], np.intp)

    def _levels(self, ids: Sequence[BlockId]) -> Iterator[tuple[int, int]]:
        """Lengths in tokens over 0, each with the mask of the sources whose prefix is that long. No source comes twice."""
        for num_spans, mask in self._classes.items():
            # A block's key is the id of its last span.
            keys = ids[num_spans - 1 :: num_spans] if num_spans > 1 else ids
            for num_blocks, gone in self._drops(keys, mask):
                yield num_blocks * num_spans * SPAN, gone

    def _drops(self, keys: Sequence[BlockId], living: int) -> Iterator[tuple[int, int]]:
        """Of the sources `living`: after how many blocks which of them miss one, or that they have all.

        Sources never come back into `living`. So where a chunk's keys leave it as it was, none is missing from any of them, and
        the chunk needs no closer look. A few sources are followed each in its own table, which is small.
        """
        if not keys:
            return
        get = self._masks.get
        living &= get(keys[0], 0)
        at = 1
        while at < len(keys) and living.bit_count() > FOLLOWED:
            chunk = keys[at : at + CHUNK]
            if reduce(and_, map(get, chunk, repeat(0)), living) == living:
                at += len(chunk)
                continue
            # Up to the next one that drops out, after whom few may be left.
            while (still := living & get(keys[at], 0)) == living:
                at += 1
            yield at, living ^ still
            living = still
            at += 1
        if living.bit_count() > FOLLOWED:
            yield len(keys), living
        elif living:
            yield from self._followed(keys, at, living)

    def _followed(self, keys: Sequence[BlockId], start: int, living: int) -> Iterator[tuple[int, int]]:
        """As `_drops`, of sources that have all keys before `start`."""
        rest = keys[start:]
        for slot in _bits(living):
            name = self._names[slot]
            assert name is not None  # bits of former sources are in no class
            num_blocks = start + len(list(takewhile(self._sources[name].keys.__contains__, rest)))
            yield num_blocks, 1 << slot

    def _take_slot(self, pod_id: str, block_size: int) -> int:
        if self._free:
            slot = self._free.pop()
            self._names[slot] = pod_id
        else:
            slot = len(self._names)
            self._names.append(pod_id)
        num_spans = block_size // SPAN
        self._classes[num_spans] = self._classes.get(num_spans, 0) | 1 << slot
        self.version += 1
        return slot

    def _retire(self, source: _Source) -> None:
        num_spans = source.block_size // SPAN
        self._classes[num_spans] &= ~(1 << source.slot)
        if not self._classes[num_spans]:
            del self._classes[num_spans]
        self._names[source.slot] = None
        self._former.append((source.slot, source.keys))
        self.version += 1
        self._clean(0)

    def _clean(self, num_keys: int) -> None:
        """Some of what former bits mark; a bit is free when it marks nothing."""
        allowed = CLEANED + 2 * num_keys
        while self._former and allowed > 0:
            slot, keys = self._former[-1]
            some = [keys.popitem()[0] for _ in range(min(allowed, len(keys)))]
            allowed -= len(some) + 1
            self._unmark(slot, some)
            if not keys:
                self._former.pop()
                self._free.append(slot)

    def _unmark(self, slot: int, keys: Iterable[BlockId]) -> None:
        masks, bit = self._masks, 1 << slot
        for key in keys:
            left = masks[key] ^ bit
            if left:
                masks[key] = left
            else:
                del masks[key]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
