"""The pages for users of the API and for contributors name what there is: fields, errors, limits, files, classes."""

import functools
import re

import msgspec
import pytest

from kvrelay.common import errors, request
from kvrelay.router import prepare
from kvrelay.router.front import MAX_REQUEST_ID_CHARS
from kvrelay.router.http import schemas
from kvrelay.router.http.completions import MAX_PROMPTS
from kvrelay.router.http.errors import error_body
from kvrelay.router.http.refusals import CHAT, COMPLETION, MESSAGE
from kvrelay.router.http.schemas import ChatBody, CompletionBody
from tests.docs.documents import ROOT

pytestmark = pytest.mark.unit

API = (ROOT / "docs" / "api.md").read_text()
CONTRIBUTING = (ROOT / "docs" / "contributing.md").read_text()
NOT_HERE = {"seed_oss.py", "relu.py", "relu_gate", "WORKERS", "config.json"}
"""What a contributor adds in the recipes, what make takes, and a file of models."""


def section(title: str) -> str:
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", API, re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1]


def quoted(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def test_every_field_is_described() -> None:
    bodies = (
        schemas.CompletionBody,
        schemas.ChatBody,
        schemas.Message,
        schemas.ContentPart,
        schemas.StreamOptions,
        schemas.TokenizeBody,
        schemas.DetokenizeBody,
    )
    fields = {field for body in bodies for field in body.__struct_fields__}
    fields -= {"tokens", "text", "type"}  # in the examples, as JSON
    assert fields - quoted(API) == set()


def test_what_is_refused_and_what_asks_for_nothing() -> None:
    refused = section("What is refused")
    for name, values in {**COMPLETION, **CHAT}.items():
        assert f"`{name}`" in refused
        for value in values:
            shown = msgspec.json.format(msgspec.json.encode(value), indent=0).decode().replace(",", ", ")
            assert re.search(rf"`{name}`[^(|]*\([^)]*`{re.escape(shown)}`", refused), (name, shown)
    assert set(MESSAGE) - quoted(refused) <= {"audio"}


def test_defaults_are_the_codes() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section("Fields of both"), re.MULTILINE))
    defaults = msgspec.structs.asdict(request.SamplingParams())
    for name, shown in rows.items():
        default = defaults.get(name)
        if isinstance(default, bool):
            assert shown == str(default).lower(), name
        elif isinstance(default, int | float) and name != "n":
            assert float(shown.partition(";")[0]) == default, name
    assert rows["max_tokens"].startswith(str(msgspec.convert({"prompt": ""}, CompletionBody).max_tokens))
    assert msgspec.convert({"messages": []}, ChatBody).max_tokens is None


def test_limits() -> None:
    for name, limit in (
        ("n", request.MAX_CHOICES),
        ("stop", request.MAX_STOP_STRINGS),
        ("stop", request.MAX_STOP_BYTES),
        ("stop_token_ids", request.MAX_STOP_TOKENS),
        ("logit_bias", request.MAX_LOGIT_BIAS),
        ("prompt_logprobs", request.MAX_LOGPROBS),
        ("cache_salt", prepare.MAX_SALT_CHARS),
        ("request_id", MAX_REQUEST_ID_CHARS),
        ("prompt", MAX_PROMPTS),
    ):
        [row] = re.findall(rf"^\| `{name}` \|.*$", API, re.MULTILINE)
        assert re.search(rf"\b{limit}\b", row), (name, limit)


def test_every_error_is_in_the_table() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| ([^|]+) \|", section("Errors"), re.MULTILINE)
    for kind, status in errors.STATUS.items():
        shown = error_body(kind("why"))["error"]
        assert isinstance(shown, dict)
        code = "null" if shown["code"] is None else f"`{shown['code']}`"
        assert any(
            (int(number), name) == (status.http, status.openai_type) and code in codes.split(", ")
            for number, name, codes in ((number, name, codes.strip()) for number, name, codes in rows)
        ), kind.__name__


@functools.cache
def sources() -> dict[str, str]:
    """By path."""
    suffixes = {".py", ".proto", ".json", ".yaml", ".toml"}
    folders = ("services", "libs", "kernels", "proto", "deploy", "tests", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    return {str(path.relative_to(ROOT)): path.read_text() for path in (*files, ROOT / "pyproject.toml")}


def test_files_and_names_of_the_recipes_are_there() -> None:
    prose = re.sub(r"^ *```.*?^ *```$", "", CONTRIBUTING, flags=re.MULTILINE | re.DOTALL)
    words = {word for text in quoted(prose) for word in re.findall(r"[\w./]+", text)}
    code = set(re.findall(r"\w+", "\n".join(sources().values())))
    missing = [word for word in words - NOT_HERE if "NAME" not in word and not is_there(word, code)]
    assert missing == []


def is_there(word: str, code: set[str]) -> bool:
    """A file by the end of its path, a folder, or a word of the code."""
    name = word.rpartition("/")[2]
    if re.fullmatch(r"[\w/]+\.(py|proto|json|yaml|toml)", word):
        return name in NOT_HERE or any(f"/{path}".endswith(f"/{word}") for path in sources())
    if "/" in word:
        return (ROOT / word).exists()
    return word in code or not re.fullmatch(r"[A-Za-z_]\w*", word)
