"""The offline engine on the bundled model: it says the same alone and in company, and ends where it is told to."""

from pathlib import Path

import pytest
import torch

from kvrelay.common.errors import Internal, InvalidRequest
from kvrelay.common.request import FinishReason, SamplingParams
from kvrelay.engine.batch import Batch, LayerHook, StepResult
from kvrelay.engine.llm import LLM

pytestmark = pytest.mark.integration

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "一二三四五",
    "Once upon a time there was a small town by the sea, and in that town there lived an old clockmaker who",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> LLM:
    torch.set_num_threads(1)
    return LLM(model_dir, kv_cache_bytes=64 << 20, max_num_seqs=8, max_num_batched_tokens=256)


@pytest.fixture(autouse=True)
def _whole(llm: LLM) -> None:
    """Before each test, and so after each other one, nothing is held."""
    inspection = llm.engine.inspect()
    assert inspection.violations == ()
    assert (inspection.num_requests, inspection.free_blocks) == (0, inspection.num_blocks)


def test_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    assert "Paris" in together[0].outputs[0].text
    for output in together:
        (choice,) = output.outputs
        assert choice.text == llm.tokenizer.decode(choice.token_ids)
        assert choice.finish_reason is FinishReason.LENGTH


def test_a_prefix_is_found_and_changes_nothing(llm: LLM) -> None:
    prompt = PROMPTS[3] * 3
    first, second = llm.generate([prompt], GREEDY)[0], llm.generate([prompt], GREEDY)[0]
    assert second.num_cached_tokens == (len(second.prompt_token_ids) - 1) // 16 * 16 > 0
    assert second.outputs == first.outputs


def test_a_small_pool_and_small_chunks_change_nothing(llm: LLM, model_dir: Path) -> None:
    """6 blocks for 4 sequences of up to 48 tokens: some are preempted."""
    token_bytes = 30 * 2 * 3 * 64 * 4
    small = LLM(
        model_dir, kv_cache_bytes=6 * 16 * token_bytes, max_num_seqs=4, max_num_batched_tokens=11, watermark=0.0
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    assert [o.outputs[0].token_ids for o in small.generate(PROMPTS, params)] == expected
    assert small.engine.stats().num_preemptions > 0


def test_seeded_choices(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=6)
    one = llm.generate([PROMPTS[0]], params)[0]
    many = llm.generate(PROMPTS, params)[0]
    assert one.outputs == many.outputs
    assert len({choice.token_ids for choice in one.outputs}) == 3
    assert [choice.index for choice in one.outputs] == [0, 1, 2]


def test_unseeded_requests_differ(llm: LLM) -> None:
    first, second = llm.generate([PROMPTS[0]] * 2, SamplingParams(max_tokens=16))
    assert first.outputs[0].token_ids != second.outputs[0].token_ids


def test_a_stop_string_ends_one_choice(llm: LLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, stop=("Paris",))
    (stopped,) = llm.generate([PROMPTS[0]], long)[0].outputs
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, "Paris")
    assert "Paris" not in stopped.text
    assert len(stopped.token_ids) < 20
    assert llm.tokenizer.decode(stopped.token_ids).startswith(stopped.text + "Paris")


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    output = llm.generate([PROMPTS[3]], params)[0]
    (choice,) = output.outputs
    assert [p.chosen.token_id for p in choice.logprobs] == list(choice.token_ids)
    assert all(p.chosen.rank == 1 and len(p.top) == 2 for p in choice.logprobs)
    assert [p.chosen.token_id for p in output.prompt_logprobs] == list(output.prompt_token_ids[1:])


def test_chat(llm: LLM) -> None:
    (output,) = llm.chat([[{"role": "user", "content": "Say hello."}]], SamplingParams(temperature=0.0, max_tokens=40))
    (choice,) = output.outputs
    assert output.prompt is not None
    assert "Say hello." in output.prompt
    assert choice.finish_reason is FinishReason.STOP
    assert "<|im_end|>" not in choice.text
    assert "ello" in choice.text


def test_token_ids_and_their_refusals(llm: LLM) -> None:
    text = llm.generate([PROMPTS[0]], GREEDY)[0]
    ids = llm.generate([list(text.prompt_token_ids)], [GREEDY])[0]
    assert ids.outputs == text.outputs
    assert ids.prompt is None
    for prompt, params, param in (
        ([10**6], GREEDY, "prompt"),
        ([], GREEDY, "prompt"),
        (list(range(9000)), GREEDY, "prompt"),
        ("a", SamplingParams(top_p=2.0), "top_p"),
        ("a", [GREEDY, GREEDY], "sampling"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            llm.generate([prompt], params)
        assert caught.value.param == param


def test_options_are_checked(model_dir: Path) -> None:
    with pytest.raises(TypeError, match="no_such_option"):
        LLM(model_dir, no_such_option=1)
    with pytest.raises(ValueError, match="block_size"):
        LLM(model_dir, block_size=17)


def test_a_step_that_fails_leaves_the_engine_whole(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: Batch, on_layer: LayerHook) -> StepResult:
        raise Internal("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", fail)
        with pytest.raises(Internal, match="out of luck"):
            llm.generate(PROMPTS, GREEDY)
    assert llm.engine.inspect().num_requests == 0
    assert llm.generate([PROMPTS[0]], GREEDY)[0].outputs[0].text
