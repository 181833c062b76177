"""Whether the engine on a GPU computes what transformers does, and says what it says on a CPU.

`logits`: a random model of a shape, in bfloat16. Both engines are compared with transformers in float32; what rounding costs
transformers' own bfloat16 bounds what it may cost this one. `texts`: greedy tokens in float32, equal to those of a file that
`write_texts` made on a CPU.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu.shapes import write_model
from kvrelay.common.ids import RequestId
from kvrelay.common.request import EngineRequest, SamplingParams
from kvrelay.engine.llm import LLM
from kvrelay.engine.loader.dummy import open_dummy

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a small town by the sea, and in that town there lived an old clockmaker who",
    "Water boils at a temperature of",
    "1, 2, 3, 5, 8, 13,",
    "The three laws of thermodynamics are as follows. First,",
    "Q: What is the difference between a list and a tuple in Python?\nA:",
    "In the year 1969,",
]
NUM_TOKENS = 48


def logits(folder: Path, shape: str, lengths: tuple[int, ...], **changes: Any) -> dict[str, Any]:
    """The relative error ‖logits - float32's‖ / ‖float32's‖ of the prompts' last positions, over all prompts.

    Raises AssertionError where ours is over 1.5 times that of transformers in bfloat16, or not finite.
    """
    write_model(folder, shape, **changes)
    llm = LLM(
        folder,
        device="cuda",
        load_format="dummy",
        max_model_len=max(lengths) + 64,
        max_num_batched_tokens=2048,
        kv_cache_bytes=4 << 30,
        prefix_caching=False,
    )
    generator = torch.Generator().manual_seed(1)
    vocab = llm.engine.runner._vocab_size  # type: ignore[attr-defined]
    prompts = [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]
    ours = _last_logits(llm, prompts)
    wide, half = (_reference(folder, dtype, prompts) for dtype in (torch.float32, torch.bfloat16))
    error, bound = _error(ours, wide), _error(half, wide)
    assert error <= 1.5 * bound, (
        f"the error {error:.2e} is over 1.5 times that of transformers in bfloat16, {bound:.2e}"
    )
    return {"error": error, "error_of_transformers": bound, "lengths": lengths, **changes}


def _last_logits(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    """[R, V], one prompt after the other: a single token is a decode, what is longer than a step comes in chunks."""
    kept: list[torch.Tensor] = []
    model = llm.engine.runner._model  # type: ignore[attr-defined]
    plain = model.logits

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = plain(hidden)
        kept.append(found.float().clone())
        return found

    model.logits = keep
    rows = []
    for i, prompt in enumerate(prompts):
        # Log-probabilities are made on the host, so that the step is no graph, and its logits can be kept.
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, ignore_eos=True)
        llm.engine.add(EngineRequest(request_id=RequestId(f"r{i}"), prompt_token_ids=tuple(prompt), sampling=params))
        while llm.engine.has_work:
            llm.engine.step()
        rows.append(kept[-1][-1])
    model.logits = plain
    return torch.stack(rows)


@torch.inference_mode()
def _reference(folder: Path, dtype: torch.dtype, prompts: list[list[int]]) -> torch.Tensor:
    config = transformers.AutoConfig.from_pretrained(folder)
    checkpoint = open_dummy(folder, 0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = {
        name: checkpoint.source.read(name, torch.bfloat16, torch.device("cuda")).to(dtype)
        for name in checkpoint.source.names()
    }
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    # What is no weight, as rotary frequencies, is made anew where it can be computed.
    rotary = type(model.model.rotary_emb)(config=config, device="cuda")
    model.model.rotary_emb = rotary
    model.eval()
    return torch.stack(
        [model(torch.tensor([prompt], device="cuda"), logits_to_keep=1).logits[0, -1].float() for prompt in prompts]
    )


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found - expected).norm() / expected.norm())


def write_texts(model: Path, path: Path, device: str = "cpu") -> None:
    """What the model says on this device in float32."""
    path.write_text(json.dumps(_texts(LLM(model, device=device, dtype="float32", max_num_seqs=8))))


def texts(model: Path, path: Path) -> dict[str, Any]:
    """Raises AssertionError where a token differs, alone or in a batch."""
    expected = [tuple(tokens) for tokens in json.loads(path.read_text())]
    llm = LLM(model, device="cuda", dtype="float32", kv_cache_bytes=1 << 30, max_num_seqs=8)
    found = _texts(llm)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in PROMPTS]
    assert found == expected, "the texts of a batch differ from the CPU's"
    assert alone == expected, "the texts of single requests differ from the CPU's"
    return {"prompts": len(PROMPTS), "tokens": NUM_TOKENS, "equal": True}


def _texts(llm: LLM) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
