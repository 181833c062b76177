"""The options of a KV store, its tiers among them: one list, the same in the YAML file, in a flag and in a variable."""

import re
import secrets
import socket
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import NoDecode

from kvrelay.common.access import read_token, token_option
from kvrelay.common.settings import ServiceSettings, Size, format_size

Port = Annotated[int, Field(ge=0, le=65535)]
PolicyName = Literal["lru", "arc"]
Encoding = Literal["exact", "zstd"]
BASE_PORT = 9300
PORTS_PER_STORE = 10
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


class KvStoreSettings(ServiceSettings):
    """A node's KV store: keeps KV blocks for later requests in memory, files and S3, for the pods of the node."""

    tiers: Tiers = (CpuTier(tier="cpu", bytes=512 << 20),)
    """A list in YAML, the nearest first: [{tier: cpu, bytes: 512MiB, policy: arc}, {tier: file, bytes: 2GiB, directory: DIR},
    {tier: s3, bytes: 10GiB, bucket: NAME, endpoint: URL}]."""

    host: str = "127.0.0.1"
    """Where to listen: 0.0.0.0 is all interfaces."""
    advertise_host: str | None = None
    """Under which other nodes reach this one; not set: the host that it listens on."""
    index: int = Field(default=0, ge=0, lt=PORTS_PER_STORE)
    """Which store of this host; decides the ports."""
    grpc_port: Port | None = None
    """Not set: by index; 0: any free one."""
    http_port: Port | None = None
    """Not set: one above the gRPC port; 0: any free one."""
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

    auth_token: SecretStr | None = None
    """Callers must bring it as `authorization: Bearer TOKEN`."""
    auth_token_file: Path | None = None
    """A file with that token, in place of the token itself, which all users of the host could read in the command line."""
    tls_cert: Path | None = None
    """PEM file: this store's certificate chain."""
    tls_key: Path | None = None
    """PEM file: its private key."""
    tls_ca: Path | None = None
    """PEM file: callers must show a certificate that this authority signed."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        token_option("auth-token", self.auth_token, self.auth_token_file)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("options --tls-cert and --tls-key go together")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("option --tls-ca needs --tls-cert and --tls-key")
        return self

    @cached_property
    def token(self) -> str:
        """Empty: callers need none. Raises ValueError where its file cannot be read."""
        return token_option("auth-token", self.auth_token, self.auth_token_file)

    @property
    def listen_grpc(self) -> int:
        return BASE_PORT + PORTS_PER_STORE * self.index if self.grpc_port is None else self.grpc_port

    @property
    def listen_http(self) -> int:
        if self.http_port is not None:
            return self.http_port
        return self.listen_grpc + 1 if self.listen_grpc else 0

    @cached_property
    def node(self) -> str:
        """The given id, or one that no other store of this host has."""
        place = str(self.listen_grpc) if self.listen_grpc else secrets.token_hex(4)
        return self.node_id or _UNFIT.sub("-", f"kvstore-{socket.gethostname()}-{place}")
