"""What a router is started with."""

from functools import cached_property
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from kvrelay.common.access import PodAccess, token_option
from kvrelay.common.modelfiles import missing
from kvrelay.common.settings import Size, TracedSettings
from kvrelay.router.policies import PolicyName

MAX_KEY_FILE_BYTES = 1 << 20


class RouterSettings(TracedSettings):
    """Takes requests by HTTP and gRPC, and has the pods of its cluster serve them."""

    model: Path
    """Folder with the model's config.json, tokenizer and chat template; no weights are read."""
    served_model_name: str = Field(default="", max_length=256)
    """The model's name in the API; the folder's name where not set."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    http_port: int = Field(default=8000, ge=0, le=65535)
    """For the OpenAI API; 0 takes a free one."""
    grpc_port: int = Field(default=9000, ge=0, le=65535)
    """For kvrelay.v1.Inference; 0 takes a free one."""
    api_key_file: Path | None = None
    """A file with one API key a line; not set: everyone may ask."""
    max_body_bytes: Size = Field(default=4 << 20, ge=1024, le=1 << 30)
    """Of one request, as HTTP body or gRPC message."""
    max_queue: int = Field(default=1024, ge=0, le=1_000_000)
    """Requests that may wait for pods; more are told to come back later."""
    default_timeout_ms: int = Field(default=600_000, ge=1, le=86_400_000)
    """Of a request that names none."""
    max_timeout_ms: int = Field(default=3_600_000, ge=1, le=86_400_000)
    """The longest that a request may name; a longer one is cut to it."""
    pod_auth_token: SecretStr | None = None
    """What pods that were started with --auth-token want to see."""
    pod_auth_token_file: Path | None = None
    """A file with that token, in place of the token itself, which all users of the host could read in the command line."""
    pod_tls_ca: Path | None = None
    """PEM file: the authority that signed the pods' certificates; with it, pods are called over TLS."""
    pod_tls_name: str = ""
    """The name in pods' certificates, whatever the address that they are called by; not set: the host of that address."""
    pod_tls_cert: Path | None = None
    """PEM file: the router's own certificate chain, for pods that want to see one."""
    pod_tls_key: Path | None = None
    """PEM file: its private key."""
    console: bool = True
    """Serve the page /console; its data wants an API key where keys are set."""
    policy: PolicyName = "prefix_aware"
    """How pods are chosen: by prefixes and load, by load alone, in turn, or by the client's session."""
    local_prefill_tokens: int = Field(default=32, ge=0)
    """A decode pod computes prompts shorter than this by itself: moving their KV costs more than it saves. 0: never by length."""
    max_failures: int = Field(default=8, ge=0, le=100)
    """Failed attempts after which a request is given up."""
    unavailable_after_ms: int = Field(default=5000, ge=1)
    """A request that waits while no pod is alive is told so after this."""
    trace_sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """With --otlp-endpoint: the share of requests that are traced, of those whose client says nothing of it by a traceparent header."""
    drain_ms: int = Field(default=30_000, ge=0)
    """On SIGTERM, how long requests may take to end."""

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if not self.model.exists():
            raise ValueError(f"model: {missing(self.model)}")
        if not (self.model / "tokenizer.json").is_file():
            raise ValueError(f"model: {self.model} has no tokenizer.json")
        return self

    @model_validator(mode="after")
    def _check_pod_access(self) -> Self:
        token_option("pod-auth-token", self.pod_auth_token, self.pod_auth_token_file)
        if (self.pod_tls_cert is None) != (self.pod_tls_key is None):
            raise ValueError("options --pod-tls-cert and --pod-tls-key go together")
        for option in ("pod_tls_cert", "pod_tls_name"):
            if getattr(self, option) and self.pod_tls_ca is None:
                raise ValueError(f"option --{option.replace('_', '-')} needs --pod-tls-ca")
        return self

    def pod_access(self) -> PodAccess:
        """Raises Internal where a certificate cannot be read, ValueError where the token's file cannot."""
        token = token_option("pod-auth-token", self.pod_auth_token, self.pod_auth_token_file)
        own = {"cert": self.pod_tls_cert, "key": self.pod_tls_key}
        return PodAccess.load(token, ca=self.pod_tls_ca, name=self.pod_tls_name, **own)

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name

    @cached_property
    def api_keys(self) -> tuple[str, ...]:
        """Raises OSError where the file cannot be read, ValueError where it is too long or holds no key."""
        if self.api_key_file is None:
            return ()
        with self.api_key_file.open(encoding="utf-8") as file:
            text = file.read(MAX_KEY_FILE_BYTES + 1)
        keys = tuple(line.strip() for line in text.splitlines() if line.strip())
        if len(text) > MAX_KEY_FILE_BYTES or not keys:
            raise ValueError(f"{self.api_key_file} holds no key, or is over {MAX_KEY_FILE_BYTES} bytes")
        return keys
