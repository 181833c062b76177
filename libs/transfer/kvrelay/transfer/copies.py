"""Rows between blocks and staging: copied at once, or beside the event loop."""

import asyncio
import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from kvrelay.common.layout import KvDtype

T = TypeVar("T")

Check = Callable[[bytes], None]
"""Takes a payload's leaves (`checksum.leaves`); raises ChecksumError where they are not those of what was sent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Rows of consecutive layers. In staging: [num_layers, K and V, num_tokens, heads, head size] of `dtype`."""

    layer: int
    num_layers: int
    first_token: int
    num_tokens: int
    dtype: KvDtype

    @property
    def end_token(self) -> int:
        return self.first_token + self.num_tokens

    @property
    def layers(self) -> range:
        return range(self.layer, self.layer + self.num_layers)

    @property
    def num_rows(self) -> int:
        """Each K and V of a token in a layer."""
        return self.num_layers * self.num_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A copy that was over when it was begun."""

    value: T

    def result(self) -> T:
        return self.value


Copy = Done[T] | Future[T]
"""Until it is done, blocks and staging are its own, whoever has lost interest in it."""


def when_done(copy: Copy[T], then: Callable[[Copy[T]], None]) -> None:
    """Calls `then` on this loop's thread: before this returns where the copy is done."""
    if isinstance(copy, Done) or copy.done():
        then(copy)
    else:
        loop = asyncio.get_running_loop()
        copy.add_done_callback(lambda done: loop.call_soon_threadsafe(then, done))


def settle(copies: set[Future[T]]) -> None:
    """When this returns none of them touches anything any more: those that run are waited for, the others do not begin."""
    wait([copy for copy in copies if not copy.cancel()])
