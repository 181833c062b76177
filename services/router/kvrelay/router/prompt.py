"""The block ids of a request's prompt, hashed once, and only where a policy asks for them."""

import asyncio
from collections.abc import Iterable, Sequence

from kvrelay.common.blocks import SPAN, BlockHasher
from kvrelay.common.ids import BlockId, Fingerprint

AT_ONCE = 256 * SPAN
"""Tokens that are hashed before others get their turn: about a third of a millisecond."""


class PromptIds:
    """By fingerprint, as pods of several revisions of a model may live at once."""

    def __init__(self, tokens: Sequence[int], extra_keys: Sequence[str] = ()) -> None:
        self._tokens = tokens
        self._extra_keys = extra_keys
        self._ids: dict[Fingerprint, list[BlockId]] = {}

    @property
    def takes_long(self) -> bool:
        """Worth a `prepare` before `ids`."""
        return len(self._tokens) > AT_ONCE

    def ids(self, fingerprint: Fingerprint) -> Sequence[BlockId]:
        """Of all full spans of 16 tokens."""
        known = self._ids.get(fingerprint)
        if known is None:
            known = self._ids[fingerprint] = []
            BlockHasher(fingerprint, self._extra_keys).extend(known, self._tokens)
        return known

    async def prepare(self, fingerprints: Iterable[Fingerprint]) -> None:
        """As `ids` of each, in steps: a long prompt does not hold up the event loop."""
        for fingerprint in fingerprints:
            if fingerprint in self._ids:
                continue
            hasher = BlockHasher(fingerprint, self._extra_keys)
            ids: list[BlockId] = []
            for end in range(AT_ONCE, len(self._tokens), AT_ONCE):
                hasher.extend(ids, self._tokens[:end])
                await asyncio.sleep(0)
            hasher.extend(ids, self._tokens)
            self._ids[fingerprint] = ids
