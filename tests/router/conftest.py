"""A stub router behind both fronts."""

from collections.abc import AsyncGenerator

import pytest

from tests.router.stack import Fronts, fronts_of
from tests.router.stub import StubRouter


@pytest.fixture
def stub() -> StubRouter:
    return StubRouter()


@pytest.fixture
async def fronts(stub: StubRouter) -> AsyncGenerator[Fronts, None]:
    async with fronts_of(stub) as running:
        yield running
