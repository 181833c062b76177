"""What two ends of a KV transfer must know of each other: shapes, types and shards. Pure data, no torch."""

import enum

import msgspec

from kvrelay.common.errors import IncompatibleLayout
from kvrelay.common.ids import Fingerprint


class KvDtype(enum.StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8_E4M3 = "float8_e4m3"

    @property
    def itemsize(self) -> int:
        return {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}[self.value]


class KvGroupKind(enum.StrEnum):
    FULL = "full"
    SLIDING = "sliding"
    MLA = "mla"
    STATE = "state"
    DRAFT = "draft"


class KvGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose KV has one shape. A token's row in one layer is K then V, each `shard_heads` × `head_dim`."""

    kind: KvGroupKind
    layers: tuple[int, ...]
    block_size: int
    dtype: KvDtype
    num_kv_heads: int
    head_dim: int
    sliding_window: int = 0
    first_head: int = 0
    shard_heads: int

    def __post_init__(self) -> None:
        if min(self.block_size, self.num_kv_heads, self.head_dim, self.shard_heads) < 1:
            raise ValueError("sizes of a KV group must be positive")
        if self.first_head < 0 or self.first_head + self.shard_heads > self.num_kv_heads:
            raise ValueError("the shard lies outside the heads")

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer, as stored."""
        return 2 * self.shard_heads * self.head_dim * self.dtype.itemsize


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    fingerprint: Fingerprint
    groups: tuple[KvGroup, ...]
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers, as stored."""
        return sum(group.token_bytes * len(group.layers) for group in self.groups)


def check_compatible(source: KvLayout, target: KvLayout) -> None:
    """Raises IncompatibleLayout, with the reason, unless KV of `source` can be converted into `target`'s.

    Block sizes and dtypes may differ. Shards may not, as long as no engine has more than one rank.
    """
    if source.fingerprint != target.fingerprint:
        raise IncompatibleLayout(f"another model: {source.fingerprint} here, {target.fingerprint} there")
    for name in ("tp_size", "pp_size", "tp_rank", "pp_rank"):
        if getattr(source, name) != getattr(target, name):
            raise IncompatibleLayout(f"{name} {getattr(source, name)} here, {getattr(target, name)} there")
    if len(source.groups) != len(target.groups):
        raise IncompatibleLayout(f"{len(source.groups)} KV groups here, {len(target.groups)} there")
    for a, b in zip(source.groups, target.groups, strict=True):
        for name in ("kind", "layers", "num_kv_heads", "head_dim", "sliding_window", "first_head", "shard_heads"):
            if getattr(a, name) != getattr(b, name):
                raise IncompatibleLayout(f"{name} {getattr(a, name)} here, {getattr(b, name)} there")


def wire_dtype(source: KvDtype, target: KvDtype) -> KvDtype:
    """What travels between two dtypes: the narrower, converted by the sender where that is the target's."""
    return source if source.itemsize <= target.itemsize else target
