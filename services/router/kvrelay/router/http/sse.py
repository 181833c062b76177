"""Server-sent events: one message a chunk, written as it comes."""

from typing import Final

import orjson
from starlette.types import Send

from kvrelay.common.errors import KvrelayError
from kvrelay.router.http.errors import error_body

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE: Final = b"data: [DONE]\n\n"


class EventStream:
    """Headers go out with the first event, so that an error before it still has its own status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def event(self, value: object) -> None:
        await self._write(b"data: %b\n\n" % orjson.dumps(value), more=True)

    async def done(self) -> None:
        await self._write(_DONE, more=False)

    async def failed(self, error: KvrelayError) -> None:
        """The end of a stream that began: an error event, and no [DONE]."""
        await self._write(b"data: %b\n\n" % orjson.dumps(error_body(error)), more=False)

    async def _write(self, data: bytes, *, more: bool) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
