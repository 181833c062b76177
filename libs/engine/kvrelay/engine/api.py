"""The engine as services see it: one interface, kept by `AsyncEngine` (a process with a model) and by `FakeEngine` (no torch).

Life cycle: `start` once; then any of the calls, in any number at once; `close` once. After the engine process has died,
each call raises Unavailable, `outputs` ends, and `dead` is set: the pod ends, its supervisor starts another, with a new epoch.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from kvrelay.common.ids import RequestId, RouterId
from kvrelay.common.request import EngineRequest, Ticket
from kvrelay.engine.messages import EngineInfo, EngineStats, Inspection, Progress, StepOutput


class EngineClient(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> EngineStats:
        """As of the last step's output."""
        ...

    @property
    def dead(self) -> asyncio.Event: ...

    @property
    def pid(self) -> int:
        """Of the process that computes. Raises Unavailable where it has not started."""
        ...

    async def start(self, on_progress: Callable[[Progress], None] = ...) -> EngineInfo:
        """Returns when the engine can serve. Raises Internal with the reason if it cannot start."""
        ...

    async def reserve(
        self, request: EngineRequest, attempt: int, router_id: RouterId, *, local_prefill: bool = False
    ) -> tuple[Ticket | None, int]:
        """Admits a request on the decode side: its ticket (None with `local_prefill`) and the prompt tokens found here.

        Raises NoCapacity, InvalidRequest, StaleEpoch (a lower attempt than one already seen).
        """
        ...

    async def prefill(self, request: EngineRequest, ticket: Ticket) -> None:
        """Computes, samples the first tokens, pushes. What happens comes through `outputs`."""
        ...

    async def submit(self, request: EngineRequest) -> None:
        """Computes prompt and tokens here, as `reserve` with `local_prefill` does, but never refused for lack of room."""
        ...

    async def abort(self, request_ids: tuple[RequestId, ...]) -> None:
        """Frees what the requests hold, in any state, after the step in flight. Unknown ids are ignored."""
        ...

    async def abort_choice(self, request_id: RequestId, choice: int) -> None:
        """As `abort`, of one choice; with the last of them the request is over. Unknown ones are ignored."""
        ...

    async def abort_router(self, router_id: RouterId) -> None: ...

    def outputs(self) -> AsyncIterator[StepOutput]:
        """All steps' outputs, in order. One consumer. A StepOutput without deltas or notices may come for its stats."""
        ...

    async def inspect(self) -> Inspection: ...

    async def set_hold(self, point: str, after_frames: int = 0) -> None: ...

    async def close(self) -> None: ...
