"""Logs and metrics, the same in every process."""

import logging
import sys
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

METRICS_TYPE: Final = CONTENT_TYPE_LATEST
_FORMAT: Final = "%(asctime)s.%(msecs)03d %(levelname)s {service} %(name)s: %(message)s"


def configure_logging(service: str, level: str) -> None:
    """One line a record, on standard error, with the service's name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.format(service=service.replace("%", "%%")), "%Y-%m-%dT%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def new_registry() -> CollectorRegistry:
    """A registry of this process's own, with CPU, memory and garbage collection in it."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """What /metrics answers, as METRICS_TYPE."""
    return generate_latest(registry)
