"""A pair of ends over one Unix socket, between a pod's front process and its engine process: typed messages, in order."""

import asyncio
import socket
from typing import Generic, TypeVar

import msgspec

from kvrelay.engine.messages import MAX_MESSAGE_BYTES

Incoming = TypeVar("Incoming")


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel(Generic[Incoming]):
    """One end. Each message is a 4-byte little-endian length and its MessagePack."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[Incoming]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def open(cls, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Incoming]) -> "Channel[Incoming]":
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
        return cls(reader, writer, decoder)

    def send(self, message: msgspec.Struct) -> None:
        """Queues a message; the order of calls is the order of arrival. Raises ValueError over the size limit."""
        data = self._encoder.encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        self._writer.write(len(data).to_bytes(4, "little") + data)

    async def receive(self) -> Incoming:
        """The next message. Raises ChannelClosed when the other side is gone or sends what is no message."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "little")
            if size > MAX_MESSAGE_BYTES:
                raise ChannelClosed(f"a message of {size} bytes is over the limit")
            return self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChannelClosed("the other side is gone") from error
        except msgspec.DecodeError as error:
            raise ChannelClosed(f"not a message: {error}") from error

    async def drain(self) -> None:
        """Returns when what was queued is low enough for more. Raises ChannelClosed."""
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise ChannelClosed("the other side is gone") from error

    def close(self) -> None:
        self._writer.close()
