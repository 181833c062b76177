"""Several steps' tokens in one message, for a router that reads slowly."""

import pytest

from kvrelay.common.ids import RequestId
from kvrelay.common.request import ChoiceDelta
from kvrelay.engine import messages as m
from kvrelay.engine.pod import steps
from kvrelay.v1 import decode_pb2

pytestmark = pytest.mark.unit


def _step(index: int, *names: str, notice: bool = False) -> decode_pb2.StepTokens:
    deltas = [
        ChoiceDelta(request_id=RequestId(name), choice=0, index=index, token_ids=(index,), attempt=1) for name in names
    ]
    kind = m.PromptComputed(num_cached_tokens=index, prompt_logprobs=())
    notices = [m.Notice(request_id=RequestId(names[0]), attempt=1, kind=kind)] if notice else []
    return steps.step_to_proto(deltas, notices)


def test_joined_steps_keep_their_order() -> None:
    found = steps.joined([_step(0, "a", notice=True), _step(1, "a", "b", notice=True), _step(2, "b")])
    assert [(delta.request_id, delta.index) for delta in found.deltas] == [("a", 0), ("a", 1), ("b", 1), ("b", 2)]
    assert [notice.prompt.num_cached_tokens for notice in found.notices] == [0, 1]


def test_a_single_step_stays_as_it_is() -> None:
    assert steps.joined([_step(3, "a", "b")]) == _step(3, "a", "b")
