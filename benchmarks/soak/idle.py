"""An idle stack leaves the processor alone."""

import random

from benchmarks.soak.case import Case, Figures, Plan
from tests.e2e.meters import IDLE_SHARE, ask, cpu_shares, random_prompts
from tests.exactness.fixtures import running
from tests.exactness.served import assert_whole

SECONDS = 20.0


def _run(plan: Plan) -> Figures:
    """Idle after some work, with all connections open."""
    with running(plan.model, plan.scratch, prefill=1, decode=1, threads=plan.threads) as stack:
        ask(stack, random_prompts(random.Random(1), 8, 64), at_once=4, num_tokens=8)
        assert_whole(stack.pods)
        shares = cpu_shares(stack, SECONDS)
    busy = {name: share for name, share in shares.items() if share >= IDLE_SHARE}
    assert not busy, f"over {IDLE_SHARE} of a core: {busy}"
    return {"seconds": SECONDS, "limit": IDLE_SHARE, "share_of_a_core": shares}


CASES = [Case("idle", f"each process of an idle stack is under {IDLE_SHARE:.0%} of a core", _run)]
