"""What pods of one kind cost, measured."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]

_OWN = files("kvrelay.cli.plan") / "profiles"


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds. A prefill pod computes prompts one after the other; a decode pod all its sequences in each step."""

    about: str
    prefill_seconds_fixed: NotNegative
    prefill_seconds_per_token: Positive
    prefill_seconds_per_token_pair: NotNegative
    """Attention: for each token and each one before it."""
    transfer_seconds_per_token: NotNegative
    step_seconds_fixed: Positive
    """Reading the weights."""
    step_seconds_per_sequence: NotNegative
    step_seconds_per_context_token: NotNegative
    """Reading the KV."""
    max_sequences: Count
    """Of a decode pod."""
    max_kv_tokens: Count
    cost_per_hour: NotNegative
    """Of a pod, in any currency."""

    def prefill_seconds(self, num_tokens: int, num_cached: int) -> float:
        """Of a prompt of which `num_cached` tokens are not computed."""
        computed = num_tokens - num_cached
        each = self.prefill_seconds_per_token + self.prefill_seconds_per_token_pair * (num_cached + computed / 2)
        return self.prefill_seconds_fixed + computed * each

    def step_seconds(self, num_sequences: int, context_tokens: float) -> float:
        return (
            self.step_seconds_fixed
            + self.step_seconds_per_sequence * num_sequences
            + self.step_seconds_per_context_token * context_tokens
        )


def names() -> list[str]:
    """Of the profiles that come with kvrelay."""
    return sorted(entry.name.removesuffix(".json") for entry in _OWN.iterdir() if entry.name.endswith(".json"))


def read(name: str) -> Profile:
    """One that comes with kvrelay, or a file. Raises ValueError, OSError."""
    source = (_OWN / f"{name}.json").read_bytes() if name in names() else Path(name).read_bytes()
    try:
        return msgspec.json.decode(source, type=Profile)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{name} is no profile: {error}") from error
