"""What the documentation quotes is said by the code: error texts, log lines and metrics."""

import ast
import functools
import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.docs.conftest import Bench
from tests.docs.documents import PAGES, ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = ("services", "libs", "kernels")
VALUE = "\0"
"""In the place of what a text is filled with."""
NOT_OURS = ("unrecognized arguments",)
"""Said by argparse."""
_STANDS_FOR = re.compile(r"'?\b(?:N|NAMES?|MODEL|DIR|PLACE|REASON)\b'?")
NOT_EXPORTED = {"vllm:lora_requests_info"}
"""docs/kubernetes.md says so of it."""


@functools.cache
def said() -> str:
    """Every text in the code, a line each."""
    found = []
    for source in SOURCES:
        for path in (ROOT / source).rglob("*.py"):
            if "kvrelay/v1" not in str(path):
                found += [_text(node) for node in ast.walk(ast.parse(path.read_text())) if _is_text(node)]
    return "\n".join(text.replace("\n", " ") for text in found)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.Constant):
        return re.sub(r"%[sdgr]", VALUE, str(node.value))
    return VALUE


def is_said(quoted: str) -> bool:
    parts = [re.escape(part) for part in _STANDS_FOR.split(quoted)]
    return re.search(f"'?{VALUE}'?".join(parts), said()) is not None


def quotations() -> list[str]:
    """Of the tables' first and last columns: what is in backticks and has a space in it, and is neither an option nor a field."""
    found = []
    for row in re.findall(r"^\| (.*) \|$", PAGE, re.MULTILINE):
        columns = row.split(" | ")
        for column in (columns[0], columns[-1]):
            found += [text for text in re.findall(r"`([^`]+)`", column) if re.search(r"[a-z] [a-z]|[A-Z] [a-z]", text)]
    return [text for text in found if not text.startswith(("-", "kvrelay ", "make ", "hf "))]


@pytest.mark.unit
@pytest.mark.parametrize("quoted", quotations())
def test_what_is_quoted_is_said(quoted: str) -> None:
    assert quoted in NOT_OURS or is_said(quoted)


@pytest.mark.unit
def test_a_quotation_of_nothing_is_found() -> None:
    assert len(quotations()) > 40
    assert is_said("the queue is full")
    assert not is_said("the queue is rather full")
    assert not is_said("port N, for NAME, is taken")


@pytest.mark.e2e
def test_metrics_of_all_pages_are_exported(bench: Bench) -> None:
    stack = bench.stack
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 2}
    httpx.post(f"{stack.url}/v1/completions", json=body, verify=False).raise_for_status()
    exported = set()
    for node in (stack.router, *stack.pods, *stack.kvstores):
        text = httpx.get(f"{node.http_address}/metrics", verify=False).text
        for family in text_string_to_metric_families(text):
            exported |= {family.name, *(sample.name for sample in family.samples)}
    named = {name for page in PAGES for name in re.findall(r"`((?:kvrelay_|vllm:)[a-z_]+)[`{]", page.read_text())}
    assert len(named) > 20
    assert named - exported == NOT_EXPORTED
