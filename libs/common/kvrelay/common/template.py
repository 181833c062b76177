"""Chat templates: messages to text, as Hugging Face's templates expect it, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrelay.common.errors import InvalidRequest


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks the assistant's words for training: here, just its content."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template. `variables` (bos_token, …) are there beside the messages."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Raises ValueError if the template is not valid."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid: line {error.lineno}: {error.message}") from error
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Raises InvalidRequest, with what the template says, where it cannot render these messages."""
        if not messages:
            raise InvalidRequest("messages must not be empty", "messages")
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                **self._variables,
                messages=given,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}", "messages") from error
