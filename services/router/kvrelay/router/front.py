"""What both fronts, HTTP and gRPC, share: their settings, their keys, and the same checks with the same words."""

import hmac
from collections.abc import Sequence
from typing import Protocol

from kvrelay.common.errors import InvalidRequest, Unauthenticated, Unsupported
from kvrelay.router.job import ChatMessage

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Chat templates know no `developer`: OpenAI's later name for the system's part."""
_UNSUPPORTED_ROLES = ("tool", "function")
MAX_REQUEST_ID_CHARS = 128


class FrontSettings(Protocol):
    """The part of the router's settings that the fronts read."""

    @property
    def api_keys(self) -> Sequence[str]:
        """Empty: everyone may ask."""
        ...

    @property
    def max_body_bytes(self) -> int: ...


class ApiKeys:
    """Compares in constant time, and with every key, so that an answer's time tells nothing."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, authorization: bytes) -> None:
        """Raises Unauthenticated unless the header's value is `Bearer` and a key."""
        if not self._keys:
            return
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not given:
            raise Unauthenticated(
                "You didn't provide an API key. Provide it in an Authorization header: Authorization: Bearer YOUR_KEY."
            )
        found = [hmac.compare_digest(key, given.strip()) for key in self._keys]
        if not any(found):
            raise Unauthenticated("Incorrect API key provided.")


def chat_message(role: str, content: str, name: str, index: int) -> ChatMessage:
    """Raises InvalidRequest for a role that no chat has, Unsupported for one of tools."""
    if role in _UNSUPPORTED_ROLES:
        raise Unsupported(f"Messages of role '{role}' are not supported.", f"messages[{index}].role")
    if role not in _ROLES:
        raise InvalidRequest(f"'{role[:100]}' is not a role.", f"messages[{index}].role")
    return ChatMessage(role=_ROLES[role], content=content, name=name)


def check_model(model: str) -> str:
    if not model:
        raise InvalidRequest("Missing required parameter: 'model'.", "model")
    return model


def check_request_id(request_id: str) -> str:
    """Raises InvalidRequest unless it is short and printable: it stands in headers and logs."""
    if len(request_id) > MAX_REQUEST_ID_CHARS or not (request_id.isascii() and request_id.isprintable()):
        raise InvalidRequest(f"request_id must be up to {MAX_REQUEST_ID_CHARS} printable characters", "request_id")
    return request_id


def shorter_timeout(*timeouts_ms: int | None) -> int | None:
    """Of several deadlines, the first to pass; None where there is none."""
    return min((timeout for timeout in timeouts_ms if timeout is not None), default=None)
