"""Fixtures of the tiers' tests."""

import random

import pytest

# A fixture is found by its name in a conftest.
from tests.kvstore.faulty_s3 import closing, make, manual, server  # noqa: F401
from tests.kvstore.file_tier import hang, mount, opened  # noqa: F401


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)
