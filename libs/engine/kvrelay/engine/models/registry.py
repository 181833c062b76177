"""Which architectures are served. A module of this package registers its own: adding a model is adding a file."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvrelay.engine import models
from kvrelay.engine.attention.base import AttentionMetadata
from kvrelay.engine.batch import LayerHook
from kvrelay.engine.cache import KvCache
from kvrelay.engine.models.config import HfConfig, ModelConfig
from kvrelay.engine.models.errors import UnsupportedModel
from kvrelay.engine.models.weights import Weights
from kvrelay.kernels.ops import Ops


class CausalModel(Protocol):
    """Flattened tokens in, hidden states out; see `Decoder` for shapes."""

    config: ModelConfig
    dtype: torch.dtype

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: KvCache,
        attention: AttentionMetadata,
        on_layer: LayerHook,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Architecture:
    describe: Callable[[HfConfig], ModelConfig]
    """Reads a configuration. Raises UnsupportedModel."""
    build: Callable[[ModelConfig, Weights, Ops], CausalModel]


_architectures: dict[str, Architecture] = {}


def register(name: str, architecture: Architecture) -> None:
    _architectures[name] = architecture


def find(config: HfConfig) -> Architecture:
    """By the configuration's `architectures`. Raises UnsupportedModel, which lists what there is."""
    for module in pkgutil.iter_modules(models.__path__, f"{models.__name__}."):
        importlib.import_module(module.name)
    names = config.texts("architectures")
    for name in names:
        if name in _architectures:
            return _architectures[name]
    known = ", ".join(sorted(_architectures))
    raise UnsupportedModel(f"architecture {' or '.join(names) or '(none)'} is not among {known}", "architectures")
