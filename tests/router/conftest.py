"""A stub router behind both fronts: one of each module's tests, as new for each test."""

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from tests.router.stack import Fronts, fronts_of
from tests.router.stub import StubRouter


@pytest.fixture(scope="module")
def shared_stub() -> StubRouter:
    return StubRouter()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_fronts(shared_stub: StubRouter) -> AsyncGenerator[Fronts, None]:
    async with fronts_of(shared_stub) as running:
        yield running


@pytest.fixture
def stub(shared_stub: StubRouter) -> StubRouter:
    shared_stub.reset()
    return shared_stub


@pytest.fixture
def fronts(shared_fronts: Fronts, stub: StubRouter) -> Fronts:
    """For tests in the module's event loop."""
    return shared_fronts
