"""Random prompts that share prefixes as conversations do: begun alike, gone on from, cut anywhere, asked twice."""

import dataclasses
import random

from tests.exactness.reference import Reference, References

OUTPUT_TOKENS = 12
LONGEST = 420


@dataclasses.dataclass(frozen=True)
class Case:
    reference: Reference
    n: int = 1
    """Choices, all alike."""


class Conversations:
    """The same for the same seed."""

    def __init__(self, references: References, seed: int, vocab: int) -> None:
        self._rng = random.Random(seed)
        self._references = references
        self._vocab = vocab
        self._texts: list[tuple[int, ...]] = [self._new(length) for length in (16, 33, 90, 160, 250)]
        """What prompts begin with: system prompts at first, then prompts and their answers as well."""

    def _new(self, length: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(3, self._vocab) for _ in range(length))

    def next(self) -> Case:
        text = self._rng.choice(self._texts[-30:] + self._texts[:5])
        match self._rng.choice(("whole", "whole", "cut", "block", "again")):
            case "cut":  # inside a block, as a rule
                text = text[: self._rng.randrange(1, len(text) + 1)]
            case "block":
                text = text[: len(text) // 16 * 16]
            case "again":
                return self._case(text[:LONGEST])
        return self._case((text + self._new(self._rng.randrange(1, 60)))[-LONGEST:] if len(text) < LONGEST else text)

    def _case(self, prompt: tuple[int, ...]) -> Case:
        reference = self._references.of(prompt or self._new(5), OUTPUT_TOKENS)
        self._texts.append(reference.prompt + reference.tokens)
        return Case(reference, n=self._rng.choice((1, 1, 1, 2)))

    def take(self, count: int) -> list[Case]:
        return [self.next() for _ in range(count)]
