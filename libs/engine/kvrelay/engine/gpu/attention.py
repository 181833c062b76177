"""What attention on a GPU keeps to."""

from typing import Protocol

from kvrelay.engine.attention.base import AttentionMetadata
from kvrelay.engine.gpu.inputs import DeviceInputs


class DeviceAttention(Protocol):
    name: str

    def prepare(self, inputs: DeviceInputs) -> AttentionMetadata:
        """Once a step. Capturable in a CUDA graph, for a step of single tokens and for a padded one."""
        ...
