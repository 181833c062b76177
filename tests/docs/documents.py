"""README and docs/*.md, taken apart: fenced blocks, commands, the simple commands in them."""

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_ASSIGNED = re.compile(r"\w+=")
_ENDS = {"&&", "||", "|", ";", "&", "(", ")"}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str


@dataclass(frozen=True)
class Documented:
    """A command as it is printed, over as many lines as it has."""

    place: str
    text: str


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        name = str(page.relative_to(ROOT))
        found += [
            Block(name, text.count("\n", 0, match.start()) + 1, match[2], textwrap.dedent(match[3]))
            for match in _FENCE.finditer(text)
        ]
    return found


def documented() -> list[Documented]:
    found = []
    for block in blocks():
        if block.language == "sh":
            found += [Documented(f"{block.page}:{block.line}", command) for command in _split(block)]
    return found


def _split(block: Block) -> list[str]:
    """A command goes on while a quotation is open or a line ends in a backslash."""
    commands, parts = [], []
    for line in block.text.splitlines():
        parts.append(line)
        whole = "\n".join(parts)
        if line.endswith("\\") or not _is_closed(whole):
            continue
        if shlex.split(whole, comments=True):
            commands.append(whole)
        parts = []
    assert not parts, f"{block.page}:{block.line}: the last command has no end"
    return commands


def _is_closed(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def simple(command: str) -> list[list[str]]:
    """The words of each program that a command starts, without assignments, redirections and comments."""
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.wordchars += "$@%+^!:,{}[]"
    found: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word in _ENDS:
            found.append([])
        elif word in (">", ">>", "<", "2>"):
            next(words)
        elif not (_ASSIGNED.match(word) and not found[-1]):
            found[-1].append(word)
    return [words for words in found if words]
