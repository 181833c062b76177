"""Spans between a pod's cache and a store's memory, checked on the way in. Runs on a thread of its own, beside the steps."""

import time
from collections.abc import Sequence

import msgspec

from kvrelay.engine.cache import KvCache
from kvrelay.engine.connector.base import Room, Stored
from kvrelay.transfer.block import BlockInfo, root

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

        Checked as it was copied or after it: what the check sees is what the slots got, or it fails.
        """
        started = time.monotonic()
        is_whole = [False] * len(spans)
        for dtype in {span.info.dtype for span in spans}:
            size = self.cache.span_bytes(dtype)
            fitting = [i for i, span in enumerate(spans) if span.info.dtype is dtype and span.info.size == size]
            found = self.cache.write_spans([slots[i] for i in fitting], [spans[i].data for i in fitting], dtype)
            for i, leaves in zip(fitting, found, strict=True):
                is_whole[i] = root(spans[i].info, size, leaves) == spans[i].info.checksum
        whole = (*is_whole, False).index(False)
        if whole:
            measured = sum(span.info.size for span in spans[:whole]) / max(time.monotonic() - started, 1e-9)
            self.bytes_per_second += _BELIEF * (measured - self.bytes_per_second)
        return whole, [span for span, good in zip(spans, is_whole, strict=True) if not good]

    def store(self, rooms: Sequence[Room], infos: Sequence[BlockInfo], slots: Sequence[int]) -> list[int]:
        """Out of 16 slots each into `rooms`, and the checksums of what was copied there."""
        found = self.cache.read_spans(slots, [room.data for room in rooms], self.identity.dtype)
        return [root(info, info.size, leaves) for info, leaves in zip(infos, found, strict=True)]

    def info(self, block_id: bytes) -> BlockInfo:
        return msgspec.structs.replace(self.identity, id=block_id)
