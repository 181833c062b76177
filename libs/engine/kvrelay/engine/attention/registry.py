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
from kvrelay.engine.attention.prefill import MakePart, Prefill
from kvrelay.engine.attention.whole import WholePrompts
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.gpu.attention import DeviceAttention
from kvrelay.engine.models.config import ModelConfig

log = logging.getLogger(__name__)

Backend = TypeVar("Backend")


_ABSENT = (ImportError, OSError, RuntimeError)
"""What comes of importing a package with compiled parts that is not there, or not all of it, or not for this machine."""


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


def _with(
    prefill: Callable[[MakePart], Prefill], config: EngineConfig, model: ModelConfig, dtype: torch.dtype
) -> DeviceAttention:
    """`prefill` is given Triton's kernel for prompts; single tokens are Triton's."""
    try:
        from kvrelay.engine.attention.triton import TritonAttention, TritonPages
    except ImportError as error:
        raise Unfit(f"Triton is not there ({error})") from error
    try:
        return TritonAttention(config, model, dtype, prefill(partial(TritonPages, config.block_size)))
    except ValueError as error:
        raise Unfit(str(error)) from error


def _triton(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> DeviceAttention:
    return _with(partial(Prefill, "triton"), config, model, dtype)


def _cudnn(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> DeviceAttention:
    _refuse_conversion(dtype, kv_dtype)
    whole = WholePrompts(
        SDPBackend.CUDNN_ATTENTION, model.num_heads, model.num_kv_heads, model.head_dim, dtype, config.device
    )
    if (reason := whole.reason_against_cudnn()) is not None:
        raise Unfit(reason)
    _rehearse("cuDNN", lambda: whole.rehearse(_longest(config, model)))
    return _with(lambda pages: Prefill("cudnn", pages, whole.part, whole.from_tokens), config, model, dtype)


def _flash_attention_4(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype
) -> DeviceAttention:
    try:
        from kvrelay.engine.attention import flash
    except _ABSENT as error:
        raise Unfit(f"flash-attn-4 is not there ({error})") from error
    _refuse_conversion(dtype, kv_dtype)
    if (capability := torch.cuda.get_device_capability(config.device))[0] not in flash.MAJOR_CAPABILITIES:
        raise Unfit(f"it has no kernels on paged KV for compute capability {capability[0]}.{capability[1]}")
    rehearse = partial(
        flash.rehearse, model.num_heads, model.num_kv_heads, model.head_dim, config.block_size, dtype, config.device
    )
    _rehearse("FlashAttention-4", lambda: rehearse(config.max_num_batched_tokens, config.max_num_seqs))
    return _with(lambda pages: flash.flash_prefill(config.block_size), config, model, dtype)


def _flashinfer(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> DeviceAttention:
    try:
        from kvrelay.engine.attention import flashinfer
    except _ABSENT as error:
        raise Unfit(f"flashinfer-python is not there ({error})") from error
    _refuse_conversion(dtype, kv_dtype)
    planner = flashinfer.Planner(
        model.num_heads, model.num_kv_heads, model.head_dim, config.block_size, dtype, config.device
    )
    _rehearse("FlashInfer", lambda: planner.rehearse(_longest(config, model)))
    return _with(lambda pages: Prefill("flashinfer", planner.part), config, model, dtype)


def _longest(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of a prompt in one step."""
    return min(config.max_num_batched_tokens, config.max_model_len or model.max_positions)


def _refuse_conversion(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    if kv_dtype is not dtype:
        raise Unfit(f"KV is stored as {kv_dtype}, and what is stored must be attended to")
    if dtype not in (torch.float16, torch.bfloat16):
        raise Unfit(f"it has no kernels for {dtype}")


def _rehearse(name: str, rehearse: Callable[[], object]) -> None:
    """Has a backend compile and choose what it needs, before the first request. Raises Unfit where it cannot."""
    begun = time.perf_counter()
    try:
        rehearse()
    except Exception as error:
        log.info("%s cannot", name, exc_info=True)
        raise Unfit(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    log.info("%s is ready after %.1f s", name, time.perf_counter() - begun)


_ON_CPU = {
    "paged-cpu": (_paged_cpu, "decodes by a compiled kernel on paged KV, prefills by torch"),
    "torch-cpu": (_torch_cpu, "torch's fused attention, decodes over gathered blocks"),
}
_ON_GPU = {
    "flash-attention-4": (_flash_attention_4, "prompts by FlashAttention-4, single tokens by Triton on paged KV"),
    "cudnn": (_cudnn, "long whole prompts by cuDNN, all else by Triton kernels on paged KV"),
    "flashinfer": (_flashinfer, "prompts by FlashInfer, single tokens by Triton on paged KV"),
    "triton": (_triton, "Triton kernels on paged KV"),
}
"""The first that can is taken. The fastest first, as `benchmarks.gpu.prefill` has them on an H200; FlashInfer was not measured."""


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
