"""What any kind of checkpoint gives: a configuration, tensors, the files that they came from."""

import dataclasses
import json
from pathlib import Path

import torch

from kvrelay.engine.models.config import HfConfig
from kvrelay.engine.models.errors import BadWeights
from kvrelay.engine.models.weights import TensorSource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    config: HfConfig
    source: TensorSource
    dtype: torch.dtype
    """That it is stored in, or was made in before it was quantized."""
    files: tuple[Path, ...]
    """That hold the weights, in an order that does not depend on the machine."""
    eos_token_ids: tuple[int, ...]
    revision: str = ""
    """Names weights that no file holds."""


def read_json(path: Path) -> HfConfig:
    """Raises BadWeights where the file cannot be read as an object."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadWeights(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise BadWeights(f"{path} does not hold an object")
    return HfConfig(values)


def named_dtype(config: HfConfig) -> torch.dtype | None:
    """The configuration's `dtype`, or the older `torch_dtype`; None where it says nothing that is known here."""
    name = config.text("dtype", config.text("torch_dtype", "-"))
    return DTYPES.get(name.removeprefix("torch."))


def read_eos(folder: Path, config: HfConfig) -> tuple[int, ...]:
    """Of generation_config.json where it names any, else of the configuration."""
    path = folder / "generation_config.json"
    found = read_json(path).integers("eos_token_id") if path.is_file() else ()
    return found or config.integers("eos_token_id")
