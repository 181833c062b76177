"""The engine's end of KV transfers: in whose memory frames lie, how large they are, and what links must go by."""

import logging

from kvrelay.common.errors import Unsupported
from kvrelay.common.ids import Epoch, PodId
from kvrelay.common.layout import KvLayout
from kvrelay.engine.cache import KvCache
from kvrelay.engine.config import EngineConfig
from kvrelay.transfer.linkcheck import LinkRules
from kvrelay.transfer.port import PortConfig, TransferPort
from kvrelay.transfer.ucx import UcxTransport

log = logging.getLogger(__name__)

HOST = PortConfig(rules=LinkRules(probe_bytes=8 << 20))
DEVICE = PortConfig(frame_bytes=64 << 20, staging_bytes=1 << 30, depth=16, rules=LinkRules(probe_bytes=256 << 20))
"""Many large messages: a copy between devices takes less time than what goes around it."""


def device_staging_bytes(config: EngineConfig) -> int:
    """What staging, of both ways, may take of a GPU's memory beside the cache."""
    return 0 if config.kv_buffer_device == "cpu" else 2 * (config.staging_bytes or DEVICE.staging_bytes)


def open_port(config: EngineConfig, pod_id: PodId, epoch: Epoch, layout: KvLayout, cache: KvCache) -> TransferPort:
    """Started, on the loop that drives it from then on. Raises Internal, Unsupported."""
    cache.enter_thread()
    transport = UcxTransport()
    on_device = not config.device.startswith("cpu") and config.kv_buffer_device != "cpu"
    if on_device and not transport.carries_device_memory:
        told = "this UCX carries no device memory between processes"
        if config.kv_buffer_device == "cuda":
            raise Unsupported(told, "kv_buffer_device")
        log.warning("%s: KV goes through the host's", told)
        on_device = False
    port = TransferPort(
        transport,
        pod_id,
        epoch,
        layout,
        port_config(config, DEVICE if on_device else HOST),
        lambda num_bytes: cache.staging(num_bytes, on_device=on_device),
    )
    port.start()
    return port


def port_config(config: EngineConfig, default: PortConfig) -> PortConfig:
    probe_bytes = config.transfer_probe_bytes
    return PortConfig(
        frame_bytes=config.frame_bytes or default.frame_bytes,
        staging_bytes=config.staging_bytes or default.staging_bytes,
        depth=config.transfer_depth or default.depth,
        checksums=config.checksums,
        rules=LinkRules(
            require=tuple(filter(None, config.transfer_require.split(","))),
            refuse=config.transfer_fallback == "refuse",
            probe_bytes=default.rules.probe_bytes if probe_bytes is None else probe_bytes,
        ),
    )
