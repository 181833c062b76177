"""The prompts that every path is held to: 1 to 4,000 tokens; prose, code, other scripts, emoji; raw text and chat."""

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class Prompt:
    name: str
    text: str
    chat: bool = False
    repeat: int = 1
    """How many tokens the text is stretched to; 1 leaves it as it is."""


PROSE = (
    "The harbour master counted the boats twice, because the fog had hidden three of them until noon. "
    "Nobody in the town believed that the lighthouse had ever been painted any colour but white. "
    "When the river froze, the children drew a map of the far bank and argued about its names. "
    "A letter arrived in spring, addressed to a street that had not existed for forty years. "
    "The clockmaker kept one clock wrong on purpose, so that visitors would ask about the time. "
)
CODE = """def merge(left, right):
    out = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            out.append(left[i]); i += 1
        else:
            out.append(right[j]); j += 1
    return out + left[i:] + right[j:]

class Account:
    def __init__(self, owner: str, balance: int = 0) -> None:
        self.owner, self.balance = owner, balance
"""
JSON = '{"id": 1047, "tags": ["blue", "north"], "ratio": 0.3125, "nested": {"ok": true, "none": null}}\n'
NUMBERS = "1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, "

RAW = [
    Prompt("one token", "The"),
    Prompt("one letter", "a"),
    Prompt("newline", "\n"),
    Prompt("space", " "),
    Prompt("two words", "Once upon"),
    Prompt("fact", "The capital of France is"),
    Prompt("list", "Three primary colours are:\n1."),
    Prompt("question", "Why is the sky blue?"),
    Prompt("story", "Once upon a time there was a small robot who"),
    Prompt("numbers", NUMBERS),
    Prompt("sum", "12 + 30 = 42\n7 + 8 = 15\n21 + 9 ="),
    Prompt("json", JSON * 3),
    Prompt("python", CODE),
    Prompt("c", "#include <stdio.h>\nint main(void) {\n  for (int i = 0; i < 10; i++)\n"),
    Prompt("sql", "SELECT name, COUNT(*) FROM orders WHERE total > 100 GROUP BY"),
    Prompt("html", "<ul>\n  <li>first</li>\n  <li>second</li>\n"),
    Prompt("shell", "$ ls -la\ntotal 16\n$ cat notes.txt\n"),
    Prompt("spaces", "tabs\tand    many      spaces \n\n\n and lines"),
    Prompt("german", "Der alte Mann ging jeden Morgen über die Brücke, um frische Brötchen zu"),
    Prompt("french", "Près de l'église, une fête où l'on dansait jusqu'à l'aube a"),
    Prompt("russian", "Однажды весной, в час небывало жаркого заката,"),
    Prompt("chinese", "春天来了,花园里的花都开了。孩子们在"),
    Prompt("japanese", "昔々、あるところに、おじいさんとおばあさんが"),
    Prompt("korean", "옛날 옛적에 작은 마을에 한 소년이"),
    Prompt("arabic", "في قديم الزمان كان هناك ملك عادل"),
    Prompt("hindi", "एक समय की बात है, एक गाँव में"),
    Prompt("greek", "Μια φορά κι έναν καιρό ήταν ένας"),
    Prompt("emoji", "Weather today: ☀️🌧️⛈️ and my mood: 😀😢🤖👩‍👩‍👧‍👦"),
    Prompt("mixed", "Hello 世界! Привет, мир! 👋 ¿Cómo estás? résumé naïve Ω≈ç√∫"),
    Prompt("15 tokens", PROSE, repeat=15),
    Prompt("16 tokens", PROSE, repeat=16),
    Prompt("17 tokens", PROSE, repeat=17),
    Prompt("64 tokens", PROSE + CODE, repeat=64),
    Prompt("100 tokens", CODE + PROSE, repeat=100),
    Prompt("255 tokens", PROSE + JSON, repeat=255),
    Prompt("257 tokens", JSON + PROSE, repeat=257),
    Prompt("512 tokens", PROSE + CODE + JSON, repeat=512),
    Prompt("700 tokens", CODE + JSON + NUMBERS + PROSE, repeat=700),
    Prompt("1,500 tokens", PROSE + NUMBERS + CODE, repeat=1500),
    Prompt("4,000 tokens", PROSE + CODE + JSON + NUMBERS, repeat=4000),
]

CHATS = [
    Prompt("chat capital", "What is the capital of Italy?", chat=True),
    Prompt("chat haiku", "Write a haiku about autumn rain.", chat=True),
    Prompt("chat code", "Explain this code:\n" + CODE, chat=True),
    Prompt("chat spanish", "¿Qué tiempo hace en Madrid en julio?", chat=True),
    Prompt("chat emoji", "Answer with emoji only: how are you? 😀", chat=True),
    Prompt("chat empty-ish", ".", chat=True),
    Prompt("chat long", "Summarize:\n" + PROSE * 4, chat=True),
    Prompt("chat list", "List five fruits.", chat=True),
]

PROMPTS = RAW + CHATS


def stretch(ids: list[int], length: int) -> list[int]:
    """`length` token ids: `ids` over and over."""
    return list(itertools.islice(itertools.cycle(ids), length))
