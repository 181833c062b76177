"""The console over HTTP: its page for everyone, its data for those who may ask."""

from typing import Final

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvrelay.router.console.files import INDEX, PageFile, page_files
from kvrelay.router.console.state import Console
from kvrelay.router.http.asgi import send_bytes
from kvrelay.router.http.errors import Headers

_POLICY: Final = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing from elsewhere, nothing inline, and no text that becomes markup."""
_HEADERS: Final[Headers] = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]
_PRIVATE: Final[Headers] = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]


def console_routes(console: Console) -> list[Route]:
    page = page_files()
    return [
        Route("/console", Page(page[INDEX]), methods=["GET"]),
        Route("/console/", Moved(b"../console"), methods=["GET"]),
        Route("/console/api/state", State(console), methods=["GET"]),
        *(Route(f"/console/{name}", Page(file), methods=["GET"]) for name, file in page.items()),
    ]


class Page:
    def __init__(self, file: PageFile) -> None:
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, self._file.body, self._file.content_type, headers=_HEADERS)


class Moved:
    """To where the page's relative addresses are right."""

    def __init__(self, location: bytes) -> None:
        self._location = location

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, b"", b"text/plain", 308, [(b"location", self._location)])


class State:
    def __init__(self, console: Console) -> None:
        self._console = console

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, self._console.document(), b"application/json", headers=_PRIVATE)
