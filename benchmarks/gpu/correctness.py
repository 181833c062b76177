"""Whether the engine on a GPU computes what transformers does, and says what it says on a CPU.

`logits`: a random model of a shape, in bfloat16. Both engines are compared with transformers in float32; what rounding costs
transformers' own bfloat16 bounds what it may cost this one. `texts`: greedy tokens in float32, equal to those that the same engine
gives on the CPU.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu.shapes import SHAPES, write_model
from kvrelay.common.ids import RequestId
from kvrelay.common.request import EngineRequest, SamplingParams
from kvrelay.engine.llm import LLM
from kvrelay.engine.loader.dummy import open_dummy
from kvrelay.kernels.reference import FEW_TOKENS
from kvrelay.kernels.scaled import quantize

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


LENGTHS = (17, 129, 1025, 4097)
"""Of prompts: each one token more than whole blocks, so that the last token can be computed alone, as in a decode."""
LIMIT = 1.5
"""Times the error of transformers in bfloat16: both round as often, and not in the same places."""


def logits(folder: Path, shape: str, **changes: Any) -> dict[str, Any]:
    """The relative error ‖logits - float32's‖ / ‖float32's‖ of the prompts' last positions, over all prompts: computed with the whole
    prompt, one after the other, and then alone, those of all prompts in one step.

    Raises AssertionError where ours is over LIMIT times that of transformers in bfloat16, or not finite.
    """
    write_model(folder, shape, **changes)
    llm, prompts = _llm(folder, 2048), _prompts(shape)
    prefill = torch.cat([_last_logits(llm, [prompt]) for prompt in prompts])
    decode = _last_logits(llm, prompts)  # all but their last tokens are cached now
    wide, half = (_reference(folder, dtype, prompts) for dtype in (torch.float32, torch.bfloat16))
    bound = _error(half, wide)
    errors = {"error": _error(prefill, wide), "error_of_decodes": _error(decode, wide)}
    for name, error in errors.items():
        assert error <= LIMIT * bound, f"{name} {error:.2e} is over {LIMIT} times that of transformers, {bound:.2e}"
    return {**errors, "error_of_transformers": bound, "lengths": LENGTHS, **changes}


def logits_in_8_bits(folder: Path, shape: str) -> dict[str, Any]:
    """The same errors of weights in 8 bits, against transformers with those weights in float32: in steps of so few tokens that these
    are taken as they are, which transformers in bfloat16 bounds; and in steps of many, where they are rounded to 8 bits too.

    Raises AssertionError as `logits` does; the second is only told.
    """
    write_model(folder, shape)
    prompts = _prompts(shape)
    wide, half = (_reference(folder, dtype, prompts, in_8_bits=True) for dtype in (torch.float32, torch.bfloat16))
    bound = _error(half, wide)

    def error(step: int) -> float:
        llm = _llm(folder, step, quantization="fp8", max_num_seqs=8)
        return _error(torch.cat([_last_logits(llm, [prompt]) for prompt in prompts]), wide)

    few, many = error(FEW_TOKENS), error(2048)
    assert few <= LIMIT * bound, f"error {few:.2e} is over {LIMIT} times that of transformers, {bound:.2e}"
    return {"error": few, "error_of_rounded_tokens": many, "error_of_transformers": bound, "lengths": LENGTHS}


def _llm(folder: Path, step: int, **options: Any) -> LLM:
    """With steps of so many tokens at most."""
    return LLM(
        folder,
        device="cuda",
        load_format="dummy",
        max_model_len=max(LENGTHS) + 64,
        max_num_batched_tokens=step,
        kv_cache_bytes=4 << 30,
        **options,
    )


def _prompts(shape: str) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    vocab = SHAPES[shape]["vocab_size"]
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in LENGTHS]


def _last_logits(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    """[R, V], of the prompts in the order given, in the last step of all."""
    kept: list[torch.Tensor] = []
    model = llm.engine.runner._model  # type: ignore[attr-defined]
    plain = model.logits

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = plain(hidden)
        kept.append(found.float().clone())
        return found

    model.logits = keep
    # Log-probabilities are made on the host, so that the step is no graph, and its logits can be kept.
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        llm.engine.add(EngineRequest(request_id=RequestId(f"r{i}"), prompt_token_ids=tuple(prompt), sampling=params))
    while llm.engine.has_work:
        llm.engine.step()
    model.logits = plain
    assert len(kept[-1]) == len(prompts), "the last step is that of all prompts"
    return kept[-1]


@torch.inference_mode()
def _reference(folder: Path, dtype: torch.dtype, prompts: list[list[int]], *, in_8_bits: bool = False) -> torch.Tensor:
    config = transformers.AutoConfig.from_pretrained(folder)
    checkpoint = open_dummy(folder, 0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)

    def weight(name: str) -> torch.Tensor:
        found = checkpoint.source.read(name, torch.bfloat16, torch.device("cuda"))
        return quantize(found).wide(dtype) if in_8_bits and "proj.weight" in name else found.to(dtype)

    weights = {name: weight(name) for name in checkpoint.source.names()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    # What is no weight, as rotary frequencies, is made anew where it can be computed.
    with torch.device("cuda"):
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    model.eval()
    return torch.stack(
        [model(torch.tensor([prompt], device="cuda"), logits_to_keep=1).logits[0, -1].float() for prompt in prompts]
    )


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found - expected).norm() / expected.norm())


def texts(model: Path) -> dict[str, Any]:
    """Raises AssertionError where a token differs, alone or in a batch."""
    expected = _texts(LLM(model, device="cpu", dtype="float32", max_num_seqs=8))
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
