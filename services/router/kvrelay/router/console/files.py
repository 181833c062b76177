"""The page's files, as they lie in `page/`, read once: nothing else can be asked for."""

from importlib.resources import files
from typing import Final

import msgspec

INDEX: Final = "index.html"
_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}


class PageFile(msgspec.Struct, frozen=True):
    body: bytes
    content_type: bytes


def page_files() -> dict[str, PageFile]:
    """By name."""
    folder = files(__package__) / "page"
    return {
        entry.name: PageFile(entry.read_bytes(), content_type)
        for entry in folder.iterdir()
        for ending, content_type in _TYPES.items()
        if entry.name.endswith(ending)
    }
