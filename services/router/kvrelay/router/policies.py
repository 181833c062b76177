"""The policies by the names that configuration knows them by."""

import time
from collections.abc import Callable
from typing import Literal, assert_never

from kvrelay.router.costs import Costs
from kvrelay.router.policy import LeastLoaded, Policy, RoundRobin, Session
from kvrelay.router.prefixaware import DEFAULT_WEIGHTS, PrefixAware, Weights
from kvrelay.router.prefixindex import PrefixIndex

PolicyName = Literal["prefix_aware", "least_loaded", "round_robin", "session"]


def make_policy(
    name: PolicyName,
    local_prefill_tokens: int,
    index: PrefixIndex,
    costs: Costs,
    *,
    weights: Weights = DEFAULT_WEIGHTS,
    clock: Callable[[], float] = time.monotonic,
) -> Policy:
    match name:
        case "least_loaded":
            return LeastLoaded(local_prefill_tokens)
        case "round_robin":
            return RoundRobin(local_prefill_tokens)
        case "session":
            return Session(local_prefill_tokens)
        case "prefix_aware":
            return PrefixAware(local_prefill_tokens, index, costs, weights=weights, clock=clock)
        case _:
            assert_never(name)
