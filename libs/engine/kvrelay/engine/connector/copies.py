"""Spans between a pod's cache and a store's memory, checked on the way in. Runs on a thread of its own, beside the steps."""

import time
from collections.abc import Sequence

import msgspec

from kvrelay.engine.cache import KvCache
from kvrelay.engine.connector.base import Memory, Room, Stored
from kvrelay.transfer.block import BlockInfo, checksum

_BELIEF = 0.3
"""How much the newest measurement of the copies' speed is believed."""


class Copier:
    """Reads and writes the cache's slots that it is given; whose they are, the callers see to."""

    def __init__(self, cache: KvCache, identity: BlockInfo) -> None:
        """`identity`: of this pod's spans; ids and checksums aside."""
        self.cache = cache
        self.identity = identity
        self.bytes_per_second = 2e9
        """Of loads: copy and check. A guess until the first."""

    def load(self, spans: Sequence[Stored], slots: Sequence[int]) -> tuple[int, list[Stored]]:
        """Into 16 slots each, from `slots` on. How many of them, from the first on, are what they are said to be, and all that are not.

        Checked after it was copied: what the check sees is what was there to be read, or it fails.
        """
        started = time.monotonic()
        whole = 0
        damaged: list[Stored] = []
        for span, slot in zip(spans, slots, strict=True):
            fits = span.info.size == self.cache.span_bytes(span.info.dtype)
            if fits and not damaged:
                self.cache.write_span(slot, span.data, span.info.dtype)
            if not fits or checksum(span.info, span.data.data) != span.info.checksum:
                damaged.append(span)
            whole += not damaged
        if whole:
            measured = sum(span.info.size for span in spans[:whole]) / max(time.monotonic() - started, 1e-9)
            self.bytes_per_second += _BELIEF * (measured - self.bytes_per_second)
        return whole, damaged

    def store(self, rooms: Sequence[Room], infos: Sequence[BlockInfo], slots: Sequence[int]) -> list[int]:
        """Out of 16 slots each into `rooms`, and the checksums of what lies there then."""
        return [self._store(room.data, info, slot) for room, info, slot in zip(rooms, infos, slots, strict=True)]

    def _store(self, data: Memory, info: BlockInfo, slot: int) -> int:
        self.cache.read_span(slot, data, info.dtype)
        return checksum(info, data.data)

    def info(self, block_id: bytes) -> BlockInfo:
        return msgspec.structs.replace(self.identity, id=block_id)
