"""What every call passes: its API key, the reading of its message, and what its errors become.

Messages are read here and not by gRPC, so that bytes which are no message end as InvalidRequest and not as the server's fault.
"""

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from prometheus_client import CollectorRegistry, Counter

from kvrelay.common.errors import BY_CODE, Cancelled, Internal, InvalidRequest, KvrelayError
from kvrelay.common.rpc import abort
from kvrelay.router.front import ApiKeys

logger = logging.getLogger(__name__)

OK: Final = "ok"

Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
M = TypeVar("M", bound=Message)
Unary: TypeAlias = Callable[[M, Context], Awaitable[Message]]
Stream: TypeAlias = Callable[[M, Context], AsyncGenerator[Message, None]]


class Calls:
    """Makes gRPC's handlers of methods that raise KvrelayErrors."""

    def __init__(self, keys: ApiKeys, registry: CollectorRegistry) -> None:
        self._keys = keys
        self._ended = Counter(
            "kvrelay_grpc_requests", "Calls that ended, by error code or ok", ["method", "code"], registry=registry
        )

    def unary(self, kind: type[M], method: Unary[M]) -> Handler:
        count = self._counter(method.__name__)

        async def serve(data: bytes, context: Context) -> bytes:
            async with _errors_end(context, count):
                self._check(context)
                return (await method(_read(kind, data), context)).SerializeToString()

        return grpc.unary_unary_rpc_method_handler(serve)

    def stream(self, kind: type[M], method: Stream[M]) -> Handler:
        """A cancelled call closes the method's generator."""
        count = self._counter(method.__name__)

        async def serve(data: bytes, context: Context) -> AsyncGenerator[bytes, None]:
            async with _errors_end(context, count):
                self._check(context)
                async with contextlib.aclosing(method(_read(kind, data), context)) as messages:
                    async for message in messages:
                        yield message.SerializeToString()

        return grpc.unary_stream_rpc_method_handler(serve)

    def _counter(self, method: str) -> Callable[[str], None]:
        """Counts a call's end, by what it is called with. Every code is there from the start."""
        counters = {code: self._ended.labels(method, code) for code in (OK, *BY_CODE)}
        return lambda code: counters[code].inc()

    def _check(self, context: Context) -> None:
        """Raises Unauthenticated."""
        given = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
        first = given[0] if given else b""
        self._keys.check(first.encode() if isinstance(first, str) else first)


def _read(kind: type[M], data: bytes) -> M:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"The message is no {kind.__name__}: {error}") from None


@contextlib.asynccontextmanager
async def _errors_end(context: Context, count: Callable[[str], None]) -> AsyncGenerator[None, None]:
    """Ends the call with the error that is raised within; of one that is not ours a client learns only that it happened."""
    code = Cancelled.code
    try:
        yield
        code = OK
    except KvrelayError as error:
        code = error.code
        await abort(context, error)
    except Exception:  # a fault of ours ends the one call, in words that tell nothing of the inside
        code = Internal.code
        logger.exception("A call failed")
        await abort(context, Internal("The server had an error while processing your request."))
    finally:
        count(code)
