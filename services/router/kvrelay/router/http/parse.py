"""Bytes of a request's body to its schema. What is wrong is said as OpenAI says it, with the field's name."""

import json
import math
import re
from typing import TypeVar

import msgspec

from kvrelay.common.errors import InvalidRequest

T = TypeVar("T")

MAX_NAME_CHARS = 200
"""Of a client's own words in a message."""
MAX_REASON_CHARS = 1000
"""Of what is wrong with a field, before it is taken apart."""
MAX_EXPLAINED_BYTES = 256 << 10
"""In a larger body that is no JSON the field is not looked for: that would hold up other requests' tokens."""
_AT = re.compile(r"^(.*?)(?: - at `(key` in `)?\$([^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*)`$", re.DOTALL)
_NOT_JSON = "The body of the request is not valid JSON."


def parse(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises InvalidRequest; `param` is the field's path, such as `messages[0].content`."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _mistyped(_without_middle(str(error))) from None
    except msgspec.DecodeError:
        raise _malformed(body) from None
    except RecursionError:
        raise InvalidRequest("The JSON body is nested too deeply.") from None


def _without_middle(message: str) -> str:
    """A client's word stands in the middle, however long; the field's path, of names that are known, is at the end."""
    if len(message) <= MAX_REASON_CHARS:
        return message
    return f"{message[: MAX_REASON_CHARS // 2]}…{message[-MAX_REASON_CHARS // 2 :]}"


def _mistyped(message: str) -> InvalidRequest:
    match = _AT.match(message)
    assert match is not None  # the expression matches every string
    what, in_key, path = match[1], match[2], (match[3] or "").removeprefix(".")
    if unknown := _UNKNOWN.match(what):
        name = unknown[1][:MAX_NAME_CHARS]
        within = f" in '{path}'" if path else ""
        return InvalidRequest(f"Unrecognized request argument supplied: {name}{within}", path or None)
    if missing := _MISSING.match(what):
        name = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"Missing required parameter: '{name}'.", name)
    if not path:
        return InvalidRequest(f"The JSON body is not an object: {what}.")
    path = path.removesuffix("[...]")
    kind = "Invalid key in" if in_key else "Invalid value for"
    return InvalidRequest(f"{kind} '{path}': {what[:MAX_NAME_CHARS]}.", path)


def _malformed(body: bytes) -> InvalidRequest:
    """Python's own parser reads some of what JSON forbids (NaN, Infinity, half surrogate pairs), so the field can be named."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return InvalidRequest(f"The body is not valid UTF-8: byte {error.start}.")
    if len(body) > MAX_EXPLAINED_BYTES:
        return InvalidRequest(_NOT_JSON)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return InvalidRequest(_NOT_JSON)
    if isinstance(value, dict):
        for name, field in value.items():
            if problem := _unfit(name) or _unfit(field):
                shown = name.encode("utf-8", "replace").decode()[:MAX_NAME_CHARS]
                return InvalidRequest(f"Invalid value for '{shown}': {problem}.", shown)
    return InvalidRequest(_NOT_JSON)


def _unfit(field: object) -> str:
    """What JSON does not allow somewhere inside the value; empty where all is well."""
    pending = [field]
    while pending:
        value = pending.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return "not a finite number"
        if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
            return "half of a surrogate pair"
        if isinstance(value, dict):
            pending.extend(value.keys())
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
    return ""
