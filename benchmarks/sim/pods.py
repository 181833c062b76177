"""Simulated pods: what they cost comes from a profile, what the router knows of them from their reports and events."""

from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.sim.trace import BLOCK, Request, key_of
from kvrelay.common.ids import BlockId, Epoch, PodId
from kvrelay.router.load import Load, Report
from kvrelay.router.placement import Placement

SEATS = 64
ROOM = 1 << 40
"""Tokens: memory of decode pods is no limit here."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured costs, in seconds."""

    about: str
    prefill_seconds_per_token: float
    prefill_seconds_per_token_pair: float
    """Attention: for each token and each one before it."""
    prefill_seconds_fixed: float
    step_tokens: int
    """A pod with two steps' tokens queued asks for no more."""
    decode_seconds_per_token: float
    transfer_seconds_per_token: float
    status_seconds: float
    """Between reports of a busy pod."""
    event_seconds: float
    """Until an event has reached the router's index."""

    def prefill_seconds(self, num_tokens: int, num_cached: int) -> float:
        each = self.prefill_seconds_per_token + self.prefill_seconds_per_token_pair * (num_cached + num_tokens / 2)
        return self.prefill_seconds_fixed + num_tokens * each


def read_profile(path: Path) -> Profile:
    return msgspec.json.decode(path.read_bytes(), type=Profile)


class Cache:
    """Blocks of one pod, the least recently used out first, of a prompt its end first. `capacity` None: no limit."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hit(self, request: Request) -> int:
        """Tokens of its prompt that are there."""
        held = 0
        for block in request.blocks:
            if block not in self._blocks:
                break
            held += 1
        return min(held * BLOCK, request.num_prompt - 1)

    def add(self, request: Request) -> tuple[list[BlockId], list[BlockId]]:
        """Keys of the blocks that are new, and of those that had to go."""
        stored = [key_of(block) for block in request.blocks if block not in self._blocks]
        for block in reversed(request.blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        removed = []
        if self._capacity is not None:
            while len(self._blocks) > self._capacity:
                removed.append(key_of(self._blocks.popitem(last=False)[0]))
        return stored, removed


class PrefillPod:
    """Computes prompts one after the other. `computed_tokens` is its load so far."""

    def __init__(self, name: str, profile: Profile, cache: Cache, clock: Callable[[], float]) -> None:
        self.load = Load(PodId(name), Epoch(name), block_size=BLOCK, clock=clock)
        self.cache = cache
        self.waiting: deque[tuple[Request, Placement]] = deque()
        self.computed_tokens = 0
        self.busy_seconds = 0.0
        self.reporting = False
        self._profile = profile
        self._clock = clock
        self._current: tuple[Request, Placement] | None = None
        self._began = self._ends = 0.0
        self._remaining = 0
        self.report()

    @property
    def busy(self) -> bool:
        return self._current is not None or bool(self.waiting)

    @property
    def idle_with_work(self) -> bool:
        return self._current is None and bool(self.waiting)

    def begin(self) -> float:
        """The next prompt; answers when it will be computed."""
        request, placement = self._current = self.waiting.popleft()
        request.num_cached = self.cache.hit(request)
        self._remaining = request.num_prompt - request.num_cached
        placement.prefill_started(request.num_cached)
        self._began = self._clock()
        self._ends = self._began + self._profile.prefill_seconds(self._remaining, request.num_cached)
        return self._ends

    def finish(self) -> tuple[Request, Placement, list[BlockId], list[BlockId]]:
        """What was computed, and the keys that this stored and removed."""
        assert self._current is not None
        request, placement = self._current
        self._current = None
        self.computed_tokens += self._remaining
        self.busy_seconds += self._ends - self._began
        request.first_token = self._ends
        placement.first_token()
        return request, placement, *self.cache.add(request)

    def report(self) -> None:
        """As a pod's status: a waiting prompt counts whole, as what is cached of it is not looked at before its turn."""
        tokens = sum(request.num_prompt for request, _ in self.waiting)
        if self._current is not None:
            left = (self._ends - self._clock()) / (self._ends - self._began)
            tokens += max(0, int(left * self._remaining))
        running = self._current is not None
        self.load.report(
            Report(
                credits=0 if tokens >= 2 * self._profile.step_tokens else SEATS,
                num_running=int(running),
                num_waiting=len(self.waiting),
                waiting_tokens=tokens,
                free_blocks=ROOM // BLOCK,
                num_blocks=ROOM // BLOCK,
            )
        )


class DecodePod:
    """Streams what it is given; never full, keeps no prefixes."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.load = Load(PodId(name), Epoch(name), block_size=BLOCK, clock=clock)
        report = Report(
            credits=ROOM,
            num_running=0,
            num_waiting=0,
            waiting_tokens=0,
            free_blocks=ROOM // BLOCK,
            num_blocks=ROOM // BLOCK,
        )
        self.load.report(report)
