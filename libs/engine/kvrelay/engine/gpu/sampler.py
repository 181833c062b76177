"""The device's sampler, for a runner's inputs."""

import torch

from kvrelay.engine.gpu.inputs import Draw
from kvrelay.kernels.ops import SampleParams
from kvrelay.kernels.triton.sample import TokenSampler


class TritonSampler:
    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._sampler = TokenSampler(max_rows, vocab_size, device)

    def __call__(self, logits: torch.Tensor, params: SampleParams, draw: Draw) -> torch.Tensor:
        tokens, _ = self._sampler(logits, params, draws=draw is not Draw.GREEDY, cuts=draw is Draw.CUT)
        return tokens
