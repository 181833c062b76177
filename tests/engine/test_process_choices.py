"""Engine processes: a choice that is aborted while the KV is on its way gets no sequence where it arrives."""

from pathlib import Path

import pytest

from kvrelay.common.ids import RequestId
from tests.engine.test_process import ROUTER, config, request, started
from tests.engine.tiny import make

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


async def test_an_aborted_choice_is_not_computed(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    async with started(config(tmp_path), "p") as p, started(config(tmp_path), "d") as d:
        wanted = request("two", n=3, temperature=1.0)
        ticket, _ = await d.engine.reserve(wanted, 2, ROUTER)
        assert ticket is not None
        await d.engine.abort_choice(RequestId("two"), 2)
        await p.engine.prefill(wanted, ticket)
        two = await d.tokens("two", 2)
        assert [len(tokens) for tokens in two.values()] == [8, 8]
        await p.assert_whole()
        await d.assert_whole()
        ticket, _ = await d.engine.reserve(request("none", n=2), 1, ROUTER)
        for choice in (0, 1):
            await d.engine.abort_choice(RequestId("none"), choice)
        await d.assert_whole()
