"""Options of the transfer, and what comes of those that are not given."""

from pathlib import Path

import pytest

from kvrelay.common.ids import PodId
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.messages import LinkStats
from kvrelay.engine.pod.metrics import link_rates
from kvrelay.engine.transfer import DEVICE, HOST, device_staging_bytes, port_config
from kvrelay.transfer.port import PortConfig

pytestmark = pytest.mark.unit


def config(**options: object) -> EngineConfig:
    return EngineConfig(model=Path("model"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("default", [HOST, DEVICE])
def test_what_is_not_given_is_the_memory_s_own(default: PortConfig) -> None:
    assert port_config(config(), default) == default
    assert default.staging_bytes >= default.depth * default.frame_bytes, "a link alone can fill its window"


def test_what_is_given() -> None:
    given = config(
        frame_bytes=1 << 16,
        staging_bytes=1 << 20,
        transfer_depth=3,
        checksums=False,
        transfer_require="cuda_ipc,rc",
        transfer_fallback="warn",
        transfer_probe_bytes=0,
    )
    found = port_config(given, DEVICE)
    assert (found.frame_bytes, found.staging_bytes, found.depth, found.checksums) == (1 << 16, 1 << 20, 3, False)
    assert (found.rules.require, found.rules.refuse, found.rules.probe_bytes) == (("cuda_ipc", "rc"), False, 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_buffer_device": "gpu"}, "kv_buffer_device"),
        ({"kv_buffer_device": "cuda", "device": "cpu"}, "kv_buffer_device"),
        ({"transfer_fallback": "ignore"}, "transfer_fallback"),
        ({"transfer_probe_bytes": -1}, "transfer_probe_bytes"),
        ({"transfer_depth": 0}, "transfer_depth"),
        ({"frame_bytes": 0}, "frame_bytes"),
    ],
)
def test_what_cannot_be(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config(**options)


def test_memory_of_a_gpu() -> None:
    """Is left beside the cache, for both ways, unless KV lies elsewhere on its way."""
    assert device_staging_bytes(config(device="cuda")) == 2 * DEVICE.staging_bytes
    assert device_staging_bytes(config(device="cuda", staging_bytes=100)) == 200
    assert device_staging_bytes(config(device="cuda", kv_buffer_device="cpu")) == 0


def test_links_are_exported() -> None:
    links = [
        LinkStats(pod_id=PodId(f"d{i}"), transport="cuda_ipc/cuda,tcp/lo", bytes_per_second=i * 1e9) for i in (1, 2)
    ]
    samples = {(s.labels["peer"], s.labels["transport"]): s.value for s in link_rates(links).samples}
    assert samples == {("d1", "cuda_ipc/cuda,tcp/lo"): 1e9, ("d2", "cuda_ipc/cuda,tcp/lo"): 2e9}
