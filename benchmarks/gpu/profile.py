"""What the GPU does in steps, out of a profiler's trace."""

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from kvrelay.common.ids import RequestId
from kvrelay.common.request import EngineRequest, SamplingParams
from kvrelay.engine.llm import LLM

WARM_STEPS, STEPS = 8, 32
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def profile_steps(llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    """`idle` is the share of the time from the first to the last kernel of 32 steps in which no kernel runs."""
    params = SamplingParams(temperature=0.0, max_tokens=WARM_STEPS + 4 * STEPS, ignore_eos=True)
    ids = [RequestId(f"profiled-{i}") for i in range(len(prompts))]
    for request_id, prompt in zip(ids, prompts, strict=True):
        llm.engine.add(EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=params))
    decoding = 0
    while decoding < WARM_STEPS:
        decoding += len(llm.engine.step().deltas) == len(prompts)
    before = llm.engine.counts.host_seconds
    for _ in range(STEPS):
        llm.engine.step()
    host = (llm.engine.counts.host_seconds - before) / STEPS
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(STEPS):
            llm.engine.step()
        torch.cuda.synchronize()
    llm.engine.abort(ids)
    while llm.engine.has_work:
        llm.engine.step()
    return {"host_ms_a_step": host * 1e3, **_summary(trace, STEPS)}


def profile_prefill(llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    """All prompts to their first tokens, as one step."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate(prompts, params)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        llm.generate(prompts, params)
        torch.cuda.synchronize()
    return _summary(trace, 1)


def _summary(trace: profile, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = []
    by_kernel: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in ON_GPU:
            spans.append((event["ts"], event["ts"] + event["dur"], event["name"][:60]))
            by_kernel[event["name"]] += event["dur"]
    spans.sort()
    busy, end, before = 0.0, spans[0][0], ""
    gaps: list[tuple[float, str]] = []
    for start, stop, name in spans:
        if start > end:
            gaps.append((start - end, f"{before} to {name}"))
        busy += max(0.0, stop - max(start, end))
        if stop > end:
            end, before = stop, name
    whole = end - spans[0][0]
    return {
        "idle": 1 - busy / whole,
        "ms_a_step": whole / steps / 1e3,
        "kernels_a_step": len(spans) / steps,
        "longest_gaps_us": [(round(us, 1), where) for us, where in sorted(gaps, reverse=True)[:4]],
        "us_a_step": {name[:80]: round(us / steps, 1) for name, us in by_kernel.most_common(14)},
    }
