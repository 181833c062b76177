"""One table of cases through both fronts, with equal results: HTTP whole, HTTP streamed, gRPC."""

import pytest

from tests.router.answers import Answer, ask_grpc, ask_http, ask_stream
from tests.router.cases import BAD, GOOD, Case
from tests.router.stack import Fronts
from tests.router.stub import MODEL, StubRouter

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


async def ask_all(fronts: Fronts, case: Case, model: str) -> tuple[Answer, Answer, Answer]:
    return (
        await ask_http(fronts.http, case, model),
        await ask_stream(fronts.http, case, model),
        await ask_grpc(fronts.channel, case, model),
    )


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
async def test_answers_are_equal(fronts: Fronts, case: Case) -> None:
    whole, streamed, rpc = await ask_all(fronts, case, MODEL)
    assert whole.error == ""
    assert whole == streamed
    assert whole == rpc
    assert len(whole.choices) == case.sampling.get("n", 1)
    for choice in whole.choices.values():
        assert choice.finish == case.finish or (case.finish is None and choice.finish is not None)
        assert case.num_tokens in (None, len(choice.token_ids))
        if "logprobs" in case.sampling:
            assert len(choice.logprobs) == len(choice.token_ids)
    assert whole.usage[0] == len(whole.prompt_token_ids)
    assert whole.usage[1] == sum(len(choice.token_ids) for choice in whole.choices.values())
    if "prompt_logprobs" in case.sampling:
        assert len(whole.prompt_logprobs) == len(whole.prompt_token_ids) - 1


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
async def test_errors_are_equal(fronts: Fronts, stub: StubRouter, case: Case) -> None:
    generated = len(stub.generated)
    whole, streamed, rpc = await ask_all(fronts, case, MODEL)
    assert (whole.error, whole.param) == (case.error, case.param_in_http)
    assert (streamed.error, streamed.param) == (case.error, case.param_in_http)
    assert (rpc.error, rpc.param) == (case.error, case.param)
    assert len(stub.generated) == generated, "a pod was touched"


async def test_seeded_choices_differ_and_repeat(fronts: Fronts) -> None:
    case = Case("n", sampling={"max_tokens": 8, "n": 3, "seed": 3})
    first, second = await ask_http(fronts.http, case, MODEL), await ask_http(fronts.http, case, MODEL)
    assert first == second
    assert len({choice.text for choice in first.choices.values()}) == 3


async def test_a_stop_string_ends_the_text_before_it(fronts: Fronts) -> None:
    case = Case("stop", sampling={"max_tokens": 40, "seed": 0, "stop": ("baton", "passes the")}, prompt="go")
    whole, streamed, rpc = await ask_all(fronts, case, MODEL)
    assert whole == streamed == rpc
    assert whole.choices[0].text == "The relay "
    assert (whole.choices[0].finish, whole.choices[0].stop_reason) == ("stop", "passes the")
