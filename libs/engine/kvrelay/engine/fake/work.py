"""One request inside a fake engine."""

import asyncio
import dataclasses
import enum
import time
from typing import Final

from kvrelay.common.ids import RouterId
from kvrelay.common.request import ChoiceDelta, EngineRequest, FinishReason, Ticket
from kvrelay.engine.fake.config import FakeConfig
from kvrelay.engine.fake.tokens import Speaker

NO_ROUTER: Final = RouterId("")


class Stage(enum.Enum):
    WAITING = enum.auto()
    """For blocks; holds none."""
    RESERVED = enum.auto()
    """Holds blocks, which a push fills."""
    COMPUTING = enum.auto()
    """The prompt."""
    PUSHING = enum.auto()
    RUNNING = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class Work:
    """`ticket` is what this engine granted (decode side) or was given (prefill side, where `pushes`)."""

    request: EngineRequest
    speaker: Speaker
    stage: Stage
    num_blocks: int
    """Held from admission to the end."""
    attempt: int = 0
    router_id: RouterId = NO_ROUTER
    pushes: bool = False
    ticket: Ticket | None = None
    num_cached: int = 0
    num_computed: int = 0
    started: bool = False
    lengths: list[int] = dataclasses.field(default_factory=list)
    """Of each choice's output so far, delivered tokens included."""
    finished: list[bool] = dataclasses.field(default_factory=list)
    deadline: float = 0.0
    ticket_deadline: float = 0.0
    push: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        n = self.request.sampling.n
        self.lengths = [0] * n
        self.finished = [False] * n
        for resumed in self.request.resume:
            self.lengths[resumed.choice] = len(resumed.token_ids)
            self.finished[resumed.choice] = resumed.finished
        self.deadline = time.monotonic() + self.request.timeout_ms / 1000

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def over(self) -> bool:
        return all(self.finished)

    def advance(self) -> list[ChoiceDelta]:
        """The next token of each choice that goes on."""
        return [self._next(choice) for choice, finished in enumerate(self.finished) if not finished]

    def _next(self, choice: int) -> ChoiceDelta:
        index = self.lengths[choice]
        token = self.speaker.token(choice, index)
        reason, stop_token = self.speaker.finish(token, index)
        self.lengths[choice] += 1
        self.finished[choice] = reason is not None
        return ChoiceDelta(
            request_id=self.request.request_id,
            choice=choice,
            index=index,
            token_ids=(token,),
            logprobs=self.speaker.logprobs(token),
            finish_reason=reason,
            stop_token_id=stop_token if reason is FinishReason.STOP else None,
            attempt=self.attempt,
        )

    def adopt(self, deltas: tuple[ChoiceDelta, ...]) -> None:
        """First tokens that the prefill side drew."""
        for delta in deltas:
            self.lengths[delta.choice] = max(self.lengths[delta.choice], delta.index + len(delta.token_ids))
            self.finished[delta.choice] |= delta.finish_reason is not None


def blocks_needed(request: EngineRequest, speaker: Speaker, config: FakeConfig, *, pushes: bool) -> int:
    """All that the request may come to hold, so that nothing has to be preempted; at most the whole pool."""
    size = config.block_size
    prompt = -(-len(request.prompt_token_ids) // size)
    output = 0 if pushes else request.sampling.n * -(-speaker.expected // size)
    return min(config.num_blocks, prompt + output)
