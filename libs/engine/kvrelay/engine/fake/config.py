"""What a fake engine pretends to be."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Final

from kvrelay.common.blocks import SPAN
from kvrelay.common.errors import Internal
from kvrelay.common.ids import Fingerprint
from kvrelay.common.layout import KvDtype, KvGroup, KvGroupKind, KvLayout

FINGERPRINT: Final = Fingerprint("fake")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FakeConfig:
    """Sizes in tokens or blocks of `block_size` tokens, times in milliseconds."""

    model: str = "fake"
    fingerprint: Fingerprint = FINGERPRINT
    vocab_size: int = 1000
    eos_token_ids: tuple[int, ...] = (2,)
    max_model_len: int = 4096
    block_size: int = 16
    num_blocks: int = 4096
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    step_ms: float = 2.0
    natural_length: int = 64
    """A choice ends by itself (end of sequence) with this token, unless it is told to go on or is cut before."""
    ticket_timeout_ms: int = 30_000
    on_ticket_expiry: str = "recompute"
    host: str = "127.0.0.1"
    """Where pushes arrive."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_model_len", "num_blocks", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.block_size % SPAN:
            raise ValueError(f"block_size must be a multiple of {SPAN}, not {self.block_size}")

    @property
    def layout(self) -> KvLayout:
        group = KvGroup(
            kind=KvGroupKind.FULL,
            layers=(0, 1),
            block_size=self.block_size,
            dtype=KvDtype.FLOAT32,
            num_kv_heads=1,
            head_dim=8,
            shard_heads=1,
        )
        return KvLayout(fingerprint=self.fingerprint, groups=(group,))


def from_model(folder: Path, **options: object) -> FakeConfig:
    """The vocabulary, the ends of sequence and the length of a real model, so that its tokenizer fits. Raises Internal."""
    try:
        text = (folder / "config.json").read_bytes()
        config = json.loads(text)
        eos = config.get("eos_token_id")
        known = {
            "model": folder.resolve().name,
            "fingerprint": Fingerprint("fake-" + hashlib.sha256(text).hexdigest()[:16]),
            "vocab_size": int(config["vocab_size"]),
            "eos_token_ids": tuple(eos) if isinstance(eos, list) else (int(eos),) if eos is not None else (),
            "max_model_len": int(config["max_position_embeddings"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Internal(f"cannot read the model's config.json in {folder}: {error}") from error
    return FakeConfig(**{**known, **options})  # type: ignore[arg-type]
