"""A model's fingerprint: the namespace of its KV. Equal KV for equal tokens, or another fingerprint.

SHA-256 over: an XXH3-128 digest of every byte of each weights file, the tokenizer's bytes, and the configuration that shapes the KV
(RoPE settings among it), without the dtype that the model runs in; quantized weights are others. Whole files are read: loading reads them anyway, XXH3 keeps
up with memory, and a sample would miss a change to few tensors. It need not withstand an attacker: whoever can write the
weights decides what the model says. Names, times and places of the files do not count, so it is the same on every machine.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from kvrelay.common.ids import Fingerprint
from kvrelay.engine.models.config import ModelConfig

_DOMAIN = b"kvrelay.model.v1\0"
_PIECE_BYTES = 8 << 20


def fingerprint(
    model: ModelConfig,
    files: Iterable[Path],
    tokenizer: bytes,
    revision: str = "",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fingerprint:
    """`revision` names weights that no file holds, or what was made of those that one does. `on_progress` gets bytes read and bytes in all. Raises OSError."""
    paths = tuple(files)
    total = sum(path.stat().st_size for path in paths)
    described = json.dumps(dataclasses.asdict(model), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(_DOMAIN)
    for part in (described.encode(), hashlib.sha256(tokenizer).digest(), revision.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    done = 0
    for path in paths:
        content = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                content.update(piece)
                done += len(piece)
                on_progress(done, total)
        digest.update(content.digest())
    return Fingerprint(digest.hexdigest())
