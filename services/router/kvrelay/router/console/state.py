"""What the page shows, as one JSON document: put together when somebody looks, at most a few times a second for all who do."""

import time
from collections.abc import Callable
from typing import Final

import msgspec

from kvrelay.common.access import PodAccess
from kvrelay.router.console.roll import PodRow, Roll
from kvrelay.router.console.stores import StoreRow, Stores
from kvrelay.router.console.timeline import RequestRow, Timeline
from kvrelay.router.pool import Pods
from kvrelay.router.settings import RouterSettings

FRESH_SECONDS: Final = 0.25
"""For which a document serves everyone who asks."""


class RouterRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    policy: str
    ready: bool
    reason: str
    running: int
    waiting: int
    """In the router's queue; these count as running as well."""
    uptime_seconds: int


class State(msgspec.Struct, frozen=True, kw_only=True):
    now_ms: int
    """Unix time."""
    router: RouterRow
    num_pods: int
    """That are there; `pods` shows some of very many."""
    pods: list[PodRow]
    stores: list[StoreRow]
    requests: list[RequestRow]


class Console:
    """Of one router. `close` ends what looking has begun."""

    def __init__(
        self,
        settings: RouterSettings,
        access: PodAccess,
        pods: Pods,
        timeline: Timeline,
        router: Callable[[], RouterRow],
    ) -> None:
        self._pods = pods
        self._roll = Roll()
        self._timeline = timeline
        self._router = router
        self._stores = Stores(settings.redis_url, settings.cluster, access)
        self._document = b""
        self._fresh_until = 0.0

    @property
    def busy(self) -> bool:
        """Something is still done for somebody who looked."""
        return self._stores.asking

    def document(self) -> bytes:
        now = time.monotonic()
        if now >= self._fresh_until:
            self._document = msgspec.json.encode(self._state())
            self._fresh_until = now + FRESH_SECONDS
        return self._document

    async def close(self) -> None:
        await self._stores.close()

    def _state(self) -> State:
        known = self._pods.known()
        return State(
            now_ms=int(time.time() * 1000),
            router=self._router(),
            num_pods=len(known),
            pods=self._roll.rows(known),
            stores=self._stores.rows(),
            requests=self._timeline.rows(),
        )
