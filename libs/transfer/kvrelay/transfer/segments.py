"""How a chain of blocks is cut for the index: blocks of a segment lie together in Redis, so that they are looked up at once."""

from collections.abc import Sequence

from kvrelay.common.ids import BlockId

SEGMENT_BLOCKS = 64
"""Of 16 tokens each. All of a chain in one place would put every conversation that begins alike on one server of a Redis
Cluster; each block by itself would ask all servers for every prompt."""


def head(ids: Sequence[BlockId], index: int) -> BlockId:
    """The head of the segment of one block of a chain, which begins with its first block."""
    return ids[index - index % SEGMENT_BLOCKS]


def heads(ids: Sequence[BlockId]) -> list[BlockId]:
    """Of each block of a chain."""
    return [first for first in ids[::SEGMENT_BLOCKS] for _ in range(SEGMENT_BLOCKS)][: len(ids)]
