"""Where a request goes: which prefill pod computes its prompt, which decode pod streams its tokens, or that it waits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from kvrelay.router.load import Load
from kvrelay.router.replica import Index

_DECODE_SCORE = attrgetter("decode_score")
_PREFILL_SCORE = attrgetter("prefill_score")
_NUM_TOKENS = attrgetter("num_tokens")


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


@dataclass(frozen=True, slots=True)
class PodsView:
    """The pods that can take a request now: alive, ready, not draining. Kept by the pool; a policy only reads it."""

    decode: Sequence[Load] = ()
    prefill: Mapping[int, Sequence[Load]] = field(default_factory=dict)
    """By group."""


@dataclass(frozen=True, slots=True)
class Route:
    """`prefill` None: the decode pod computes the prompt itself."""

    prefill: Load | None
    decode: Load


class Policy(Protocol):
    @property
    def index(self) -> Index | None:
        """Of the pods' prefix caches, which the router then keeps true; None: the policy asks for none."""
        ...

    def choose(self, request: RouteRequest, pods: PodsView) -> Route | None:
        """None: it should wait. Called from the event loop, so within 200 µs at a thousand pods."""
        ...


class LeastLoaded:
    """The decode pod with the fewest requests (of those with room), the prefill pod with the fewest tokens still to compute.

    The decode pod computes the prompt itself where it plays both parts, where the prompt is shorter than
    `local_prefill_tokens`, and where no prefill pod of its group lives.
    """

    index = None

    def __init__(self, local_prefill_tokens: int) -> None:
        self._local_prefill_tokens = local_prefill_tokens

    def choose(self, request: RouteRequest, pods: PodsView) -> Route | None:
        decode = request.decode or self._decode(request, pods)
        if decode is None:
            return None
        if decode.self_sufficient or request.num_prompt_tokens < self._local_prefill_tokens:
            return Route(None, decode)
        living = [pod for pod in pods.prefill.get(decode.group, ()) if pod not in request.excluded]
        if not living:
            return Route(None, decode)
        free = [pod for pod in living if pod.startable]
        return Route(min(free, key=_PREFILL_SCORE), decode) if free else None

    @staticmethod
    def _decode(request: RouteRequest, pods: PodsView) -> Load | None:
        living = pods.decode
        if request.group is not None:
            living = [pod for pod in living if pod.group == request.group]
        # Several choices may need more than any pod has: the largest one takes them when it is empty, and preempts.
        most = max(map(_NUM_TOKENS, living), default=0)
        need = min(request.num_prompt_tokens + request.num_choices, most)
        free = [pod for pod in living if pod.startable and pod.free_tokens >= need]
        if request.excluded:
            free = [pod for pod in free if pod not in request.excluded] or free
        return min(free, key=_DECODE_SCORE) if free else None


POLICIES = {"least_loaded": LeastLoaded}
