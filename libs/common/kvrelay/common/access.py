"""How our own processes call pods: with a shared token, over TLS, with a certificate, each where it is configured."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from pydantic import SecretStr

from kvrelay.common.errors import Internal

MAX_TOKEN_CHARS: Final = 4096
Metadata = tuple[tuple[str, str], ...]


def bearer(token: str) -> Metadata:
    """What a call carries; nothing where the token is empty."""
    return (("authorization", f"Bearer {token}"),) if token else ()


def read_token(file: Path) -> str:
    """The one token in the file, without the space around it. Raises ValueError."""
    try:
        with file.open(encoding="utf-8") as opened:
            return check_token(opened.read(MAX_TOKEN_CHARS + 2).strip())
    except (OSError, ValueError) as error:  # a file that is no text has its own ValueError
        raise ValueError(f"{file}: {getattr(error, 'strerror', None) or error}") from error


def check_token(token: str) -> str:
    """Raises ValueError for what no header can carry."""
    if not 0 < len(token) <= MAX_TOKEN_CHARS or not (token.isascii() and token.isprintable()):
        raise ValueError(f"a token has 1 to {MAX_TOKEN_CHARS} printable ASCII characters")
    return token


def token_option(option: str, given: SecretStr | None, file: Path | None) -> str:
    """Of `--OPTION` and `--OPTION-file`, the one that is set; empty where none is. Raises ValueError, which names the option."""
    if given is not None and file is not None:
        raise ValueError(f"options --{option} and --{option}-file exclude each other")
    try:
        if file is not None:
            option = f"{option}-file"
            return read_token(file)
        return "" if given is None else check_token(given.get_secret_value())
    except ValueError as error:
        raise ValueError(f"option --{option}: {error}") from error


@dataclass(frozen=True, slots=True)
class PodAccess:
    """`metadata` goes with each call; `credentials` None: no TLS. `name` is what certificates must be for; empty: the address's host."""

    metadata: Metadata = ()
    credentials: grpc.ChannelCredentials | None = None
    name: str = ""

    @classmethod
    def load(cls, token: str, *, ca: Path | None, cert: Path | None, key: Path | None, name: str = "") -> "PodAccess":
        """TLS where `ca` is given: who signs the pods' certificates. `cert` and `key` are the caller's own.

        Raises Internal where a file cannot be read.
        """
        if ca is None:
            return cls(bearer(token))
        try:
            chain = None if cert is None else cert.read_bytes()
            private = None if key is None else key.read_bytes()
            return cls(bearer(token), grpc.ssl_channel_credentials(ca.read_bytes(), private, chain), name)
        except OSError as error:
            raise Internal(f"cannot read {error.filename}: {error.strerror}") from error

    def channel(self, address: str, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
        if self.credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self.credentials, options=(*options, *self._named))

    def blocking_channel(self, address: str, options: Sequence[tuple[str, int]]) -> grpc.Channel:
        if self.credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self.credentials, options=(*options, *self._named))

    @property
    def _named(self) -> tuple[tuple[str, str], ...]:
        return (("grpc.ssl_target_name_override", self.name),) if self.name else ()
