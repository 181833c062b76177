"""The offline engine in float32 gives what transformers gives, however it cuts its work up."""

from pathlib import Path

import pytest

from kvrelay.common.request import SamplingParams
from kvrelay.engine.llm import LLM, RequestOutput
from tests.exactness.reference import OUTPUT_TOKENS, Reference

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600, func_only=True)]

GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, logprobs=1)
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4


def run(llm: LLM, cases: dict[str, Reference]) -> dict[str, RequestOutput]:
    outputs = llm.generate([case.prompt for case in cases.values()], GREEDY)
    for (name, case), output in zip(cases.items(), outputs, strict=True):
        found = output.outputs[0]
        case.check(name, found.token_ids, [position.chosen.logprob for position in found.logprobs])
    return dict(zip(cases, outputs, strict=True))


def test_all_at_once_and_again_with_hits(model_dir: Path, cases: dict[str, Reference]) -> None:
    llm = LLM(model_dir, dtype="float32", max_num_seqs=16, kv_cache_bytes=1 << 30)
    run(llm, cases)
    for name, output in run(llm, cases).items():
        assert output.num_cached_tokens == (len(cases[name].prompt) - 1) // 16 * 16, name


@pytest.mark.parametrize(("chunk", "block_size"), [(48, 16), (37, 16), (64, 32), (61, 32)])
def test_chunks_and_blocks(model_dir: Path, short_cases: dict[str, Reference], chunk: int, block_size: int) -> None:
    """A chunk that divides the prompt and one that does not, one request at a time."""
    names = list(short_cases)[chunk % 3 :: 3]
    llm = LLM(
        model_dir,
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=chunk,
        block_size=block_size,
        prefix_caching=False,
        kv_cache_bytes=64 << 20,
    )
    for name in names:
        run(llm, {name: short_cases[name]})


def test_preemption(model_dir: Path, short_cases: dict[str, Reference]) -> None:
    long_ones = {name: case for name, case in short_cases.items() if len(case.prompt) >= 50}
    llm = LLM(model_dir, dtype="float32", max_num_seqs=16, kv_cache_bytes=30 * 16 * TOKEN_BYTES, max_model_len=400)
    run(llm, long_ones)
    assert llm.engine.stats().num_preemptions > 0
