"""Test processes beside each other, and beside what they start: who has which cores and ports."""

import os

from kvrelay.cli import ports


def settle() -> None:
    """Before torch is loaded, which reads these variables then. What tests start inherits them."""
    # Compute threads that wait for each other sleep instead of holding a core: others want it.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    name = os.environ.get("PYTEST_XDIST_WORKER")
    if name is None:
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A free port stays its finder's, also while a server that was killed is away from it.
    share = (ports.LAST - ports.FIRST) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    ports.FIRST += int(name.removeprefix("gw")) * share
    ports.LAST = ports.FIRST + share
