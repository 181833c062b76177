"""A stack of real processes around fake engines, which has served a little."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.cli.options import StackOptions
from kvrelay.cli.stack import Stack
from tests.observe.deployed import serve_a_little


@pytest.fixture(scope="module")
def stack(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    tiers = f"[{{tier: cpu, bytes: 1MiB}}, {{tier: file, bytes: 1MiB, directory: {tmp_path_factory.mktemp('tier')}}}]"
    options = StackOptions(
        model=model_dir,
        engine="fake",
        free_ports=True,
        kvstore=1,
        kvstore_tiers=tiers,
        router_options={"local-prefill-tokens": "0"},
    )
    with Stack(options, tmp_path_factory.mktemp("run")) as running:
        serve_a_little(running)
        yield running
