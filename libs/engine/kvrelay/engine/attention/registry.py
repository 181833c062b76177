"""Which backend attends, and why: the first of the list that can, or the one that was asked for."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrelay.common.errors import Unsupported
from kvrelay.engine.attention.base import AttentionBackend
from kvrelay.engine.attention.cpu import CpuAttention
from kvrelay.engine.config import EngineConfig

Factory = Callable[[torch.dtype], AttentionBackend]


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    device: str
    factory: Factory
    reason: str


_CANDIDATES = [
    Candidate("torch-cpu", "cpu", CpuAttention, "torch's fused attention over gathered blocks, on a CPU"),
]


def choose(config: EngineConfig, dtype: torch.dtype) -> tuple[AttentionBackend, str]:
    """The backend, and the reason in words. Raises Unsupported where none fits."""
    device = config.device.partition(":")[0]
    for candidate in _CANDIDATES:
        if candidate.device != device or config.attention not in ("auto", candidate.name):
            continue
        how = "the only one for it" if config.attention == "auto" else "asked for"
        return candidate.factory(dtype), f"{candidate.name}: {candidate.reason} ({how})"
    known = ", ".join(f"{c.name} ({c.device})" for c in _CANDIDATES)
    raise Unsupported(
        f"no attention backend {config.attention} for device {config.device}; there are {known}", "attention"
    )
