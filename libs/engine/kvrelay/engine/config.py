"""What an engine is started with. Frozen, validated at construction, never changed after it."""

import enum
from pathlib import Path

import msgspec

from kvrelay.common.layout import KvDtype


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's engine. Sizes in bytes or tokens, times in milliseconds."""

    model: Path
    device: str = "cpu"
    dtype: str = "auto"
    """auto (the checkpoint's), float32, bfloat16 or float16."""
    kv_dtype: str = "auto"
    """auto (the dtype of the model) or a `KvDtype`."""
    block_size: int = 16
    kv_cache_bytes: int | None = None
    """None: 512 MiB on a CPU; on a GPU what `gpu_memory_utilization` leaves beside weights and the largest step."""
    gpu_memory_utilization: float = 0.9
    """The share of the GPU's memory that may be in use, by others as well."""
    max_model_len: int | None = None
    """None: the model's own."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    """The upper limit of a step's tokens; the budget adapts below it."""
    max_step_ms: float = 300.0
    prefix_caching: bool = True
    threads: int = 0
    """Of torch on the CPU; 0: all cores of this process."""
    attention: str = "auto"
    """auto, or a backend's name."""
    kernels: str = "auto"
    """auto (compiled ones where they can be had), compiled (on a CPU), triton (on a GPU) or torch."""
    load_format: str = "auto"
    """auto (safetensors, else GGUF), safetensors, gguf or dummy (random weights)."""
    quantization: str = "none"
    """none, or fp8: weights of the layers' products are rounded to 8 bits as they are loaded."""
    kv_buffer_device: str = "auto"
    """Where frames of KV lie on their way: cuda (the memory of the GPU that has the cache), cpu, or auto: cuda where UCX carries it."""
    frame_bytes: int | None = None
    """Of a message. None: 1 MiB, 64 MiB in a GPU's memory."""
    staging_bytes: int | None = None
    """Of the transfer, each way: what is packed and not yet sent, or arrived and not yet unpacked. None: 64 MiB, 1 GiB in a GPU's memory."""
    transfer_depth: int | None = None
    """Frames in flight to a pod. None: 8, 16 in a GPU's memory."""
    transfer_require: str = ""
    """UCX's names of transports, with commas: a link must have one of them. Empty: any."""
    transfer_fallback: str = "refuse"
    """refuse or warn: of a link that has none of them."""
    transfer_probe_bytes: int | None = None
    """Sent at most to measure a new link; 0: not at all. None: 8 MiB, 256 MiB in a GPU's memory."""
    checksums: bool = True
    on_ticket_expiry: str = "recompute"
    """recompute or fail."""
    watermark: float = 0.01
    """The share of blocks that reservations leave free for running requests."""
    seed: int = 0
    ticket_timeout_ms: int = 30_000
    """How long a reservation waits to be filled, if its request's deadline is not sooner."""
    kv_events: bool = True
    """Tell the front what the prefix cache gains and loses."""
    test_hooks: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 16 or self.block_size % 16:
            raise ValueError(f"block_size must be a multiple of 16, not {self.block_size}")
        sizes = ("kv_cache_bytes", "max_num_seqs", "max_num_batched_tokens", "frame_bytes", "staging_bytes")
        for name in (*sizes, "transfer_depth"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be positive, not {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError("gpu_memory_utilization must be in (0, 1]")
        if self.max_step_ms <= 0:
            raise ValueError("max_step_ms must be positive")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, not {self.dtype}")
        if self.kv_dtype != "auto" and self.kv_dtype not in {d.value for d in KvDtype}:
            raise ValueError(f"kv_dtype {self.kv_dtype} is unknown")
        if self.quantization not in ("none", "fp8"):
            raise ValueError(f"quantization must be none or fp8, not {self.quantization}")
        if self.kv_buffer_device not in ("auto", "cuda", "cpu"):
            raise ValueError(f"kv_buffer_device must be auto, cuda or cpu, not {self.kv_buffer_device}")
        if self.kv_buffer_device == "cuda" and self.device.startswith("cpu"):
            raise ValueError("kv_buffer_device cuda needs a cache on a GPU")
        if self.transfer_fallback not in ("refuse", "warn"):
            raise ValueError("transfer_fallback must be refuse or warn")
        if self.transfer_probe_bytes is not None and self.transfer_probe_bytes < 0:
            raise ValueError("transfer_probe_bytes must not be negative")
        if self.on_ticket_expiry not in ("recompute", "fail"):
            raise ValueError("on_ticket_expiry must be recompute or fail")
        if not 0 <= self.watermark < 1:
            raise ValueError("watermark must be in [0, 1)")

    def to_wire(self) -> dict[str, str | int | float | bool | None]:
        """For another process; `from_wire` is its inverse."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {**values, "model": str(self.model)}

    @classmethod
    def from_wire(cls, values: dict[str, str | int | float | bool | None]) -> "EngineConfig":
        """Raises msgspec.ValidationError or ValueError where an option is unknown, of a wrong type or out of range."""
        if unknown := values.keys() - set(cls.__struct_fields__):
            raise ValueError(f"unknown options: {', '.join(sorted(unknown))}")
        return msgspec.convert(values, cls, dec_hook=_path)


class KvStoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the KV stores of the node are reached."""

    addresses: tuple[str, ...]
    """Each as HOST:PORT, the first to be asked first; at least one."""
    token: str = ""
    """What its callers must show; empty: nothing."""
    tls_ca: str = ""
    """PEM files: the authority of its certificate, and this pod's own pair. Empty: no TLS."""
    tls_cert: str = ""
    tls_key: str = ""
    tls_name: str = ""
    """In its certificate; empty: the address's host."""
    load: str = "auto"
    """auto: what takes less time than to compute it, as measured; or always."""
    dtype: str = "auto"
    """In which blocks are stored: auto (that of the KV cache, exact) or a `KvDtype`. Blocks of both are taken."""


def _path(kind: type, value: object) -> Path:
    if kind is not Path or not isinstance(value, str):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return Path(value)
