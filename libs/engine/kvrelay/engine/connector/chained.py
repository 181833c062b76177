"""Several connectors, one behind the other: the first that has something of a prefix brings it, and all are given what is computed."""

import asyncio
import dataclasses
from collections.abc import Sequence

from kvrelay.common.ids import BlockId
from kvrelay.engine.connector.base import Connector, Load, Room, Run, Writing


class ConnectorChain:
    """See `base.Connector`. Owns its connectors, the nearest first, none of which is a chain."""

    def __init__(self, connectors: Sequence[Connector]) -> None:
        self._connectors = tuple(connectors)

    @property
    def num_timeouts(self) -> int:
        return sum(connector.num_timeouts for connector in self._connectors)

    @property
    def ready(self) -> bool:
        """One is."""
        return any(connector.ready for connector in self._connectors)

    def start(self) -> None:
        for connector in self._connectors:
            connector.start()

    async def close(self) -> None:
        await asyncio.gather(*(connector.close() for connector in self._connectors))

    async def find(self, ids: Sequence[BlockId], first: int) -> Sequence[Run]:
        """One after the other: who is asked in vain costs its answer's time, and none while it is not ready."""
        for source, connector in enumerate(self._connectors):
            if connector.ready and (runs := await connector.find(ids, first)):
                return [dataclasses.replace(run, source=source) for run in runs]
        return ()

    def load(self, ids: Sequence[BlockId], first: int, found: Sequence[Run]) -> Load:
        return self._connectors[found[0].source].load(ids, first, found)

    async def begin(self, ids: Sequence[BlockId], heads: Sequence[BlockId], size: int) -> Writing:
        asked = [asyncio.create_task(each.begin(ids, heads, size)) for each in self._connectors if each.ready]
        try:
            await asyncio.gather(*asked)
        except BaseException:  # cancelled, mostly: what was granted meanwhile is nobody's
            await asyncio.wait(asked)
            for task in asked:
                if not task.cancelled() and task.exception() is None:
                    task.result().give_up(task.result().rooms)
            raise
        return _Writings([task.result() for task in asked])


class _Writings:
    """See `base.Writing`. Each room is its own connector's, whatever the others call theirs."""

    def __init__(self, writings: Sequence[Writing]) -> None:
        self.rooms: Sequence[Room] = [room for writing in writings for room in writing.rooms]
        self.is_refused = any(writing.is_refused for writing in writings)
        self._writings = writings
        self._owners = {id(room): writing for writing in writings for room in writing.rooms}

    def commit(self, rooms: Sequence[Room], checksums: Sequence[int]) -> None:
        for writing in self._writings:
            mine = [i for i, room in enumerate(rooms) if self._owners[id(room)] is writing]
            if mine:
                writing.commit([rooms[i] for i in mine], [checksums[i] for i in mine])

    def give_up(self, rooms: Sequence[Room]) -> None:
        for writing in self._writings:
            mine = [room for room in rooms if self._owners[id(room)] is writing]
            if mine:
                writing.give_up(mine)
