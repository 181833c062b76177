"""Which engine a pod runs."""

from kvrelay.common import net
from kvrelay.common.ids import PodId
from kvrelay.engine.api import EngineClient
from kvrelay.engine.fake import FakeConfig, FakeEngine
from kvrelay.engine.fake.config import from_model
from kvrelay.engine.pod.settings import PodSettings


def make_engine(settings: PodSettings, pod_id: PodId) -> EngineClient:
    """Not started yet. Raises Internal where a fake is to look like a model that cannot be read."""
    if settings.engine == "fake":
        return FakeEngine(fake_config(settings), pod_id)
    from kvrelay.engine.client import AsyncEngine

    return AsyncEngine(settings.engine_config(), pod_id, settings.kvstore_options())


def fake_config(settings: PodSettings) -> FakeConfig:
    options: dict[str, object] = {
        "block_size": settings.block_size,
        "num_blocks": settings.fake_num_blocks,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "step_ms": settings.fake_step_ms,
        "natural_length": settings.fake_natural_length,
        "ticket_timeout_ms": settings.ticket_timeout_ms,
        "on_ticket_expiry": settings.on_ticket_expiry,
        "host": net.advertised(settings.host, settings.advertise_host, settings.redis_url),
    }
    if settings.max_model_len is not None:
        options["max_model_len"] = settings.max_model_len
    if settings.model is None:
        return FakeConfig(**options)  # type: ignore[arg-type]
    return from_model(settings.model, **options)
