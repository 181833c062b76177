"""Which backend attends, and why: the first of the list that can, or the one that was asked for."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch.nn.attention import SDPBackend

from kvrelay.common.errors import Unsupported
from kvrelay.engine.attention.base import AttentionBackend
from kvrelay.engine.attention.cpu import CpuAttention
from kvrelay.engine.attention.gathered import GatheredDecoding
from kvrelay.engine.attention.whole import WholePrompts
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.gpu.attention import DeviceAttention
from kvrelay.engine.models.config import ModelConfig

log = logging.getLogger(__name__)

Backend = TypeVar("Backend")


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


def _triton(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    whole: WholePrompts | None = None,
) -> DeviceAttention:
    try:
        from kvrelay.engine.attention.triton import TritonAttention
    except ImportError as error:
        raise Unfit(f"Triton is not there ({error})") from error
    try:
        return TritonAttention(config, model, dtype, whole)
    except ValueError as error:
        raise Unfit(str(error)) from error


def _cudnn(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> DeviceAttention:
    if kv_dtype is not dtype:
        raise Unfit(f"KV is stored as {kv_dtype}, and what is stored must be attended to")
    whole = WholePrompts(
        SDPBackend.CUDNN_ATTENTION, model.num_heads, model.num_kv_heads, model.head_dim, dtype, config.device
    )
    if (reason := whole.reason_against_cudnn()) is not None:
        raise Unfit(reason)
    begun = time.perf_counter()
    try:
        lengths = whole.rehearse(min(config.max_num_batched_tokens, config.max_model_len or model.max_positions))
    except RuntimeError as error:  # what torch makes of cuDNN's errors
        raise Unfit(str(error)) from error
    log.info("cuDNN made plans for %d lengths of prompts in %.1f s", len(lengths), time.perf_counter() - begun)
    return _triton(config, model, dtype, kv_dtype, whole)


_ON_CPU = {
    "paged-cpu": (_paged_cpu, "decodes by a compiled kernel on paged KV, prefills by torch"),
    "torch-cpu": (_torch_cpu, "torch's fused attention, decodes over gathered blocks"),
}
_ON_GPU = {
    "cudnn": (_cudnn, "long whole prompts by cuDNN, all else by Triton kernels on paged KV"),
    "triton": (_triton, "Triton kernels on paged KV"),
}


def choose(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[AttentionBackend, str]:
    """On a CPU, for queries of `dtype` and a cache of `kv_dtype`: the backend, and the reason in words.

    Raises Unsupported where none fits.
    """
    return _first(
        config, {name: (partial(make, config, model, dtype, kv_dtype), what) for name, (make, what) in _ON_CPU.items()}
    )


def choose_device(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[DeviceAttention, str]:
    """As `choose`, on a GPU. What kernels must make before the first step is made for the thread that calls this."""
    return _first(
        config, {name: (partial(make, config, model, dtype, kv_dtype), what) for name, (make, what) in _ON_GPU.items()}
    )


def _first(config: EngineConfig, candidates: dict[str, tuple[Callable[[], Backend], str]]) -> tuple[Backend, str]:
    passed = []
    for name, (make, what) in candidates.items():
        if config.attention not in ("auto", name):
            continue
        try:
            backend = make()
        except Unfit as error:
            passed.append(f"{name}: {error}")
            continue
        why = "asked for" if config.attention != "auto" else "; ".join(passed) or "the first for this device"
        return backend, f"{name}: {what} ({why})"
    known = ", ".join([*(f"{name} (cpu)" for name in _ON_CPU), *(f"{name} (cuda)" for name in _ON_GPU)])
    reasons = f" ({'; '.join(passed)})" if passed else ""
    raise Unsupported(
        f"no attention backend {config.attention} for device {config.device}{reasons}; there are {known}", "attention"
    )
