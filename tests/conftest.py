"""What tests of every area share."""

import os
from pathlib import Path

import pytest

from tests import workers

workers.settle()

pytest_plugins = ["tests.fixtures_redis", "tests.fixtures_s3", "tests.exactness.fixtures"]

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The bundled model, converted: tokenizer, chat template, config and weights."""
    path = Path(os.environ.get("KVRELAY_TEST_MODEL") or ROOT / "var" / "models" / "smollm2")
    if not (path / "tokenizer.json").is_file():
        pytest.fail(f"there is no model in {path}: run `make model`, or name its folder in KVRELAY_TEST_MODEL")
    return path
