"""Puts an engine together: weights, cache, attention, sampler, runner, scheduler. All that takes long at a start is here."""

import dataclasses
import logging
from collections.abc import Callable

from kvrelay.common.layout import KvLayout
from kvrelay.engine.attention.registry import choose
from kvrelay.engine.cache import TORCH_DTYPES, KvCache, kv_dtype_of
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.core import Engine
from kvrelay.engine.gpu.runner import GpuRunner
from kvrelay.engine.loader import LoadedModel, load_model
from kvrelay.engine.pool import CacheListener
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampler import Sampler

log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]
"""What is being done, how far it is, and of how much."""


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    engine: Engine
    cache: KvCache
    loaded: LoadedModel
    layout: KvLayout
    attention: str


def build(config: EngineConfig, on_progress: OnProgress, listener: CacheListener | None = None) -> Built:
    """`listener` hears of the prefix cache. Raises KvrelayError where the model, the device or an option does not fit."""
    loaded = load_model(config, on_progress)
    runner, reason = _runner(config, loaded)
    log.info("attention: %s", reason)
    engine = Engine(
        config,
        runner,
        num_blocks=runner.kv.num_blocks,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        fingerprint=loaded.fingerprint,
        listener=listener,
    )
    return Built(engine, runner.kv, loaded, runner.kv.layout(loaded.fingerprint), reason)


def _runner(config: EngineConfig, loaded: LoadedModel) -> tuple[ModelRunner | GpuRunner, str]:
    """And the attention backend, with the reason for it."""
    if not config.device.startswith("cpu"):
        from kvrelay.engine.gpu.build import make_runner

        return make_runner(config, loaded)
    kv_dtype = TORCH_DTYPES[kv_dtype_of(config.kv_dtype, loaded.dtype)]
    attention, reason = choose(config, loaded.model_config, loaded.model.dtype, kv_dtype)
    sampler = Sampler(loaded.vocab_size, loaded.eos_token_ids)
    return ModelRunner(loaded, config, attention, sampler), reason
