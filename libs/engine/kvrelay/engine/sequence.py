"""One choice of a request while the engine works on it: its tokens, how far it is computed, and the blocks it holds."""

import dataclasses
import enum
import sys
import time

from kvrelay.common.ids import BlockId
from kvrelay.common.request import EngineRequest, FinishReason


class State(enum.Enum):
    WAITING = enum.auto()
    """In the scheduler's queue; may hold blocks (a prefix hit is pinned only when it is first scheduled)."""
    LOADING = enum.auto()
    """Its next turn waits for blocks out of the KV store, some of which it holds already."""
    RUNNING = enum.auto()
    """Takes part in steps; holds the blocks of its computed tokens."""
    RESERVED = enum.auto()
    """Decode side: holds blocks, which a transfer fills."""
    PUSHING = enum.auto()
    """Prefill side: computed; the push owns its blocks until they were packed or the push ended."""
    FINISHED = enum.auto()
    """Holds nothing."""


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are the prompt's and then the output's. Positions below `num_computed` have their KV in `blocks`.

    A step computes `tokens[position : position + k]`; where that reaches the end of the tokens, the next one is
    sampled. A step may be made up while the one before it computes yet: then its first token may be one that is being
    sampled, known on the device and not here. The first sequence of a request computes the prompt for all its choices (`num_branches` of them): when the prompt's
    last token is computed, one token is sampled for each choice, and the others branch off, sharing the prompt's blocks.
    """

    request: EngineRequest
    choice: int
    tokens: list[int]
    num_prompt: int
    order: int
    """Of arrival: ties between equal priorities are broken by it."""
    num_branches: int = 1
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it."""
    max_length: int = sys.maxsize
    """In tokens, with the prompt's: that of the token that ends it, whichever it is."""
    state: State = State.WAITING
    num_computed: int = 0
    num_ahead: int = 0
    """Tokens after the computed ones that steps in flight compute."""
    num_unknown: int = 0
    """Tokens after `tokens` that steps in flight sample."""
    num_cached: int = 0
    """Prompt tokens that were not computed, when the sequence was first scheduled."""
    blocks: list[int] = dataclasses.field(default_factory=list)
    block_ids: list[BlockId] = dataclasses.field(default_factory=list)
    """Identities of the full spans of 16 of `tokens`, as far as they were needed."""
    finish_reason: FinishReason | None = None
    row: int = -1
    """Its row in the model runner's buffers, given by the runner; -1 where it has none."""
    deadline: float = dataclasses.field(default_factory=lambda: time.monotonic() + 600.0)
    started: bool = False
    """Was part of a step."""
    looked_up: bool = False
    """The KV store was asked since the sequence last lost its blocks."""
    remembers: bool = dataclasses.field(init=False)
    """A token's logits depend on which came before, beyond what the model makes of them: there are penalties."""
    branched: bool = False
    """It may share a block that it writes."""
    num_tabled: int = 0
    """How many of its blocks, from the first on, are those that the runner knows."""
    whole: bool = False
    """Prefill side: takes the blocks of its whole prompt at once and is never preempted, since a push reads them."""

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        self.remembers = penalties != (1.0, 0.0, 0.0)

    @property
    def rank(self) -> tuple[int, int, int]:
        """The lowest runs first and is preempted last."""
        return self.request.priority, self.order, self.choice

    @property
    def ending(self) -> tuple[FinishReason | None, int | None]:
        """Why it ends with its last token, and the stop token if it is one."""
        if len(self.tokens) > self.num_prompt:
            if self.tokens[-1] in self.stop_ids:
                return FinishReason.STOP, self.tokens[-1]
            if len(self.tokens) >= self.max_length:
                return FinishReason.LENGTH, None
        return None, None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def position(self) -> int:
        """Of the first token that no step has computed or computes."""
        return self.num_computed + self.num_ahead

    @property
    def length(self) -> int:
        """In tokens, with those that are being sampled."""
        return len(self.tokens) + self.num_unknown

    @property
    def sampled_at(self) -> int:
        """The position of the token that the last launched step samples."""
        return len(self.tokens) + max(0, self.num_unknown - 1)

    @property
    def num_to_compute(self) -> int:
        return len(self.tokens) + self.num_unknown - self.num_computed - self.num_ahead
