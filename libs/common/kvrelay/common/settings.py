"""One frozen settings class a service: flags, KVRELAY_* variables and a YAML file, the same names in all three.

Flags win over variables, variables over the file, the file over the default. An option that is unknown or out of range stops
the start: one line that names it, exit code 2.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, NoReturn, TypeVar

import yaml
from pydantic import BeforeValidator, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from kvrelay.common.logs import LogFormat

PREFIX: Final = "KVRELAY_"
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_SIZE: Final = 1 << 60
_UNITS: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
# Kubernetes sets these for each Service in the namespace, and ours may well be named kvrelay-router.
_SERVICE_LINK: Final = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT|SERVICE_PORT_\w+|PORT|PORT_\d+_(TCP|UDP)(_\w+)?)")

S = TypeVar("S", bound="ServiceSettings")


class BadOption(ValueError):
    """Why a service cannot start with the options that it was given; the message names the option."""


def parse_size(value: object) -> object:
    """Bytes of `512MiB`, `1GiB`, `4096`; anything but text passes, for pydantic to judge."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is no size: give bytes, or a number with KiB, MiB, GiB or TiB")
    size = float(match[1]) * _UNITS[match[2]]
    if size > MAX_SIZE:
        raise ValueError(f"{value[:40]!r} is over {MAX_SIZE >> 40} TiB")
    return int(size)


def format_size(size: int) -> str:
    """The shortest text that `parse_size` reads back."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


class _SizeOption:
    """Marks a field whose default is shown as a size."""


Size = Annotated[int, BeforeValidator(parse_size), _SizeOption()]
"""Bytes; text may have a unit."""
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A list; in flags and variables separated by commas."""
LogLevel = Literal["debug", "info", "warning", "error"]


class ServiceSettings(BaseSettings):
    """What every service has. The docstring of a field is its help text."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=PREFIX,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    cluster: str = Field(default="default", pattern=r"^[A-Za-z0-9._-]{1,63}$")
    """Name of the deployment: routers find the pods of their own cluster in Redis."""
    redis_url: str = Field(default="redis://127.0.0.1:6379/0", pattern=r"^(redis|rediss|unix)://")
    """Redis or Valkey; REDIS_URL is read where KVRELAY_REDIS_URL is not set."""
    log_level: LogLevel = "info"
    """What is logged, to standard error."""
    log_format: LogFormat = "text"
    """text, or json: one object a line, with the request's and the trace's id where one is concerned."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the constructor is given: `parse` has merged the sources."""
        return (init_settings,)


class TracedSettings(ServiceSettings):
    """What the services have that a request passes."""

    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://.+")
    """OpenTelemetry collector that takes traces by OTLP over HTTP: http://HOST:4318; not set: there are none."""


def load(kind: type[S], argv: Sequence[str] | None = None, prog: str | None = None) -> S:
    """The settings of this process. On a bad option, prints one line and exits with code 2."""
    name = prog or Path(sys.argv[0]).name
    try:
        return parse(kind, sys.argv[1:] if argv is None else argv, os.environ, name)
    except BadOption as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def parse(kind: type[S], argv: Sequence[str], environ: Mapping[str, str], prog: str) -> S:
    """Raises BadOption."""
    flags = vars(_parser(kind, prog).parse_args(list(argv)))
    config = flags.pop("config", None) or environ.get(f"{PREFIX}CONFIG")
    values = {**_from_file(kind, config), **_from_environ(kind, environ), **flags}
    try:
        return kind(**values)
    except ValidationError as error:
        raise BadOption(_first_fault(error)) from error


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    message = fault["msg"].removeprefix("Value error, ")
    if not fault["loc"]:
        return f"bad options: {message}"
    flag = "--" + str(fault["loc"][0]).replace("_", "-")
    if fault["type"] == "missing":
        return f"option {flag} is required"
    given = fault["input"]
    shown = isinstance(given, str | int | float) and fault["type"] != "value_error"
    return f"option {flag}: {message}" + (f", not {given!r}" if shown else "")


def _from_environ(kind: type[ServiceSettings], environ: Mapping[str, str]) -> dict[str, object]:
    for name in environ:
        option = name.removeprefix(PREFIX).lower()
        known = option in kind.model_fields or option == "config"
        if name.startswith(PREFIX) and not known and not _SERVICE_LINK.fullmatch(name):
            raise BadOption(f"variable {name} is no option of this service")
    source = EnvSettingsSource(kind)
    source.env_vars = {name.lower(): value for name, value in environ.items()}
    try:
        values: dict[str, object] = source()
    except SettingsError as error:
        raise BadOption(f"variables: {error}") from error
    if "redis_url" not in values and environ.get("REDIS_URL"):
        values["redis_url"] = environ["REDIS_URL"]
    return values


def _from_file(kind: type[ServiceSettings], config: str | None) -> dict[str, object]:
    if not config:
        return {}
    try:
        with open(config, "rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise BadOption(f"option --config: {config} is over {format_size(MAX_CONFIG_BYTES)}")
        content = yaml.safe_load(text) or {}
    except OSError as error:
        raise BadOption(f"option --config: {config}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise BadOption(f"option --config: {config} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise BadOption(f"option --config: {config} must hold one mapping of options")
    values = {str(name).replace("-", "_"): value for name, value in content.items()}
    for name in values:
        if name not in kind.model_fields:
            raise BadOption(f"{config}: {name} is no option of this service")
    return values


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadOption(message)


def _parser(kind: type[ServiceSettings], prog: str) -> _Parser:
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        description=kind.__doc__,
        epilog=f"Each option may also be a variable ({PREFIX}LOG_LEVEL) or a line of the YAML file (log_level: info).",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with options")
    for name, field in kind.model_fields.items():
        flag = "--" + name.replace("_", "-")
        text = " ".join(f"{field.description or ''} [{_shown_default(field)}]".split()).replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(flag, dest=name, metavar="VALUE", help=text)
    return parser


def _shown_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if any(isinstance(mark, _SizeOption) for mark in field.metadata) and isinstance(value, int):
        return format_size(value)
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "not set" if value is None else str(value)
