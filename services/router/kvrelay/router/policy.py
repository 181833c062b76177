"""Where a request goes: which prefill pod computes its prompt, which decode pod streams its tokens, or that it waits.

The policies here look at loads and at the request's session; `kvrelay.router.prefixaware` looks at prefixes as well.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, Protocol

import xxhash

from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.router.load import Load

_DECODE_SCORE = attrgetter("decode_score")
_PREFILL_SCORE = attrgetter("prefill_score")
_NUM_TOKENS = attrgetter("num_tokens")


class Prompt(Protocol):
    def ids(self, fingerprint: Fingerprint) -> Sequence[BlockId]:
        """Of all its full spans of 16 tokens, in order."""
        ...


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a policy may know of a request. `num_prompt_tokens` are all that must lie in the KV cache before the next is sampled:
    the prompt's and, on a later attempt, those already delivered."""

    num_prompt_tokens: int
    num_choices: int = 1
    decode: Load | None = None
    """It has its blocks there: only a prefill pod is wanted."""
    group: int | None = None
    """Only pods of this group: an earlier attempt ran on this model."""
    excluded: frozenset[Load] = frozenset()
    """They failed this request: taken again only where no other decode pod has room, and never to prefill."""
    prompt: Prompt | None = None
    """None: no prefix of it is worth looking for."""
    session: str = ""
    """The client's own key of what belongs together; empty: it names none."""


@dataclass(frozen=True, slots=True)
class PodsView:
    """The pods that can take a request now: alive, ready, not draining. Kept by the pool; a policy only reads it."""

    decode: Sequence[Load] = ()
    prefill: Mapping[int, Sequence[Load]] = field(default_factory=dict)
    """By group."""

    @property
    def num_prefill(self) -> int:
        return sum(map(len, self.prefill.values()))


@dataclass(frozen=True, slots=True)
class Route:
    """`prefill` None: the decode pod computes the prompt itself."""

    prefill: Load | None
    decode: Load
    num_cached_tokens: int = 0
    """Tokens of the prompt that the pod which computes it is believed to have."""
    seconds: float = 0.0
    """That the rest is believed to take."""


class Policy(Protocol):
    @property
    def reads_prompts(self) -> bool:
        """It asks for `RouteRequest.prompt`."""
        ...

    def choose(self, request: RouteRequest, pods: PodsView) -> Route | None:
        """None: it should wait. Called from the event loop, so within 200 µs at a thousand pods."""
        ...

    def placed(self, request: RouteRequest, route: Route) -> None:
        """The request goes where `choose` said last."""
        ...


Pick = Callable[[Sequence[Load]], Load]
"""One of several that could all take the request."""


def with_room(request: RouteRequest, pods: PodsView) -> list[Load]:
    """The decode pods that could take it now; those that failed it only where there is no other."""
    living = pods.decode
    if request.group is not None:
        living = [pod for pod in living if pod.group == request.group]
    need = request.num_prompt_tokens + request.num_choices
    free = [pod for pod in living if pod.free_tokens >= need and pod.startable]
    if not free and living:
        # Several choices may need more than any pod has: the largest one takes them when it is empty, and preempts.
        need = min(need, max(map(_NUM_TOKENS, living)))
        free = [pod for pod in living if pod.free_tokens >= need and pod.startable]
    if request.excluded:
        free = [pod for pod in free if pod not in request.excluded] or free
    return free


def paired(
    request: RouteRequest, pods: PodsView, local_prefill_tokens: int, pick_decode: Pick, pick_prefill: Pick
) -> Route | None:
    """A decode pod, and beside it a prefill pod of its group.

    The decode pod computes the prompt itself where it plays both parts, where the prompt is shorter than
    `local_prefill_tokens`, and where no prefill pod of its group lives.
    """
    decode = request.decode
    if decode is None:
        free = with_room(request, pods)
        if not free:
            return None
        decode = pick_decode(free)
    if decode.self_sufficient or request.num_prompt_tokens < local_prefill_tokens:
        return Route(None, decode)
    living = pods.prefill.get(decode.group, ())
    if request.excluded:
        living = [pod for pod in living if pod not in request.excluded]
    if not living:
        return Route(None, decode)
    free = [pod for pod in living if pod.startable]
    return Route(pick_prefill(free), decode) if free else None


def least_decoding(pods: Sequence[Load]) -> Load:
    return min(pods, key=_DECODE_SCORE)


def least_prefilling(pods: Sequence[Load]) -> Load:
    return min(pods, key=_PREFILL_SCORE)


class LeastLoaded:
    """The decode pod with the fewest requests (of those with room), the prefill pod with the fewest tokens still to compute."""

    reads_prompts: Final = False

    def __init__(self, local_prefill_tokens: int) -> None:
        self._local_prefill_tokens = local_prefill_tokens

    def choose(self, request: RouteRequest, pods: PodsView) -> Route | None:
        return paired(request, pods, self._local_prefill_tokens, least_decoding, least_prefilling)

    def placed(self, request: RouteRequest, route: Route) -> None:
        """Loads say all that it looks at."""


class RoundRobin:
    """One after the other, decode and prefill pods each for themselves; one that can take nothing now is passed over."""

    reads_prompts: Final = False

    def __init__(self, local_prefill_tokens: int) -> None:
        self._local_prefill_tokens = local_prefill_tokens
        self._turn = 0
        self._turns: dict[Load, int] = {}
        """When each was last taken. Pods that are gone leave with the next view."""
        self._view: PodsView | None = None

    def choose(self, request: RouteRequest, pods: PodsView) -> Route | None:
        if self._view is not pods:
            self._view = pods
            living = [*pods.decode, *(pod for group in pods.prefill.values() for pod in group)]
            self._turns = {pod: self._turns.get(pod, 0) for pod in living}
        return paired(request, pods, self._local_prefill_tokens, self._next, self._next)

    def _next(self, pods: Sequence[Load]) -> Load:
        return min(pods, key=self._turns.__getitem__)

    def placed(self, request: RouteRequest, route: Route) -> None:
        self._turn += 1
        for pod in (route.decode, route.prefill):
            if pod is not None:
                self._turns[pod] = self._turn


class Session:
    """Requests of a session go to the same pods, by rendezvous hashing (Thaler & Ravishankar 1998): of the pods that can take it
    the one whose hash with the session's key is the highest. Where that pod is gone or full the next one takes it, and pods
    that come or go move no other sessions. Requests without a session go to the least loaded.
    """

    reads_prompts: Final = False

    def __init__(self, local_prefill_tokens: int) -> None:
        self._local_prefill_tokens = local_prefill_tokens

    def choose(self, request: RouteRequest, pods: PodsView) -> Route | None:
        if not request.session:
            return paired(request, pods, self._local_prefill_tokens, least_decoding, least_prefilling)
        key = xxhash.xxh3_64_intdigest(request.session.encode("utf-8", "surrogatepass"))

        def highest(free: Sequence[Load]) -> Load:
            return max(free, key=lambda pod: (pod.name_hash ^ key) * _MIX & _MASK)

        return paired(request, pods, self._local_prefill_tokens, highest, highest)

    def placed(self, request: RouteRequest, route: Route) -> None:
        """Hashes need no memory."""


_MIX: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
