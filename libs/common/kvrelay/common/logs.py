"""Logs, the same in every process: text to read, or JSON to search."""

import datetime
import json
import logging
import sys
from typing import Final, Literal

LogFormat = Literal["text", "json"]

_FORMAT: Final = "%(asctime)s.%(msecs)03d %(levelname)s {service} %(name)s: %(message)s"
_REQUEST: Final = ("request_id", "trace_id")


class JsonFormatter(logging.Formatter):
    """One object a record; what `about` has given it stands in fields of its own."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "timestamp": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name in _REQUEST if (value := getattr(record, name, ""))},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def about(request_id: str, trace_id: str = "") -> dict[str, str]:
    """`extra` of a log record: the request that it is about, by the id that pods know it by."""
    return {"request_id": request_id, "trace_id": trace_id}


def configure_logging(service: str, level: str, form: LogFormat = "text") -> None:
    """One line a record, on standard error, with the service's name."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(_FORMAT.format(service=service.replace("%", "%%")), "%Y-%m-%dT%H:%M:%S")
    handler.setFormatter(JsonFormatter(service) if form == "json" else text)
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def logging_variables() -> dict[str, str]:
    """For a process that this one starts, which is to log as this one does."""
    root = logging.getLogger()
    as_json = any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers)
    return {"KVRELAY_LOG_LEVEL": logging.getLevelName(root.level), "KVRELAY_LOG_FORMAT": "json" if as_json else "text"}
