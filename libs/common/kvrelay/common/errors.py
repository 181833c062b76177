"""The errors that cross a boundary, and the one table that says what each becomes in HTTP and in gRPC."""

from dataclasses import dataclass
from typing import ClassVar


class KvrelayError(Exception):
    """What went wrong, for the one who asked. `code` names the kind on every wire."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(KvrelayError):
    """The request itself is wrong. `param` names the field."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unsupported(InvalidRequest):
    """A known field asks for what is not supported."""

    code = "unsupported"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output do not fit the model. Clients know the code: it is OpenAI's."""

    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    code = "model_not_found"


class RequestTooLarge(InvalidRequest):
    code = "request_too_large"


class Unauthenticated(KvrelayError):
    code = "unauthenticated"


class Overloaded(KvrelayError):
    """There is no room. `retry_after_seconds` is an estimate."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class NoCapacity(Overloaded):
    """A pod has no free blocks or slots for this request now; another may."""

    code = "no_capacity"


class Unavailable(KvrelayError):
    """No living pod can do this, or the one that did is gone."""

    code = "unavailable"


class Draining(Unavailable):
    code = "draining"


class StaleEpoch(KvrelayError):
    """A message names a pod's former life, or a ticket's former generation."""

    code = "stale"


class IncompatibleLayout(KvrelayError):
    """Two ends whose KV cannot be converted into one another, and why."""

    code = "incompatible"


class TransferFailed(KvrelayError):
    code = "transfer_failed"


class DeadlineExceeded(KvrelayError):
    code = "deadline_exceeded"


class Cancelled(KvrelayError):
    code = "cancelled"


class Internal(KvrelayError):
    code = "internal"


@dataclass(frozen=True, slots=True)
class Status:
    http: int
    openai_type: str
    grpc: str  # the name of a grpc.StatusCode
    retryable: bool = False  # by the router, on another pod


STATUS: dict[type[KvrelayError], Status] = {
    InvalidRequest: Status(400, "invalid_request_error", "INVALID_ARGUMENT"),
    Unsupported: Status(400, "invalid_request_error", "INVALID_ARGUMENT"),
    ContextLengthExceeded: Status(400, "invalid_request_error", "INVALID_ARGUMENT"),
    ModelNotFound: Status(404, "invalid_request_error", "NOT_FOUND"),
    RequestTooLarge: Status(413, "invalid_request_error", "RESOURCE_EXHAUSTED"),
    Unauthenticated: Status(401, "invalid_request_error", "UNAUTHENTICATED"),
    Overloaded: Status(429, "rate_limit_error", "RESOURCE_EXHAUSTED"),
    NoCapacity: Status(429, "rate_limit_error", "RESOURCE_EXHAUSTED", retryable=True),
    Unavailable: Status(503, "server_error", "UNAVAILABLE", retryable=True),
    Draining: Status(503, "server_error", "UNAVAILABLE", retryable=True),
    StaleEpoch: Status(503, "server_error", "FAILED_PRECONDITION", retryable=True),
    IncompatibleLayout: Status(500, "server_error", "FAILED_PRECONDITION"),
    TransferFailed: Status(503, "server_error", "UNAVAILABLE", retryable=True),
    DeadlineExceeded: Status(504, "server_error", "DEADLINE_EXCEEDED"),
    Cancelled: Status(499, "server_error", "CANCELLED"),
    Internal: Status(500, "server_error", "INTERNAL"),
}

BY_CODE: dict[str, type[KvrelayError]] = {kind.code: kind for kind in STATUS}


def status_of(error: KvrelayError) -> Status:
    return STATUS.get(type(error), STATUS[Internal])


def error_from(code: str, message: str) -> KvrelayError:
    """The error of a code that came over a wire; an unknown one is internal."""
    return BY_CODE.get(code, Internal)(message)
