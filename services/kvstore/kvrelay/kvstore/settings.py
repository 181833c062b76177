"""The options of a KV store, its tiers among them: one list, the same in the YAML file, in a flag and in a variable."""

import re
import secrets
import socket
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import NoDecode

from kvrelay.common.access import read_token
from kvrelay.common.pod.settings import ListenerSettings
from kvrelay.common.settings import Size, format_size

PolicyName = Literal["lru", "arc"]
Encoding = Literal["exact", "zstd"]
MIN_MEMORY_BYTES = 4096
_UNFIT = re.compile(r"[^A-Za-z0-9._-]")


class TierSettings(BaseModel):
    """What every tier has."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    bytes: Size = Field(ge=1)
    """At most, at each moment."""
    policy: PolicyName = "arc"
    """Who leaves first when it is full."""

    def __str__(self) -> str:
        return f"{getattr(self, 'tier', '')} {format_size(self.bytes)} {self.policy}"


class CpuTier(TierSettings):
    """Memory that the node's pods share."""

    tier: Literal["cpu"]
    bytes: Size = Field(ge=MIN_MEMORY_BYTES)


class FileTier(TierSettings):
    """Files of one directory, which is this store's alone."""

    tier: Literal["file"]
    directory: Path
    encoding: Encoding = "exact"
    """zstd: compressed, without loss."""
    direct: bool | Literal["auto"] = "auto"
    """O_DIRECT; auto: where the filesystem takes it."""
    threads: int = Field(default=4, ge=1, le=256)
    timeout_seconds: float = Field(default=5.0, gt=0, le=600)
    """Of one call."""


class S3Tier(TierSettings):
    """Objects of a bucket, under `prefix` and the node's id. Without files of credentials, AWS_* variables or the machine's role."""

    tier: Literal["s3"]
    bucket: str = Field(pattern=r"^[A-Za-z0-9._-]{1,255}$")
    endpoint: str | None = None
    """As https://host:port; not set: Amazon's of the region."""
    region: str | None = None
    prefix: str = "kvrelay"
    encoding: Encoding = "exact"
    """zstd: compressed, without loss; other nodes do not read these objects then."""
    virtual_hosted: bool = False
    upload_checksum: Literal["SHA256", "CRC64NVME", "none"] = "SHA256"
    access_key_id_file: Path | None = None
    secret_access_key_file: Path | None = None
    session_token_file: Path | None = None
    concurrency: int = Field(default=16, ge=1, le=1024)
    timeout_seconds: float = Field(default=5.0, gt=0, le=600)
    """Of one call, with all its attempts."""
    multipart_bytes: Size = Field(default=8 << 20, ge=5 << 20)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.access_key_id_file is None) != (self.secret_access_key_file is None):
            raise ValueError("access_key_id_file and secret_access_key_file go together")
        for name in ("access_key_id", "secret_access_key", "session_token"):
            self.credential(name)
        return self

    def credential(self, name: str) -> str | None:
        """Raises ValueError where its file cannot be read."""
        file: Path | None = getattr(self, f"{name}_file")
        if file is None:
            return None
        try:
            return read_token(file)
        except ValueError as error:
            raise ValueError(f"{name}_file: {error}") from error


AnyTier = CpuTier | FileTier | S3Tier
KINDS: dict[str, type[AnyTier]] = {"cpu": CpuTier, "file": FileTier, "s3": S3Tier}
"""In the order in which they lie below one another."""


def parse_tiers(value: object) -> tuple[AnyTier, ...]:
    """Of the list, or of its YAML text. Raises ValueError, which names the entry and repeats nothing of its values."""
    if isinstance(value, str):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError("it is no YAML") from None
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("it must be a list of tiers, such as [{tier: cpu, bytes: 512MiB}]")
    found = tuple(_parse_tier(number, entry) for number, entry in enumerate(value, 1))
    names = [tier.tier for tier in found]
    if names[0] != "cpu" or names != sorted(set(names), key=list(KINDS).index):
        raise ValueError(
            f"the tiers are {', '.join(names)}: they must be of cpu, file, s3, in this order, each once, cpu first"
        )
    return found


def _parse_tier(number: int, entry: object) -> AnyTier:
    if isinstance(entry, TierSettings):
        return entry  # type: ignore[return-value]  # of one of the kinds
    if not isinstance(entry, dict):
        raise ValueError(f"entry {number} must be a mapping, such as {{tier: cpu, bytes: 512MiB}}")
    kind = entry.get("tier")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"entry {number}: tier must be one of {', '.join(KINDS)}")
    try:
        return KINDS[kind].model_validate(entry)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))[:60]
        raise ValueError(f"entry {number} ({kind}): {_said(where, fault)}") from None


def _said(where: str, fault: Any) -> str:
    """Without the value: it may be a secret."""
    if where in ("access_key_id", "secret_access_key", "session_token"):
        return f"{where} does not belong here: put it into a file, and name that as {where}_file"
    if fault["type"] == "extra_forbidden":
        return f"{where} is no option of it"
    if fault["type"] == "missing":
        return f"{where} is required"
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


Tiers = Annotated[tuple[AnyTier, ...], NoDecode, BeforeValidator(parse_tiers)]


class KvStoreSettings(ListenerSettings):
    """A node's KV store: keeps KV blocks for later requests in memory, files and S3, for the pods of the node."""

    base_port: ClassVar[int] = 9300

    tiers: Tiers = (CpuTier(tier="cpu", bytes=512 << 20),)
    """A list in YAML, the nearest first: [{tier: cpu, bytes: 512MiB, policy: arc}, {tier: file, bytes: 2GiB, directory: DIR},
    {tier: s3, bytes: 10GiB, bucket: NAME, endpoint: URL}]."""

    node_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")
    """The same after a restart, and no other node's. Not set: by host name and port."""
    grace_seconds: float = Field(default=10.0, ge=0, le=3600)
    """How long after SIGTERM pods may finish, and memory goes down into files or S3."""
    index_url: str | None = Field(default=None, pattern=r"^(redis|rediss|unix)://")
    """Redis or Valkey of the index; not set: redis_url."""
    index_sharded: bool = False
    """It is a Redis Cluster."""
    arena_directory: Path = Path("/dev/shm")
    """A memory file system, which the node's pods have as well."""

    peer_transport: Literal["auto", "ucx", "none"] = "auto"
    """How blocks come out of other nodes' memory; auto: by UCX where it is installed."""
    peer_timeout_seconds: float = Field(default=1.0, gt=0, le=60)
    """Within which another node sends something of what it was asked for, or is left alone for a while."""
    peer_tls_ca: Path | None = None
    """PEM file: who signs other stores' certificates; with it they are called with TLS and this store's certificate."""
    peer_tls_name: str = ""
    """The name in other stores' certificates, whatever the address that they are called by; not set: the host of that address."""

    @model_validator(mode="after")
    def _names_peers(self) -> Self:
        if self.peer_tls_name and self.peer_tls_ca is None:
            raise ValueError("option --peer-tls-name needs --peer-tls-ca")
        return self

    @cached_property
    def node(self) -> str:
        """The given id, or one that no other store of this host has."""
        place = str(self.listen_grpc) if self.listen_grpc else secrets.token_hex(4)
        return self.node_id or _UNFIT.sub("-", f"kvstore-{socket.gethostname()}-{place}")
