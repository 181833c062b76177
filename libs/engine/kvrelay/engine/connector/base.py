"""What every connector keeps to. A store holds KV by the span of 16 tokens; a connector finds, loads and stores spans of a chain.

Calls are for the engine's event loop and never block it. None raises for what a store does or fails to do: a store that is
away, slow or wrong has nothing, for as long as it is so.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvrelay.common.ids import BlockId
from kvrelay.transfer.block import BlockInfo

Memory = NDArray[np.uint8]
Pin = Callable[[Memory], Callable[[], None]]
"""Makes memory ready for copies by a device, until what it gives is called. Both may take seconds; neither is for the event loop."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Spans, one after the other, that lie in one tier."""

    tier: str
    num_spans: int
    num_bytes: int
    seconds: float
    """That bringing them here is expected to take, without the pod's own copy."""
    source: int = 0
    """Which connector of a chain has them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A span's bytes, readable until they are released. `info` has the checksum that they must have."""

    info: BlockInfo
    data: Memory
    offset: int
    """Its name with the connector."""


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """For the bytes of the `index`-th of the spans that were to be stored; the writer's until it is committed or given up."""

    index: int
    data: Memory
    offset: int


class Load(Protocol):
    """Spans on their way. Ended by `close`, always."""

    async def next(self) -> Sequence[Stored]:
        """The next spans, in order; none: there are no more."""
        ...

    def release(self, spans: Sequence[Stored]) -> None:
        """They are read no more."""
        ...

    def corrupt(self, spans: Sequence[Stored]) -> None:
        """Their bytes are not what their checksums say. They are still to be released."""
        ...

    def close(self) -> None:
        """No more is wanted; what comes all the same is released."""
        ...


class Writing(Protocol):
    """Rooms for spans, the writer's."""

    rooms: Sequence[Room]
    is_refused: bool
    """For some there was no room."""

    def commit(self, rooms: Sequence[Room], checksums: Sequence[int]) -> None:
        """Written: from now on the store's."""
        ...

    def give_up(self, rooms: Sequence[Room]) -> None: ...


class Connector(Protocol):
    @property
    def num_timeouts(self) -> int:
        """Answers that did not come in time."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it is worth asking now."""
        ...

    def start(self) -> None: ...

    async def find(self, ids: Sequence[BlockId], first: int) -> Sequence[Run]:
        """What can be had of a chain, given from its beginning, from span `first` on."""
        ...

    def load(self, ids: Sequence[BlockId], first: int, found: Sequence[Run]) -> Load:
        """All of `ids` from `first` on, up to the first that cannot be had. `found`: what `find` has given, not empty."""
        ...

    async def begin(self, ids: Sequence[BlockId], heads: Sequence[BlockId], size: int) -> Writing:
        """Rooms for those spans, of `size` bytes each, that the store has not and takes. `heads`: see `transfer.segments`."""
        ...

    async def close(self) -> None:
        """Nothing reads or writes a store's memory any more."""
        ...


def no_pin(memory: Memory) -> Callable[[], None]:
    """Nothing but the CPU copies."""
    return lambda: None


class NoWriting:
    """Nothing is wanted, or no one is there to want it."""

    is_refused = False
    rooms: Sequence[Room] = ()

    def commit(self, rooms: Sequence[Room], checksums: Sequence[int]) -> None:
        assert not rooms, "there are no rooms"

    def give_up(self, rooms: Sequence[Room]) -> None:
        assert not rooms, "there are no rooms"


class NoLoad:
    async def next(self) -> Sequence[Stored]:
        return ()

    def release(self, spans: Sequence[Stored]) -> None:
        assert not spans, "nothing was given"

    def corrupt(self, spans: Sequence[Stored]) -> None:
        assert not spans, "nothing was given"

    def close(self) -> None:
        pass


class NoConnector:
    """There is no store."""

    ready = False
    num_timeouts = 0

    def start(self) -> None:
        pass

    async def find(self, ids: Sequence[BlockId], first: int) -> Sequence[Run]:
        return ()

    def load(self, ids: Sequence[BlockId], first: int, found: Sequence[Run]) -> Load:
        return NoLoad()

    async def begin(self, ids: Sequence[BlockId], heads: Sequence[BlockId], size: int) -> Writing:
        return NoWriting()

    async def close(self) -> None:
        pass
