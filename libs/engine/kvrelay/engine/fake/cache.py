"""A fake engine's prefix cache: keys of blocks that hold no KV, and what became of them."""

from collections import OrderedDict

from kvrelay.common.blocks import NO_PARENT, SPAN, BlockHasher, extra_keys
from kvrelay.common.ids import BlockId
from kvrelay.common.kvevents import Event
from kvrelay.common.request import EngineRequest
from kvrelay.engine.changes import CacheChanges
from kvrelay.engine.fake.config import FakeConfig
from kvrelay.engine.pool import StoredRun


class FakeCache:
    """As many blocks as the pool has; the longest unused goes first."""

    def __init__(self, config: FakeConfig) -> None:
        self._config = config
        self._spans = config.block_size // SPAN
        self._keys: OrderedDict[BlockId, None] = OrderedDict()
        self._changes = CacheChanges(config.block_size)

    def __len__(self) -> int:
        return len(self._keys)

    def take_changes(self) -> tuple[Event, ...]:
        """See `CacheChanges.take`."""
        return self._changes.take()

    def find(self, request: EngineRequest) -> int:
        """Tokens of the longest prefix that is here, whole blocks, one token less than the prompt at most."""
        size = self._config.block_size
        found = 0
        for key in self._ids(request)[self._spans - 1 :: self._spans]:
            if key not in self._keys:
                break
            found += size
        return min(found, (len(request.prompt_token_ids) - 1) // size * size)

    def insert(self, request: EngineRequest) -> None:
        """The prompt's full blocks."""
        ids = self._ids(request)
        for block in range(len(ids) // self._spans):
            spans = slice(block * self._spans, (block + 1) * self._spans)
            key = ids[spans.stop - 1]
            if key not in self._keys:
                self._store(request, ids, spans)
            self._keys[key] = None
            self._keys.move_to_end(key)
        evicted = [self._keys.popitem(last=False)[0] for _ in range(len(self._keys) - self._config.num_blocks)]
        self._changes.removed(evicted)

    def _store(self, request: EngineRequest, ids: list[BlockId], spans: slice) -> None:
        run = StoredRun(
            parent=ids[spans.start - 1] if spans.start else NO_PARENT,
            ids=tuple(ids[spans]),
            token_ids=request.prompt_token_ids[spans.start * SPAN : spans.stop * SPAN],
            extra_keys=extra_keys(request.cache_salt),
        )
        self._changes.stored((run,))

    def _ids(self, request: EngineRequest) -> list[BlockId]:
        ids: list[BlockId] = []
        BlockHasher(self._config.fingerprint, extra_keys(request.cache_salt)).extend(ids, request.prompt_token_ids)
        return ids
