"""Steps of mixed batches against one sequence alone, and what is sampled of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.common.errors import Internal
from kvrelay.engine import runner as runner_module
from kvrelay.engine.batch import NO_TOKEN, Batch, Scheduled
from kvrelay.engine.runner import padded
from tests.engine.tiny import VOCAB, Host, close, make, reference, tokens_of

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, make(folder, "llama", tie_word_embeddings=True)


@pytest.fixture
def host(llama: tuple[Path, Any]) -> Host:
    return Host(llama[0])


@pytest.fixture(params=[16, 32])
def sized(llama: tuple[Path, Any], request: pytest.FixtureRequest) -> Host:
    return Host(llama[0], block_size=request.param)


def test_mixed_lengths_decode_as_if_alone(sized: Host, llama: tuple[Path, Any]) -> None:
    lengths = [1, 2, 15, 16, 17, 33, 90, 250]
    texts = [tokens_of(length + 40, seed=length) for length in lengths]
    expected = [reference(llama[1], text) for text in texts]
    seqs = [sized.sequence(text[:length]) for text, length in zip(texts, lengths, strict=True)]
    single = [seq for seq in seqs if seq.num_prompt == 1]
    longer = [seq for seq in seqs if seq.num_prompt > 1]
    sized.step(*((seq, seq.num_to_compute) for seq in (*single, *longer)))
    for row, (length, logits) in enumerate(zip(lengths, expected, strict=True)):
        close(sized.sampler.logits[row], logits[length - 1])
    for offset in range(40):
        for seq, text, length in zip(seqs, texts, lengths, strict=True):
            seq.tokens.append(text[length + offset])
        sized.step(*((seq, 1) for seq in seqs))
        for row, (length, logits) in enumerate(zip(lengths, expected, strict=True)):
            close(sized.sampler.logits[row], logits[length + offset])


def test_decodes_and_chunks_in_one_step(sized: Host, llama: tuple[Path, Any]) -> None:
    text, prompt = tokens_of(80, seed=1), tokens_of(120, seed=2)
    expected = reference(llama[1], text)
    decoding, chunked = sized.sequence(text[:50]), sized.sequence(prompt)
    sized.step((decoding, 50))
    for position in range(50, 56):
        decoding.tokens.append(text[position])
        sized.step((decoding, 1), (chunked, 20))
        close(sized.sampler.logits[0], expected[position])
    close(sized.sampler.logits[1], reference(llama[1], prompt)[-1])


def test_only_parts_that_end_sample(host: Host, llama: tuple[Path, Any]) -> None:
    first, second = host.sequence(tokens_of(40)), host.sequence(tokens_of(30, seed=1))
    result = host.step((first, 20), (second, 30))
    assert result.tokens == [int(host.sampler.logits.argmax())]
    close(host.sampler.logits, reference(llama[1], second.tokens)[-1:])
    assert host.step((first, 10)).tokens == []
    assert len(host.step((first, 10)).tokens) == 1
    close(host.sampler.logits, reference(llama[1], first.tokens)[-1:])
    assert result.seconds > 0


def test_a_prefix_of_another_sequence(host: Host, llama: tuple[Path, Any]) -> None:
    text = tokens_of(100)
    first = host.sequence(text)
    host.prefill(first, 100)
    other = text[:64] + tokens_of(30, seed=5)
    sharing = host.sequence(other)
    sharing.blocks, sharing.num_computed = first.blocks[:4], 64
    close(host.prefill(sharing, 100), reference(llama[1], other)[-1])


def test_branches_share_one_row_and_go_apart_by_copy(host: Host, llama: tuple[Path, Any]) -> None:
    text = tokens_of(40)
    root = host.sequence(text, num_branches=3)
    result = host.step((root, 40))
    assert len(result.tokens) == 3
    close(host.sampler.logits, reference(llama[1], text)[-1].expand(3, VOCAB))
    branch = host.sequence(text, choice=1)
    branch.num_computed, branch.blocks = 40, [*root.blocks[:2], host.take_block()]
    root.num_branches = 1
    root.tokens.append(7)
    branch.tokens.append(9)
    copies = ((root.blocks[2], branch.blocks[2]),)
    assert len(host.step((root, 1), (branch, 1), copies=copies).tokens) == 2
    for row, token in enumerate((7, 9)):
        close(host.sampler.logits[row], reference(llama[1], [*text, token])[-1])


def test_a_replaced_block_is_seen(host: Host, llama: tuple[Path, Any]) -> None:
    """Copy-on-write changes the last block of a sequence that has a row already."""
    text = tokens_of(40)
    seq = host.sequence(text)
    host.step((seq, 40))
    old, seq.blocks[2], seq.num_tabled = seq.blocks[2], host.take_block(), 0
    seq.tokens.append(5)
    host.step((seq, 1), copies=((old, seq.blocks[2]),))
    close(host.sampler.logits[0], reference(llama[1], [*text, 5])[-1])


def test_preempted_and_computed_again(host: Host, llama: tuple[Path, Any]) -> None:
    text = tokens_of(90)
    seq = host.sequence(text)
    host.prefill(seq, 90)
    host.runner.forget(seq)
    assert seq.row == -1
    seq.blocks.clear()
    seq.num_computed = 0
    other = host.sequence(tokens_of(20, seed=9))
    host.step((other, 20))
    close(host.prefill(seq, 50), reference(llama[1], text)[-1])
    assert seq.row != other.row


def test_logits_that_are_not_finite_cost_their_row_only(host: Host) -> None:
    spoilt = host.sequence(tokens_of(40), repetition_penalty=1e-40)
    whole = host.sequence(tokens_of(30, seed=1))
    result = host.step((spoilt, 40), (whole, 30))
    assert result.tokens == [NO_TOKEN, int(host.sampler.logits[1].argmax())]


def test_rows_run_out(host: Host) -> None:
    seqs = [host.sequence([5]) for _ in range(host.config.max_num_seqs + 1)]
    host.step(*((seq, 1) for seq in seqs[:-1]))
    with pytest.raises(Internal, match="more than 12"):
        host.step((seqs[-1], 1))
    host.runner.forget(seqs[0])
    assert len(host.step((seqs[-1], 1)).tokens) == 1


def test_too_many_tokens(llama: tuple[Path, Any]) -> None:
    host = Host(llama[0], max_num_batched_tokens=32)
    seq = host.sequence(tokens_of(40))
    with pytest.raises(Internal, match="max_num_batched_tokens"):
        host.runner.execute(Batch(1, [Scheduled(seq, 0, 40, 1)], [], 40), lambda layer: None)


@pytest.mark.parametrize("chunk", [7, 60])
def test_prompt_logprobs(host: Host, llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(runner_module, "LOGIT_BYTES", 4 * VOCAB * 20)
    text = tokens_of(60)
    seq, silent = host.sequence(text, prompt_logprobs=2), host.sequence(tokens_of(12))
    found = []
    result = host.step((silent, 12), (seq, chunk))
    assert list(result.prompt_logprobs) == [seq]
    found += result.prompt_logprobs[seq]
    while seq.num_to_compute:
        found += host.step((seq, min(chunk, seq.num_to_compute))).prompt_logprobs.get(seq, [])
    logprobs = reference(llama[1], text).log_softmax(-1)
    assert len(found) == 59
    assert max(host.sampler.pieces) <= 20
    for position, entry in enumerate(found):
        assert entry.chosen.token_id == text[position + 1]
        assert entry.chosen.logprob == pytest.approx(logprobs[position, text[position + 1]].item(), abs=1e-4)
        assert entry.top[0].token_id == int(logprobs[position].argmax())


def test_no_prompt_logprobs_of_the_output(host: Host) -> None:
    seq = host.sequence(tokens_of(10), prompt_logprobs=0)
    result = host.step((seq, 10))
    assert len(result.prompt_logprobs[seq]) == 9
    seq.tokens.append(result.tokens[0])
    assert host.step((seq, 1)).prompt_logprobs == {}


def test_each_layer_is_told_when_its_kv_is_there(host: Host) -> None:
    seq = host.sequence(tokens_of(20))
    seq.blocks = [host.take_block(), host.take_block()]
    slots = torch.from_numpy(host.runner.kv.slots(seq.blocks, 0, 20))
    seen: list[tuple[int, bool]] = []

    def hook(layer: int) -> None:
        keys = host.runner.kv.data[:, :, :].flatten(2, 3)[:, :, slots].flatten(1).any(1)
        seen.append((layer, bool(keys[layer]) and not keys[layer + 1 :].any()))

    host.step((seq, 20), on_layer=hook)
    assert seen == [(0, True), (1, True), (2, True)]


def test_sizes_are_few() -> None:
    assert [padded(n) for n in (1, 2, 15, 16, 17, 32, 33, 200)] == [1, 2, 15, 16, 32, 32, 48, 208]
