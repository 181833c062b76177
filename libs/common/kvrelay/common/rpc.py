"""Errors over gRPC: a `KvrelayError` becomes a rich status (google.rpc.Status), and the same error again at the caller's."""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import NoReturn, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from kvrelay.common.errors import (
    BY_CODE,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    KvrelayError,
    Overloaded,
    RequestTooLarge,
    Unauthenticated,
    Unavailable,
    status_of,
)

log = logging.getLogger(__name__)

DOMAIN = "kvrelay"
DETAILS_KEY = "grpc-status-details-bin"
MAX_ERROR_CHARS = 500
"""gRPC refuses trailing metadata of over 8 KiB, and a message stands in it twice, once percent-encoded."""

MAX_MESSAGE_BYTES = 64 << 20
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
"""Of both ends of every connection between our processes."""
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0))
"""A port that another process has is an error, not shared."""

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")

_WITHOUT_DETAILS: dict[grpc.StatusCode, type[KvrelayError]] = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
}


@dataclass(frozen=True, slots=True)
class RpcStatus:
    """What ends a call: code, message, and trailing metadata with the details."""

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, bytes], ...]


def to_status(error: KvrelayError) -> RpcStatus:
    """ErrorInfo with the error's code; the field, or the time after which to try again, where the error has one."""
    kind = status_of(error)
    code = grpc.StatusCode[kind.grpc]
    message = _shortened(error.message)
    info = error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN)
    details: list[AnyMessage] = []
    if isinstance(error, InvalidRequest) and error.param:
        param = _shortened(error.param)
        info.metadata["param"] = param
        violation = error_details_pb2.BadRequest.FieldViolation(field=param, description=message)
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, Overloaded):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        details.append(_packed(retry))
    status = status_pb2.Status(code=code.value[0], message=message, details=[_packed(info), *details])
    return RpcStatus(code, message, ((DETAILS_KEY, status.SerializeToString()),))


async def abort(context: "grpc.aio.ServicerContext[A, B]", error: KvrelayError) -> NoReturn:
    """Ends the call with the error."""
    status = to_status(error)
    await context.abort(status.code, status.details, status.metadata)


def from_rpc_error(error: grpc.aio.AioRpcError) -> KvrelayError:
    """The error that the other side raised; where it said none, what gRPC's own code means."""
    message = error.details() or error.code().name
    for entry in _details(error):
        info = error_details_pb2.ErrorInfo()
        if entry.Unpack(info) and info.domain == DOMAIN:
            return _restored(info, message, error)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in message:
        return RequestTooLarge(message)
    return _WITHOUT_DETAILS.get(error.code(), Internal)(message)


@contextlib.asynccontextmanager
async def answering(context: "grpc.aio.ServicerContext[A, B]") -> AsyncIterator[None]:
    """Around a handler's body: a KvrelayError ends the call as itself, anything else as Internal, and is logged."""
    try:
        yield
    except KvrelayError as error:
        await abort(context, error)
    except Exception:  # a fault of ours ends the one call; the server and its other calls go on
        log.exception("a handler failed")
        await abort(context, Internal("internal error"))


async def called(call: Awaitable[T]) -> T:
    """The answer of a unary call. Raises the KvrelayError that the other side, or gRPC, ended it with."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def _restored(info: error_details_pb2.ErrorInfo, message: str, error: grpc.aio.AioRpcError) -> KvrelayError:
    kind = BY_CODE.get(info.reason, Internal)
    if issubclass(kind, InvalidRequest):
        return kind(message, info.metadata.get("param"))
    if issubclass(kind, Overloaded):
        return kind(message, _retry_after(error))
    return kind(message)


def _retry_after(error: grpc.aio.AioRpcError) -> float:
    for entry in _details(error):
        retry = error_details_pb2.RetryInfo()
        if entry.Unpack(retry):
            return float(retry.retry_delay.ToNanoseconds()) / 1e9
    return 1.0


def _details(error: grpc.aio.AioRpcError) -> list[AnyMessage]:
    for value in cast(grpc.aio.Metadata, error.trailing_metadata()).get_all(DETAILS_KEY):
        try:
            return list(status_pb2.Status.FromString(cast(bytes, value)).details)
        except DecodeError:  # of some proxy: the code and the message are left
            return []
    return []


def _packed(
    message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _shortened(text: str) -> str:
    """Fit for a header: bounded, and encodable."""
    clean = text.encode("utf-8", "replace").decode()
    return clean if len(clean) <= MAX_ERROR_CHARS else clean[: MAX_ERROR_CHARS - 1] + "…"
