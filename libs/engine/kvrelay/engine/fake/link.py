"""How a fake's push reaches another fake, in whatever process: one small message over TCP, and its answer."""

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable

import msgspec

from kvrelay.common import net
from kvrelay.common.errors import KvrelayError, TransferFailed, error_from
from kvrelay.common.ids import Epoch, RequestId
from kvrelay.common.request import ChoiceDelta

log = logging.getLogger(__name__)

MAX_BYTES = 4 << 20
PUSH_SECONDS = 10.0
_LENGTH = struct.Struct("<I")


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """Stands for a whole push: the ticket that it uses, the bytes that it pretends to be, and the first tokens."""

    request_id: RequestId
    epoch: Epoch
    attempt: int
    generation: int
    ticket_bits: int
    payload_bytes: int
    deltas: tuple[ChoiceDelta, ...]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    code: str = ""
    message: str = ""


async def _read(reader: asyncio.StreamReader) -> bytes:
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > MAX_BYTES:
        raise TransferFailed(f"a message of {size} bytes, over the limit of {MAX_BYTES}")
    return await reader.readexactly(size)


def _write(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    writer.write(_LENGTH.pack(len(data)) + data)


class Receiver:
    """The decode side. `take` is called with each arrival, and raises what its sender shall be told."""

    def __init__(self, host: str, take: Callable[[Arrival], None]) -> None:
        self._host = host
        self._take = take
        self._server: asyncio.Server | None = None
        self.address = b""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        self.address = net.join(self._host, self._server.sockets[0].getsockname()[1]).encode()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PUSH_SECONDS):
                arrival = msgspec.msgpack.decode(await _read(reader), type=Arrival)
            try:
                self._take(arrival)
                answer = Answer()
            except KvrelayError as error:
                answer = Answer(code=error.code, message=error.message)
            _write(writer, answer)
            await writer.drain()
        except (OSError, EOFError, TimeoutError, TransferFailed, msgspec.MsgspecError) as error:
            log.warning("a push that cannot be read: %s", error)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def push(address: bytes, arrival: Arrival) -> None:
    """Returns when the other side has taken it. Raises what that side answered, or TransferFailed."""
    try:
        host, port = net.split(address.decode())
        async with asyncio.timeout(PUSH_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                _write(writer, arrival)
                answer = msgspec.msgpack.decode(await _read(reader), type=Answer)
            finally:
                writer.close()
    except (OSError, EOFError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
        raise TransferFailed(f"the push to {address!r} failed: {error or type(error).__name__}") from error
    if answer.code:
        raise error_from(answer.code, answer.message)
