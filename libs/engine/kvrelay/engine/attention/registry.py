"""Which backend attends, and why: the first of the list that can, or the one that was asked for."""

import torch

from kvrelay.common.errors import Unsupported
from kvrelay.engine.attention.base import AttentionBackend
from kvrelay.engine.attention.cpu import CpuAttention
from kvrelay.engine.attention.gathered import GatheredDecoding
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.models.config import ModelConfig


class Unfit(Exception):
    """Why a backend cannot serve this model here."""


def _paged_cpu(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> AttentionBackend:
    if config.kernels == "torch":
        raise Unfit("kernels are to be torch's")
    try:
        from kvrelay.engine.attention.paged import PagedDecoding
        from kvrelay.kernels.cpu.openmp import NoThreads
        from kvrelay.kernels.cpu.ops import DecodeKernel
    except ImportError as error:
        raise Unfit(f"numba is not there ({error})") from error
    try:
        kernel = DecodeKernel(model.num_heads, model.num_kv_heads, model.head_dim, dtype, kv_dtype)
    except (ValueError, NoThreads) as error:
        raise Unfit(str(error)) from error
    return CpuAttention("paged-cpu", dtype, PagedDecoding(kernel))


def _torch_cpu(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> AttentionBackend:
    return CpuAttention("torch-cpu", dtype, GatheredDecoding(dtype))


_CANDIDATES = {
    "paged-cpu": ("cpu", _paged_cpu, "decodes by a compiled kernel on paged KV, prefills by torch"),
    "torch-cpu": ("cpu", _torch_cpu, "torch's fused attention, decodes over gathered blocks"),
}


def choose(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[AttentionBackend, str]:
    """For queries of `dtype` and a cache of `kv_dtype`: the backend, and the reason in words. Raises Unsupported where none fits."""
    device = config.device.partition(":")[0]
    passed = []
    for name, (its_device, make, what) in _CANDIDATES.items():
        if its_device != device or config.attention not in ("auto", name):
            continue
        try:
            backend = make(config, model, dtype, kv_dtype)
        except Unfit as error:
            passed.append(f"{name}: {error}")
            continue
        why = "asked for" if config.attention != "auto" else "; ".join(passed) or "the first for this device"
        return backend, f"{name}: {what} ({why})"
    known = ", ".join(f"{name} ({device})" for name, (device, _, _) in _CANDIDATES.items())
    reasons = f" ({'; '.join(passed)})" if passed else ""
    raise Unsupported(
        f"no attention backend {config.attention} for device {config.device}{reasons}; there are {known}", "attention"
    )
