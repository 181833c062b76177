"""Valid requests, mutated: whatever comes, the answer is no 5xx, has OpenAI's shape, and the next request is served."""

import random

import grpc.aio
import pytest

from kvrelay.common.errors import Internal
from kvrelay.common.rpc import from_rpc_error
from tests.router.answers import ask_http
from tests.router.cases import GOOD
from tests.router.mutations import attack
from tests.router.stack import Fronts
from tests.router.stub import MODEL, StubRouter

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
COUNT = 500


async def test_mutated_http_bodies(fronts: Fronts, stub: StubRouter) -> None:
    seen = await attack(fronts.http, MODEL, COUNT, seed=2)
    assert {200, 400, 404} <= seen, "the mutations reach all sorts of answers"
    assert not stub.running
    assert (await ask_http(fronts.http, GOOD[0], MODEL)).error == ""


async def test_mutated_grpc_messages(fronts: Fronts, stub: StubRouter) -> None:
    chance = random.Random(3)
    codes: set[str] = set()
    for case in chance.choices(GOOD, k=COUNT // 2):
        data = bytearray(case.grpc(MODEL).SerializeToString())
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            async for _ in fronts.channel.unary_stream("/kvrelay.v1.Inference/Generate")(bytes(data), timeout=20):
                pass
        except grpc.aio.AioRpcError as error:
            codes.add(error.code().name)
            known = from_rpc_error(error)
            if isinstance(known, Internal):
                pytest.fail(f"{bytes(data)!r}: {known}")
    assert {"INVALID_ARGUMENT", "NOT_FOUND"} <= codes
    assert not stub.running
