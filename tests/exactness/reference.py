"""What transformers gives in float32, greedy: tokens, log-probabilities, and how close the runner-up was."""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence

OUTPUT_TOKENS = 32
TIE = 1e-4
"""Where the two most likely tokens are closer than this (log-probability), either is right."""
LOGPROB_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Reference:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]
    """Between the first and the second of each position, in log-probability."""

    def check(self, name: str, tokens: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        """Fails where `tokens` (or their log-probabilities) are not what the reference allows."""
        for i, (got, want) in enumerate(zip(tokens, self.tokens, strict=False)):
            if got != want:
                assert self.gaps[i] < TIE, (
                    f"{name}: token {i} is {got}, not {want}; the gap is {self.gaps[i]:.2e}\n"
                    f"got  {list(tokens)}\nwant {list(self.tokens)}"
                )
                return  # after a tie the texts are two different ones
            if logprobs:
                assert abs(logprobs[i] - self.logprobs[i]) < LOGPROB_TOLERANCE, f"{name}: logprob of token {i}"
        assert len(tokens) == len(self.tokens), f"{name}: {len(tokens)} tokens, not {len(self.tokens)}"


class References:
    """Computes references, and keeps them beside the model by prompt and by the versions that made them."""

    def __init__(self, model_dir: pathlib.Path) -> None:
        import torch
        import transformers

        self._model_dir = model_dir
        self._model: transformers.PreTrainedModel | None = None
        weights = model_dir / "model.safetensors"
        key = f"{transformers.__version__} {torch.__version__} {weights.stat().st_size} {weights.stat().st_mtime_ns}"
        self._folder = model_dir.parent / "references" / hashlib.sha256(key.encode()).hexdigest()[:16]
        self._folder.mkdir(parents=True, exist_ok=True)

    def of(self, prompt: Sequence[int], num_tokens: int = OUTPUT_TOKENS) -> Reference:
        digest = hashlib.sha256(json.dumps([list(prompt), num_tokens]).encode()).hexdigest()[:32]
        path = self._folder / f"{digest}.json"
        if not path.exists():
            reference = self._compute(list(prompt), num_tokens)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(dataclasses.asdict(reference)))
            partial.rename(path)
        return Reference(**{name: tuple(value) for name, value in json.loads(path.read_text()).items()})

    def _compute(self, prompt: list[int], num_tokens: int) -> Reference:
        import torch
        import transformers

        if self._model is None:
            # Two threads that share their cores with another process wait for each other at every step.
            torch.set_num_threads(1)
            self._model = transformers.AutoModelForCausalLM.from_pretrained(self._model_dir, dtype=torch.float32)
            self._model.eval()
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                pad_token_id=0,
            )
        tokens = out.sequences[0, len(prompt) :].tolist()
        logprobs = torch.log_softmax(torch.cat(out.logits).float(), dim=-1)
        top = logprobs.topk(2).values
        return Reference(
            prompt=tuple(prompt),
            tokens=tuple(tokens),
            logprobs=tuple(logprobs[range(len(tokens)), tokens].tolist()),
            gaps=tuple((top[:, 0] - top[:, 1]).tolist()),
        )
