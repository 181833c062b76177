"""The inputs of a step of single tokens by a Triton kernel; see `inputs.unpack_decodes` for its twin."""

import torch

from kvrelay.engine.gpu.inputs import DeviceInputs, DeviceRows
from kvrelay.kernels.ops import SampleParams
from kvrelay.kernels.triton import inputs as kernel


class TritonUnpack:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def __call__(self, words: torch.Tensor, rows: DeviceRows) -> DeviceInputs:
        token_ids, positions, integers, floats, tables = kernel.unpack_decodes(
            words, rows.tokens, rows.tables, self._block_size
        )
        lens, top_k, choice = integers
        temperature, top_p, min_p = floats
        return DeviceInputs(
            token_ids=token_ids,
            positions=positions,
            slots=words[3],
            query_starts=rows.starts[: len(lens) + 1],
            context_lens=lens,
            block_tables=tables,
            last=None,
            feed_rows=words[0],
            sampling=SampleParams(temperature, top_k, top_p, min_p, words[5], choice, words[7]),
            num_decodes=len(lens),
        )
