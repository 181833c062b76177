"""What an engine still says for a former attempt reaches no one, and ends nothing of the attempt that replaced it."""

import pytest

from kvrelay.common.ids import PodId, RouterId
from kvrelay.common.pod.state import PodState
from kvrelay.common.request import ChoiceDelta, FinishReason
from kvrelay.common.tracing import NoTracer
from kvrelay.common.wire import delta_from_proto
from kvrelay.engine import messages as m
from kvrelay.engine.fake import FakeConfig, FakeEngine
from kvrelay.engine.pod.kvevents import EventLog
from kvrelay.engine.pod.routes import Routes
from kvrelay.engine.pod.tracing import Traces
from tests.pods.harness import ROUTER, request

pytestmark = pytest.mark.unit

STATS = m.EngineStats(transfer=m.TransferCounters())
WANTED = request("a")


def delta(attempt: int, index: int, finish: FinishReason | None = None) -> ChoiceDelta:
    return ChoiceDelta(
        request_id=WANTED.request_id, choice=0, index=index, token_ids=(7,), finish_reason=finish, attempt=attempt
    )


def routes() -> Routes:
    engine = FakeEngine(FakeConfig(), PodId("p"))
    return Routes(engine, PodState(), EventLog(engine, ()), Traces(NoTracer()))


async def test_decode_streams_have_the_newest_attempt_only() -> None:
    under_test = routes()
    router = RouterId(ROUTER)
    stream = under_test.open_stream(router)
    under_test.own(WANTED, 1, router)
    under_test.own(WANTED, 2, router)
    former = m.Notice(request_id=WANTED.request_id, attempt=1, kind=m.RequestFailed(code="internal", message="why"))
    late = (delta(1, 0), delta(1, 1, FinishReason.LENGTH))
    under_test._dispatch(m.StepOutput(deltas=late, notices=(former,), stats=STATS))
    assert len(stream) == 0
    assert under_test.busy
    assert under_test.counters.dropped_deltas == 2
    current = (delta(2, 0), delta(2, 1, FinishReason.LENGTH))
    under_test._dispatch(m.StepOutput(deltas=current, stats=STATS))
    step = await stream.get()
    assert step is not None
    assert tuple(map(delta_from_proto, step.deltas)) == current
    assert not under_test.busy


async def test_a_prefill_call_has_its_own_attempt_only() -> None:
    under_test = routes()
    former = under_test.open_prefill(WANTED.request_id, 1)
    route = under_test.open_prefill(WANTED.request_id, 2)
    under_test._dispatch(m.StepOutput(deltas=(delta(1, 0),), stats=STATS))
    assert len(route.events) == 0
    under_test._dispatch(m.StepOutput(deltas=(delta(2, 0),), stats=STATS))
    event = await route.events.get()
    assert event is not None
    assert [one.attempt for one in event.first_tokens.deltas] == [2]
    assert former.events.ended
