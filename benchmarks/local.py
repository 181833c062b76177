"""Subjects that run inside a process of their own: the offline `LLM`, and transformers' continuous batching.

python -m benchmarks.local llm|transformers workload.json measured.json
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.workload import Measured, Record, Workload, record_of

if TYPE_CHECKING:
    from transformers import ContinuousBatchingManager

    from kvrelay.common.request import SamplingParams
    from kvrelay.engine.llm import LLM

Prompt = tuple[int, ...]
PAGE_TOKENS = 256


def offline(workload: Workload) -> Measured:
    """All prompts at once, as many running as there are clients elsewhere. No time to first token: nothing streams."""
    from kvrelay.common.request import SamplingParams
    from kvrelay.engine.llm import LLM

    sampling = SamplingParams(
        temperature=0.0, max_tokens=workload.output_tokens, min_tokens=workload.output_tokens, ignore_eos=True
    )
    llm = LLM(
        workload.model,
        dtype=workload.dtype,
        threads=workload.threads,
        max_num_seqs=workload.clients,
        max_model_len=workload.longest,
    )
    _offline(llm, sampling, workload.warmup)
    return _offline(llm, sampling, workload.prompts)


def _offline(llm: "LLM", sampling: "SamplingParams", prompts: tuple[Prompt, ...]) -> Measured:
    started = time.perf_counter()
    answers = llm.generate(prompts, sampling)
    seconds = time.perf_counter() - started
    counts = [len(output.token_ids) for answer in answers for output in answer.outputs]
    records = tuple(Record(ttft=0.0, latency=seconds, gaps=(), tokens=count) for count in counts)
    return Measured(seconds=seconds, records=records)


def continuous(workload: Workload) -> Measured:
    """transformers' manager, which `generate_batch` wraps, fed as the clients would."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(workload.threads)
    model = AutoModelForCausalLM.from_pretrained(
        workload.model, dtype=getattr(torch, workload.dtype), attn_implementation="sdpa"
    )
    pages = workload.clients * (-(-workload.longest // PAGE_TOKENS) + 1)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS, num_blocks=pages, max_batch_tokens=2048, use_cuda_graph=False, allow_block_sharing=False
    )
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=workload.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, timeout=30
    ) as manager:
        _fed(manager, workload, workload.warmup)
        return _fed(manager, workload, workload.prompts)


def _fed(manager: "ContinuousBatchingManager", workload: Workload, prompts: tuple[Prompt, ...]) -> Measured:
    waiting = list(reversed(prompts))
    sent: dict[str, float] = {}
    records: list[Record] = []

    def send() -> None:
        name = manager.add_request(
            list(waiting.pop()), max_new_tokens=workload.output_tokens, record_timestamps=True, eos_token_id=-1
        )
        if name is None:
            raise RuntimeError("transformers takes no more requests")
        sent[name] = time.perf_counter()

    started = time.perf_counter()
    for _ in range(min(workload.clients, len(waiting))):
        send()
    while len(records) < len(prompts):
        output = manager.get_result(timeout=60)
        if output is None or output.error or output.timestamps is None:
            raise RuntimeError(f"transformers gave up: {output}")
        if not output.is_finished():
            continue
        if waiting:
            send()
        records.append(record_of(sent[output.request_id], output.timestamps, len(output.generated_tokens)))
    return Measured(seconds=time.perf_counter() - started, records=tuple(records))


SUBJECTS: dict[str, Callable[[Workload], Measured]] = {"llm": offline, "transformers": continuous}


def main() -> None:
    subject, asked, answer = sys.argv[1:]
    workload = msgspec.json.decode(Path(asked).read_bytes(), type=Workload)
    Path(answer).write_bytes(msgspec.json.encode(SUBJECTS[subject](workload)))


if __name__ == "__main__":
    main()
