"""Who may call: a shared token, TLS, and callers' certificates, each where it is configured."""

import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio

from kvrelay.common.errors import Internal, Unauthenticated
from kvrelay.common.rpc import abort

_OPEN = "/grpc.health.v1.Health/"
"""Orchestrators' probes carry no token."""

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[object, object]"]]


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without `authorization: Bearer TOKEN`."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[object, object]":
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        sent = given.encode() if isinstance(given, str) else bytes(given)
        if handler_call_details.method.startswith(_OPEN) or hmac.compare_digest(sent, self._wanted):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(request: object, context: "grpc.aio.ServicerContext[object, object]") -> None:
    await abort(context, Unauthenticated("the token is missing or wrong"))


def server_credentials(cert: Path, key: Path, ca: Path | None) -> grpc.ServerCredentials:
    """With `ca`, callers must show a certificate. Raises Internal where a file cannot be read."""
    try:
        pair = (key.read_bytes(), cert.read_bytes())
        roots = None if ca is None else ca.read_bytes()
    except OSError as error:
        raise Internal(f"cannot read {error.filename}: {error.strerror}") from error
    return grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=ca is not None)


def bind(server: grpc.aio.Server, address: str, cert: Path | None, key: Path | None, ca: Path | None) -> int:
    """Listens at the address, over TLS where there are a certificate and its key. The port. Raises Internal."""
    try:
        if cert is None or key is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, server_credentials(cert, key, ca))
    except RuntimeError as error:
        raise Internal(f"cannot listen on {address}: {error}") from error
