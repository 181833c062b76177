"""The options of every kind of pod: where it listens, how it is found, who may call it."""

from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, SecretStr, model_validator

from kvrelay.common.access import token_option
from kvrelay.common.settings import ServiceSettings

Port = Annotated[int, Field(ge=0, le=65535)]
PORTS_PER_POD = 10


class ListenerSettings(ServiceSettings):
    """A gRPC and an HTTP port on one host. A kind of pod adds its first port and its own options."""

    base_port: ClassVar[int]

    host: str = "127.0.0.1"
    """Where to listen: 0.0.0.0 is all interfaces."""
    advertise_host: str | None = None
    """Under which others reach this pod; not set: the host that it listens on."""
    index: int = Field(default=0, ge=0, lt=PORTS_PER_POD)
    """Which pod of its kind on this host; decides the ports."""
    grpc_port: Port | None = None
    """Not set: by kind and index; 0: any free one."""
    http_port: Port | None = None
    """Not set: one above the gRPC port; 0: any free one."""

    auth_token: SecretStr | None = None
    """Callers must bring it as `authorization: Bearer TOKEN`."""
    auth_token_file: Path | None = None
    """A file with that token, in place of the token itself, which all users of the host could read in the command line."""
    tls_cert: Path | None = None
    """PEM file: this pod's certificate chain."""
    tls_key: Path | None = None
    """PEM file: its private key."""
    tls_ca: Path | None = None
    """PEM file: callers must show a certificate that this authority signed."""

    @model_validator(mode="after")
    def _can_be_secure(self) -> Self:
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
        return self.base_port + PORTS_PER_POD * self.index if self.grpc_port is None else self.grpc_port

    @property
    def listen_http(self) -> int:
        if self.http_port is not None:
            return self.http_port
        return self.listen_grpc + 1 if self.listen_grpc else 0
