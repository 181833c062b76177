"""What an engine says of a traced request when it is over."""

import msgspec
import pytest

from kvrelay.common.ids import RequestId
from kvrelay.engine.messages import Notice, Timeline
from kvrelay.engine.timeline import Timelines
from tests.pods.harness import request

pytestmark = pytest.mark.unit

ID = RequestId("r")
TRACED = msgspec.structs.replace(request("r"), traced=True)


def phases(notice: Notice) -> list[str]:
    assert isinstance(notice.kind, Timeline)
    assert all(phase.start <= phase.end for phase in notice.kind.phases)
    return [phase.name for phase in notice.kind.phases]


def test_a_prefill_with_a_load() -> None:
    lines = Timelines()
    lines.begin(TRACED, 1, pushes=True)
    lines.loaded(ID, 0.0, 32)
    lines.computing(ID)
    lines.computed(ID, 16, last=False)
    lines.computed(ID, 8, last=True)
    lines.pushed(ID, 0.5)
    assert lines.over({ID}) == []
    [notice] = lines.over(())
    assert (notice.request_id, notice.attempt) == (ID, 1)
    assert phases(notice) == ["load", "queue", "compute", "push"]
    assert isinstance(notice.kind, Timeline)
    assert [chunk.num_tokens for chunk in notice.kind.phases[2].chunks] == [16, 8]
    assert lines.over(()) == []


def test_a_push_that_is_received() -> None:
    lines = Timelines()
    lines.begin(TRACED, 1, receives=True)
    lines.received(ID)
    lines.computed(ID, 1, last=True)
    [notice] = lines.over(())
    assert phases(notice) == ["receive", "decode"]


def test_a_push_that_does_not_come() -> None:
    lines = Timelines()
    lines.begin(TRACED, 1, receives=True)
    lines.computing(ID)
    lines.computed(ID, 40, last=True)
    [notice] = lines.over(())
    assert phases(notice) == ["receive", "compute", "decode"]


def test_a_higher_attempt_ends_a_lower_and_is_not_ended_by_it() -> None:
    lines = Timelines()
    for attempt in (2, 2, 1, 3):
        lines.begin(TRACED, attempt, receives=True)
    assert [notice.attempt for notice in lines.over({ID})] == [1, 2]
    assert [notice.attempt for notice in lines.over(())] == [3]


def test_what_is_not_traced_leaves_nothing() -> None:
    lines = Timelines()
    lines.begin(request("r"), 1)
    lines.computing(ID)
    lines.pushed(ID, 1.0)
    assert lines.over(()) == []
