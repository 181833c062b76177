"""A runner for a GPU: its kernels, its KV cache in what memory is left, its graphs."""

import logging

import torch

from kvrelay.common.errors import Unsupported
from kvrelay.engine.attention.registry import choose_device
from kvrelay.engine.cache import TORCH_DTYPES, kv_dtype_of
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.gpu.kernels import CopyKernels
from kvrelay.engine.gpu.runner import GpuRunner
from kvrelay.engine.gpu.sampler import TritonSampler
from kvrelay.engine.gpu.unpack import TritonUnpack
from kvrelay.engine.loader import LoadedModel
from kvrelay.engine.sampler import Sampler
from kvrelay.engine.transfer import device_staging_bytes
from kvrelay.kernels.triton.checksum import leaves
from kvrelay.kernels.triton.pack import pack, unpack

log = logging.getLogger(__name__)

RESERVED_BYTES = 1 << 30
"""For the graphs, and for what is not torch's."""


def make_runner(config: EngineConfig, loaded: LoadedModel) -> tuple[GpuRunner, str]:
    """And the attention backend with the reason for it. Raises Unsupported where memory or kernels lack."""
    kv_dtype = TORCH_DTYPES[kv_dtype_of(config.kv_dtype, loaded.dtype)]
    attention, reason = choose_device(config, loaded.model_config, loaded.model.dtype, kv_dtype)
    sampler = TritonSampler(config.max_num_seqs, loaded.vocab_size, torch.device(config.device))
    host_sampler = Sampler(loaded.vocab_size, loaded.eos_token_ids)

    def runner(kv_cache_bytes: int) -> GpuRunner:
        return GpuRunner(
            loaded,
            config,
            attention,
            sampler,
            host_sampler,
            kv_cache_bytes,
            TritonUnpack(config.block_size),
            CopyKernels(pack, unpack, leaves),
        )

    try:
        made = runner(config.kv_cache_bytes or _bytes_left(config, runner(_two_blocks(config, loaded))))
        made.rehearse()
        made.capture()
    except torch.OutOfMemoryError as error:
        raise Unsupported(
            f"a step of {config.max_num_batched_tokens} tokens does not fit into the memory of {config.device}: {error}",
            "max_num_batched_tokens",
        ) from error
    return made, reason


def _two_blocks(config: EngineConfig, loaded: LoadedModel) -> int:
    model = loaded.model_config
    return 2 * model.num_layers * 2 * config.block_size * model.kv_size * 4


def _bytes_left(config: EngineConfig, probe: GpuRunner) -> int:
    """For the KV cache, beside what is used already and what the largest step needs."""
    device = torch.device(config.device)
    probe.rehearse()  # kernels are loaded, workspaces made
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    probe.rehearse()
    step = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    staging = device_staging_bytes(config)
    left = int(config.gpu_memory_utilization * total) - (total - free) - step - staging - RESERVED_BYTES
    log.info(
        "GPU memory: %.1f GB, of which %.1f in use, %.1f for the largest step, %.1f for KV on its way; %.1f for the cache",
        total / 1e9, (total - free) / 1e9, step / 1e9, staging / 1e9, left / 1e9,
    )  # fmt: skip
    if left <= 0:
        raise Unsupported(
            f"weights, the largest step and transfers leave no memory for KV within {config.gpu_memory_utilization:.0%} of "
            f"{config.device}'s {total / 1e9:.0f} GB",
            "gpu_memory_utilization",
        )
    return left
