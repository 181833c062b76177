"""Rotary position embeddings (Su et al. 2021), with the scalings of long-context checkpoints.

`linear` (Chen et al. 2023), `llama3` (Llama 3.1), `yarn` (Peng et al. 2023), and `factors`: a divisor for each frequency, as GGUF
files carry them. A scaling that depends on how long a sequence has become (`dynamic`, `longrope`) would give cached keys
another rotation than new ones, and is refused.
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import torch

from kvrelay.engine.models.errors import UnsupportedModel

if TYPE_CHECKING:
    from kvrelay.engine.models.config import HfConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    """Of one model. What a kind does not use keeps its default."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Scales cosine and sine."""
    truncate: bool = True
    factors: tuple[float, ...] = ()


def read_rope(config: "HfConfig") -> RopeSettings:
    """From `rope_parameters`, or from the older `rope_theta` and `rope_scaling`. Raises UnsupportedModel."""
    part = config.part("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    kind = part.text("rope_type", part.text("type", "default"))
    theta = part.number("rope_theta", config.number("rope_theta", 10_000.0))
    for holder in (config, part):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel("partial rotary embeddings are not supported", "partial_rotary_factor")
    max_positions = config.positive("max_position_embeddings", 2048)
    original = config.positive(
        "original_max_position_embeddings", part.positive("original_max_position_embeddings", max_positions)
    )
    match kind:
        case "default":
            return RopeSettings(theta=theta)
        case "linear":
            return RopeSettings(kind=kind, theta=theta, factor=part.number("factor"))
        case "factors":
            return RopeSettings(kind=kind, theta=theta, factors=part.numbers("factors"))
        case "llama3":
            return RopeSettings(
                kind=kind,
                theta=theta,
                factor=part.number("factor"),
                original_positions=original,
                low_freq_factor=part.number("low_freq_factor"),
                high_freq_factor=part.number("high_freq_factor"),
            )
        case "yarn":
            return _read_yarn(part, theta, original, max_positions)
    raise UnsupportedModel(f"rope_type {kind} is not supported", "rope_parameters")


def _read_yarn(part: "HfConfig", theta: float, original: int, max_positions: int) -> RopeSettings:
    factor = part.number("factor", max_positions / original)
    mscale, mscale_all = part.number("mscale", 0.0), part.number("mscale_all_dim", 0.0)
    if "attention_factor" in part:
        attention_factor = part.number("attention_factor")
    elif mscale and mscale_all:
        attention_factor = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all)
    else:
        attention_factor = _yarn_scale(factor, 1.0)
    return RopeSettings(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_positions=original,
        beta_fast=part.number("beta_fast", 32.0) or 32.0,
        beta_slow=part.number("beta_slow", 1.0) or 1.0,
        attention_factor=attention_factor,
        truncate=part.flag("truncate", True),
    )


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class Rope:
    """Rotates heads by position, in the half-split order of Hugging Face checkpoints."""

    def __init__(self, settings: RopeSettings, head_dim: int, max_positions: int, device: torch.device | str) -> None:
        self._frequencies = frequencies(settings, head_dim).to(device)
        self._scale = settings.attention_factor
        self._max_positions = max_positions

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, float32 [T, head_dim / 2], for `positions` [T]."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self._frequencies
        return angles.cos() * self._scale, angles.sin() * self._scale

    @functools.cached_property
    def table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As `at`, of all positions: for kernels that look them up."""
        return self.at(torch.arange(self._max_positions, device=self._frequencies.device))


class Rotation:
    """Of a step's tokens, for all its layers. `positions` [T]."""

    def __init__(self, rope: Rope, positions: torch.Tensor, dtype: torch.dtype) -> None:
        self.rope = rope
        self.positions = positions
        self._dtype = dtype

    @functools.cached_property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine [T, 1, head_dim]."""
        cos, sin = self.rope.at(self.positions)
        return (
            torch.cat((cos, cos), -1).to(self._dtype).unsqueeze(1),
            torch.cat((-sin, sin), -1).to(self._dtype).unsqueeze(1),
        )


def frequencies(settings: RopeSettings, head_dim: int) -> torch.Tensor:
    """Radians a position, float32 [head_dim / 2]."""
    powers = settings.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match settings.kind:
        case "linear":
            return 1.0 / powers / settings.factor
        case "factors":
            if len(settings.factors) != head_dim // 2:
                raise UnsupportedModel(f"{len(settings.factors)} rope factors for a head of {head_dim}", "rope_factors")
            return 1.0 / powers / torch.tensor(settings.factors, dtype=torch.float32)
        case "llama3":
            return _llama3(1.0 / powers, settings)
        case "yarn":
            return _yarn(powers, settings, head_dim)
    return 1.0 / powers


def _llama3(base: torch.Tensor, settings: RopeSettings) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated."""
    low, high, original = settings.low_freq_factor, settings.high_freq_factor, settings.original_positions
    waves = 2 * math.pi / base
    smooth = (original / waves - low) / (high - low)
    between = (1 - smooth) * base / settings.factor + smooth * base
    stretched = torch.where(waves > original / low, base / settings.factor, base)
    return torch.where((waves >= original / high) & (waves <= original / low), between, stretched)


def _yarn(powers: torch.Tensor, settings: RopeSettings, head_dim: int) -> torch.Tensor:
    """Dimensions that turn over `beta_fast` times in the original length are kept, under `beta_slow` times interpolated."""

    def dimension(turns: float) -> float:
        wave = settings.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(settings.theta))

    low, high = dimension(settings.beta_fast), dimension(settings.beta_slow)
    if settings.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (settings.factor * powers) * (1 - kept) + 1.0 / powers * kept
