"""An engine without torch or a model: router and services run end to end on it in seconds."""

from kvrelay.engine.fake.config import FakeConfig
from kvrelay.engine.fake.engine import FakeEngine

__all__ = ["FakeConfig", "FakeEngine"]
