"""What of a model's files is read without torch and without the tokenizer's library."""

import hashlib
from pathlib import Path


def tokenizer_bytes(model: Path) -> bytes:
    """Of the tokenizer.json of a model's folder, or beside its file. Empty where there is none: a GGUF file holds its own."""
    file = (model if model.is_dir() else model.parent) / "tokenizer.json"
    return file.read_bytes() if file.is_file() else b""


def tokenizer_digest(model: Path) -> str:
    """SHA-256 of it in hex; empty where there is none."""
    content = tokenizer_bytes(model)
    return hashlib.sha256(content).hexdigest() if content else ""
