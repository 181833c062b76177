"""The options that prefill and decode pods share. A role adds its name and its ports."""

import secrets
import socket
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from kvrelay.common.discovery import PodRole
from kvrelay.common.ids import PodId
from kvrelay.common.pod.settings import ListenerSettings
from kvrelay.common.settings import Size, TracedSettings
from kvrelay.engine.config import EngineConfig, KvStoreOptions


class PodSettings(TracedSettings, ListenerSettings):
    """A pod: where it listens, how it is found, and the engine in it."""

    base_port: ClassVar[int] = 9200

    role: PodRole = "decode"
    """prefill, decode or both."""
    engine: Literal["process", "fake"] = "process"
    """process, or fake: tokens without a model, for trying out what surrounds the engine."""

    pod_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    """Not set: by role, host name and port."""
    grace_seconds: float = Field(default=30.0, ge=0, le=3600)
    """How long running requests may go on after SIGTERM."""

    model: Path | None = None
    """Folder of the model."""
    device: str = "cpu"
    """cpu or cuda."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights; auto is the checkpoint's."""
    kv_dtype: str = "auto"
    """Of the KV cache; auto is the model's."""
    block_size: int = Field(default=16, ge=16)
    """Tokens in a KV block, a multiple of 16."""
    kv_cache_bytes: Size | None = Field(default=None, ge=1)
    """Of the KV cache; not set: 512 MiB on a CPU, on a GPU what weights and the largest step leave."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """The share of the GPU's memory that may be in use."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt and output together; not set: the model's own."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences in one step."""
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Tokens in one step; the budget adapts below it."""
    max_step_ms: float = Field(default=300.0, gt=0)
    """What the budget keeps a step under."""
    prefix_caching: bool = True
    """Keep computed blocks for prompts that begin alike."""
    kvstore: str = Field(default="", pattern=r"^$|^[^,\s]+:[0-9]+(,[^,\s]+:[0-9]+)*$")
    """HOST:PORT of the node's KV store; it must be on the same host and share its memory folder. Several, with commas: the first that has
    something of a prompt brings it, all are given what is computed. Not set: none."""
    kvstore_load: Literal["auto", "always"] = "auto"
    """What is taken out of the store: what takes less time than to compute it, as measured, or always all that is there."""
    kvstore_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3"] = "auto"
    """In which blocks are stored: auto is the KV cache's own, exact; float8_e4m3 takes the least room."""
    kvstore_tls_ca: Path | None = None
    """PEM file: the authority of the stores' certificates; with it they are called with TLS and this pod's certificate."""
    kvstore_tls_name: str = ""
    """The name in the stores' certificates, whatever the address that they are called by; not set: the host of that address."""
    threads: int = Field(default=0, ge=0)
    """Of torch on the CPU; 0: all cores."""
    attention: str = "auto"
    """The attention backend: auto; paged-cpu or torch-cpu; on a GPU cudnn (long whole prompts by it), flash-attention-4
    or flashinfer (prompts by it), or triton. What it does not take, and small steps, which are CUDA graphs, are Triton's."""
    kernels: Literal["auto", "compiled", "triton", "torch"] = "auto"
    """auto: on a CPU compiled by numba where it is there, on a GPU triton."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    """Of the weights; dummy: random ones."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: weights in 8 bits (e4m3, a scale an output channel), embedding and output layer aside: less exact, on a GPU half the
    memory."""
    kv_buffer_device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where KV lies on its way: cuda, the memory of the GPU that has the cache; cpu, the host's, pinned; auto: cuda where UCX carries
    it between processes."""
    frame_bytes: Size | None = Field(default=None, ge=1)
    """Of one message of a KV push, at most; not set: 1 MiB, out of a GPU's memory 64 MiB."""
    staging_bytes: Size | None = Field(default=None, ge=1)
    """For KV on its way, each direction, taken at the start; not set: 64 MiB, of a GPU's memory 1 GiB."""
    transfer_depth: int | None = Field(default=None, ge=1)
    """Messages of KV in flight to one pod; not set: 8, out of a GPU's memory 16."""
    transfer_require: str = Field(default="", pattern=r"^$|^[a-z0-9_]+(,[a-z0-9_]+)*$")
    """Transports of UCX, with commas, of which a link to a decode pod must have one: cuda_ipc (NVLink), rc (RDMA). Not set: any."""
    transfer_fallback: Literal["refuse", "warn"] = "refuse"
    """What becomes of a link that has none of transfer_require."""
    transfer_probe_bytes: Size | None = Field(default=None, ge=0)
    """Sent at most, before a link's first push, to measure it; 0: not at all; not set: 8 MiB, out of a GPU's memory 256 MiB."""
    checksums: bool = True
    """Of all KV on the wire."""
    on_ticket_expiry: Literal["recompute", "fail"] = "recompute"
    """What a decode pod does when no push has come in time."""
    watermark: float = Field(default=0.01, ge=0, lt=1)
    """The share of blocks that reservations leave to running requests."""
    seed: int = 0
    """Of dummy weights."""
    ticket_timeout_ms: int = Field(default=30_000, ge=1)
    """How long a reservation waits for its push."""
    kv_events: bool = True
    """Publish on Redis what the prefix cache gains and loses: routers that look for prefixes read it."""
    kv_events_zmq: str | None = Field(default=None, pattern=r"^(tcp|ipc)://.+")
    """Publish the same by ZMQ in vLLM's schema: tcp://*:5557 listens, tcp://HOST:PORT connects; not set: not at all."""
    kv_events_zmq_replay: str | None = Field(default=None, pattern=r"^(tcp|ipc)://.+")
    """Where subscribers ask for what they missed: tcp://*:5558."""
    kv_events_zmq_format: Literal["map", "array"] = "map"
    """Of the events: map, or array for subscribers of older versions of vLLM."""
    kv_events_zmq_topic: str | None = Field(default=None, max_length=256)
    """Not set: kv@POD@MODEL, as llm-d's router reads it."""
    test_hooks: bool = False
    """Let tests hold the engine at chosen points."""

    fake_step_ms: float = Field(default=2.0, ge=0)
    """Of the fake engine: a step."""
    fake_num_blocks: int = Field(default=4096, ge=1)
    """Of the fake engine: its pool."""
    fake_natural_length: int = Field(default=64, ge=1)
    """Of the fake engine: tokens after which a choice ends by itself."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.engine == "process" and self.model is None:
            raise ValueError("option --model is required")
        if self.kv_events_zmq_replay is not None and self.kv_events_zmq is None:
            raise ValueError("option --kv-events-zmq-replay needs --kv-events-zmq")
        if self.kvstore_tls_name and self.kvstore_tls_ca is None:
            raise ValueError("option --kvstore-tls-name needs --kvstore-tls-ca")
        self.engine_config()
        return self

    def engine_config(self) -> EngineConfig:
        """Raises ValueError where the options do not go together."""
        options = {name: getattr(self, name) for name in EngineConfig.__struct_fields__}
        return EngineConfig(**{**options, "kv_events": self.tells_kv_events})

    @property
    def tells_kv_events(self) -> bool:
        """To anyone."""
        return self.kv_events or self.kv_events_zmq is not None

    def kvstore_options(self) -> KvStoreOptions | None:
        """Pods and stores have one token. None: there is no store."""
        if not self.kvstore:
            return None
        own = (self.tls_cert, self.tls_key) if self.kvstore_tls_ca is not None else (None, None)
        ca, cert, key = (str(path or "") for path in (self.kvstore_tls_ca, *own))
        return KvStoreOptions(
            addresses=tuple(self.kvstore.split(",")),
            token=self.token,
            tls_ca=ca,
            tls_name=self.kvstore_tls_name,
            tls_cert=cert,
            tls_key=key,
            load=self.kvstore_load,
            dtype=self.kvstore_dtype,
        )

    @property
    def model_name(self) -> str:
        return "fake" if self.model is None else self.model.resolve().name

    def make_pod_id(self) -> PodId:
        """The given one, or one that no other pod of this host has."""
        place = str(self.listen_grpc) if self.listen_grpc else secrets.token_hex(4)
        return PodId(self.pod_id or f"{self.role}-{socket.gethostname()}-{place}")
