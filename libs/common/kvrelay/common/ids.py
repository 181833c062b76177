"""Names of things, as types of their own: a pod's id is never taken for a request's."""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
RouterId = NewType("RouterId", str)
PodId = NewType("PodId", str)
NodeId = NewType("NodeId", str)
"""Of a KV store, and the node that it serves; the same after a restart."""
Epoch = NewType("Epoch", str)
"""One life of a process. Random, compared only for equality: a restarted pod has another."""
Fingerprint = NewType("Fingerprint", str)
"""Of a model: the namespace of its block ids (weights revision, tokenizer revision, RoPE)."""
BlockId = NewType("BlockId", bytes)
"""Of a span of 16 tokens and all before it: 16 bytes, see `kvrelay.common.blocks`."""


def new_epoch() -> Epoch:
    return Epoch(secrets.token_hex(8))


def new_request_id(prefix: str = "req") -> RequestId:
    return RequestId(f"{prefix}-{secrets.token_hex(12)}")
