"""What a PromQL expression asks for: metrics, and labels of them. Not a parser: enough for dashboards and rules of ours."""

import dataclasses
import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*") | (?P<range>\[[^\]]*\]) | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*) |
        (?P<number>[0-9][0-9.]*(?:e-?[0-9]+)?) | (?P<operator>=~|!~|!=|[^\s\w])""",
    re.VERBOSE,
)
_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "bool", "offset", "sum", "avg", "min", "max", "count", "topk", "bottomk", "quantile"}


@dataclasses.dataclass(frozen=True)
class Matcher:
    label: str
    operator: str
    value: str

    @property
    def wanted(self) -> list[str]:
        """Values that must exist for it to mean something."""
        return self.value.split("|") if self.operator == "=~" else [self.value] if self.operator == "=" else []


@dataclasses.dataclass(frozen=True)
class Query:
    metrics: dict[str, list[Matcher]]
    labels: set[str]
    """That results are grouped or joined by."""


def read(expression: str) -> Query:
    tokens = [(match.lastgroup or "", match[0]) for match in _TOKEN.finditer(expression)]
    query = Query({}, set())
    walk = iter(enumerate(tokens))
    for number, (kind, text) in walk:
        following = tokens[number + 1][1] if number + 1 < len(tokens) else ""
        if kind != "name":
            continue
        if text in _LISTS and following == "(":
            query.labels.update(name for name in _until(walk, ")") if name not in "(,")
        elif text not in _LISTS | _WORDS and following != "(":
            matchers = _matchers(list(_until(walk, "}"))) if following == "{" else []
            query.metrics.setdefault(text, []).extend(matchers)
    return query


def _until(walk: Iterator[tuple[int, tuple[str, str]]], end: str) -> Iterator[str]:
    for _, (_, text) in walk:
        if text == end:
            return
        yield text


def _matchers(tokens: list[str]) -> list[Matcher]:
    """Of what stands between braces, the opening one included."""
    words = [token for token in tokens if token not in "{,"]
    assert len(words) % 3 == 0, f"no matchers: {tokens}"
    return [Matcher(*words[at : at + 2], words[at + 2].strip('"')) for at in range(0, len(words), 3)]
