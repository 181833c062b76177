"""Loads without pods, for tests of policies."""

from collections.abc import Callable

from kvrelay.common.ids import Epoch, PodId
from kvrelay.router.load import Load, Report
from kvrelay.router.policy import PodsView, Route

ROOMY = Report(credits=64, num_running=0, num_waiting=0, waiting_tokens=0, free_blocks=1000, num_blocks=1000)


class Clock:
    """Stands until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pod(
    name: str, *, group: int = 0, both: bool = False, clock: Callable[[], float] | None = None, **report: int
) -> Load:
    """Roomy and idle, but for what of a report is given."""
    load = Load(
        PodId(name),
        Epoch(name),
        block_size=16,
        group=group,
        self_sufficient=both,
        clock=clock or Clock(),
    )
    values = {field: report.get(field, getattr(ROOMY, field)) for field in Report.__dataclass_fields__}
    load.report(Report(**values))
    return load


def view(*loads: Load) -> PodsView:
    """Names of prefill pods begin with p."""
    prefill: dict[int, list[Load]] = {}
    for load in loads:
        if load.pod_id.startswith("p"):
            prefill.setdefault(load.group, []).append(load)
    return PodsView([load for load in loads if not load.pod_id.startswith("p")], prefill)


def chosen(route: Route | None) -> tuple[str, str]:
    assert route is not None
    return (route.prefill.pod_id if route.prefill else "", route.decode.pod_id)
