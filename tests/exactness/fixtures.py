"""Prompts as token ids, their references, and stacks of real pods."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrelay.cli.options import StackOptions
from kvrelay.cli.stack import Stack
from kvrelay.common.tokenizer import Tokenizer
from tests.exactness.prompts import PROMPTS, Prompt, stretch
from tests.exactness.reference import Reference, References
from tests.exactness.served import assert_whole

OVER_PREFILL_PODS = {"local-prefill-tokens": "0", "policy": "least_loaded"}
"""Of a router that has every prompt computed on a prefill pod, however short it is, and whatever of it a decode pod has."""


def token_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if prompt.chat:
        return tokenizer.chat([{"role": "user", "content": prompt.text}])
    ids = tokenizer.encode(prompt.text)
    return stretch(ids, prompt.repeat) if prompt.repeat > 1 else ids


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


@pytest.fixture(scope="session")
def references(model_dir: Path) -> References:
    return References(model_dir)


@pytest.fixture(scope="session")
def cases(tokenizer: Tokenizer, references: References) -> dict[str, Reference]:
    """By the prompt's name."""
    return {prompt.name: references.of(token_ids(tokenizer, prompt)) for prompt in PROMPTS}


@pytest.fixture(scope="session")
def short_cases(cases: dict[str, Reference]) -> dict[str, Reference]:
    return {name: case for name, case in cases.items() if len(case.prompt) <= 300}


@contextmanager
def running(model_dir: Path, run_dir: Path, **options: object) -> Iterator[Stack]:
    """A float32 stack on free ports; after its use every pod is whole."""
    engine = {"dtype": "float32", "kv-cache-bytes": "512MiB", "ticket-timeout-ms": "300000", "test-hooks": True}
    engine.update(options.pop("engine_options", {}))  # type: ignore[call-overload]
    chosen = StackOptions(model=model_dir, free_ports=True, engine_options=engine, **options)  # type: ignore[arg-type]
    with Stack(chosen, run_dir) as stack:
        try:
            yield stack
            assert_whole(stack.pods)
        except BaseException:  # whatever ends the test: the logs are gone with the folder
            print(stack.logs())
            raise
