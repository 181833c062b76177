"""What a model is, independent of the file that said so: read from a Hugging Face `config.json`, of any age."""

import dataclasses
from collections.abc import Mapping

from kvrelay.engine.models.errors import UnsupportedModel
from kvrelay.engine.models.rope import RopeSettings


class HfConfig:
    """Typed access to a parsed `config.json`. A null counts as absent, as it does there; a wrong type names its field."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def names(self) -> list[str]:
        return list(self._values)

    def has_key(self, name: str) -> bool:
        return name in self._values

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnsupportedModel(f"{name} of the model's configuration must be an integer, not {value!r}", name)
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.integer(name, default)
        if value < 1:
            raise UnsupportedModel(f"{name} of the model's configuration must be positive, not {value}", name)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedModel(f"{name} of the model's configuration must be a number, not {value!r}", name)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise UnsupportedModel(f"{name} of the model's configuration must be true or false, not {value!r}", name)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise UnsupportedModel(f"{name} of the model's configuration must be a string, not {value!r}", name)
        return value

    def part(self, name: str) -> "HfConfig":
        """A nested object; empty where it is absent."""
        value = self._values.get(name)
        if value is None:
            return HfConfig({})
        if not isinstance(value, Mapping):
            raise UnsupportedModel(f"{name} of the model's configuration must be an object, not {value!r}", name)
        return HfConfig(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self._values.get(name)
        values = value if isinstance(value, list) else [value]
        numbers = tuple(float(item) for item in values if isinstance(item, int | float))
        if len(numbers) < len(values):
            raise UnsupportedModel(f"{name} of the model's configuration must be numbers, not {value!r}", name)
        return numbers

    def integers(self, name: str) -> tuple[int, ...]:
        """One integer or a list of them; empty where it is absent."""
        if name not in self:
            return ()
        value = self._values[name]
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            raise UnsupportedModel(f"{name} of the model's configuration must be integers, not {value!r}", name)
        return tuple(values)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty where it is absent."""
        value = self._values.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UnsupportedModel(f"{name} of the model's configuration must be strings, not {value!r}", name)
        return tuple(value)

    def _get(self, name: str, default: object) -> object:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise UnsupportedModel(f"{name} is missing from the model's configuration", name)
        return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family. Everything here shapes the KV, and so is part of the model's fingerprint."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    tie_embeddings: bool
    rope: RopeSettings
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}",
                "num_key_value_heads",
            )
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim must be even, not {self.head_dim}", "head_dim")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def refuse_sliding_window(window: int | None) -> None:
    """Raises UnsupportedModel where a sliding window is in use."""
    if window is not None:
        raise UnsupportedModel(f"a sliding window ({window} tokens) is not supported", "sliding_window")
