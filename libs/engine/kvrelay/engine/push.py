"""Prefill side: which of a step's KV goes to which decode pod, and whose blocks it lies in meanwhile.

    start ──▶ hook(batch) ── the step computes: each layer is ready as it is done ──▶ first_tokens ──▶ acknowledged ──▶ on_end

From `start` until `on_end` the push may read the sequence's blocks: the engine keeps them until `push_done`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from kvrelay.common.errors import KvrelayError
from kvrelay.common.ids import RequestId
from kvrelay.common.request import ChoiceDelta, EngineRequest, Ticket
from kvrelay.engine.batch import Batch, LayerHook, no_hook
from kvrelay.engine.cache import KvCache
from kvrelay.engine.messages import PushCompleted, PushFailed
from kvrelay.engine.sequence import Sequence
from kvrelay.transfer.copies import Copy, Part
from kvrelay.transfer.frame import FinalFrame
from kvrelay.transfer.sender import PushHandle, PushResult, Sender
from kvrelay.transfer.transport import Memory

log = logging.getLogger(__name__)


class BlockSource:
    """Packs a sequence's rows out of the cache. `blocks` is the sequence's own list, which grows as it is computed."""

    def __init__(self, cache: KvCache, blocks: list[int]) -> None:
        self._cache = cache
        self._blocks = blocks

    def read(self, part: Part, out: Memory, *, hashed: bool) -> Copy[bytes]:
        return self._cache.read_part(part, self._blocks, out, hashed=hashed)


class Pushes:
    """All pushes of one engine. Everything runs on the event loop, but for the hooks, which the compute thread calls."""

    def __init__(
        self, sender: Sender, cache: KvCache, on_end: Callable[[RequestId, int, PushCompleted | PushFailed], None]
    ) -> None:
        self._sender = sender
        self._cache = cache
        self._num_layers = cache.data.shape[0]
        self._on_end = on_end
        self._handles: dict[RequestId, PushHandle] = {}
        self._loop = asyncio.get_running_loop()

    def start(self, request: EngineRequest, ticket: Ticket, seq: Sequence) -> None:
        """Raises TransferFailed for a ticket that is none of this engine's kind."""
        handle = self._sender.push(ticket, BlockSource(self._cache, seq.blocks))
        self._handles[request.request_id] = handle
        handle.done.add_done_callback(lambda done: self._ended(request.request_id, ticket.attempt, done))

    def _ended(self, request_id: RequestId, attempt: int, done: "asyncio.Future[PushResult]") -> None:
        del self._handles[request_id]
        error = done.exception()
        if error is None:
            result = done.result()
            end = PushCompleted(payload_bytes=result.payload_bytes, seconds=result.seconds)
            self._on_end(request_id, attempt, end)
        else:
            code = error.code if isinstance(error, KvrelayError) else "internal"
            self._on_end(request_id, attempt, PushFailed(code=code, message=str(error)))

    def hook(self, batch: Batch) -> LayerHook:
        """For the step about to compute `batch`. What a first part found in the cache is ready at once, in all layers."""
        parts = []
        for part in batch.parts:
            handle = self._handles.get(part.seq.request.request_id)
            if handle is None:
                continue
            if part.start == part.seq.num_cached:
                for layer in range(self._num_layers):
                    handle.ready(layer, 0, part.start)
            parts.append((handle, part.start, part.end, part.samples > 0))
        if not parts:
            return no_hook

        def ready(layer: int) -> None:
            for handle, start, end, last in parts:
                handle.ready(layer, start, end)
                if last and layer == self._num_layers - 2:
                    handle.mark_last_layer()

        def from_compute_thread(layer: int) -> None:
            self._loop.call_soon_threadsafe(ready, layer)

        return from_compute_thread

    def first_tokens(self, deltas: Iterable[ChoiceDelta]) -> None:
        """After a step: the pushes whose requests got their first tokens, one a choice, are given their final frame."""
        first: dict[RequestId, list[ChoiceDelta]] = {}
        for delta in deltas:
            if delta.request_id in self._handles:
                first.setdefault(delta.request_id, []).append(delta)
        for request_id, choices in first.items():
            handle = self._handles[request_id]
            handle.finish(FinalFrame(deltas=tuple(choices), num_prompt_tokens=handle.target.end_token))

    def abort(self, request_id: RequestId) -> None:
        """The push ends soon, and says so through `on_end`. Unknown ids are ignored."""
        handle = self._handles.get(request_id)
        if handle is not None:
            handle.abort()
