"""Errors in OpenAI's shape."""

import math

from kvrelay.common.errors import (
    InvalidRequest,
    KvrelayError,
    Overloaded,
    Unauthenticated,
    status_of,
)

Headers = list[tuple[bytes, bytes]]

_OPENAI_CODES = {"invalid_request": None, "overloaded": "rate_limit_exceeded", "unauthenticated": "invalid_api_key"}
"""OpenAI's code, or none, where it has one of its own for a kind of error."""


def error_body(error: KvrelayError) -> dict[str, object]:
    param = error.param if isinstance(error, InvalidRequest) else None
    return {
        "error": {
            "message": error.message,
            "type": status_of(error).openai_type,
            "param": param,
            "code": _OPENAI_CODES.get(error.code, error.code),
        }
    }


def error_headers(error: KvrelayError) -> Headers:
    if isinstance(error, Overloaded):
        return [(b"retry-after", str(max(1, math.ceil(error.retry_after_seconds))).encode())]
    if isinstance(error, Unauthenticated):
        return [(b"www-authenticate", b"Bearer")]
    return []
