"""What of a model's files is read without torch and without the tokenizer's library."""

import hashlib
import re
from pathlib import Path

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def missing(model: Path) -> str:
    """What to tell who named `model`, where nothing is: also where it is a name on a hub, since nothing is fetched from there."""
    if not _HUB_NAME.fullmatch(str(model)):
        return f"{model} is no directory"
    folder = f"var/models/{model.name}"
    return (
        f"{model} is no directory; if it is a name on Hugging Face's hub, fetch it first (hf download {model} --local-dir {folder}) "
        f"and give that directory"
    )


def tokenizer_bytes(model: Path) -> bytes:
    """Of the tokenizer.json of a model's folder, or beside its file. Empty where there is none: a GGUF file holds its own."""
    file = (model if model.is_dir() else model.parent) / "tokenizer.json"
    return file.read_bytes() if file.is_file() else b""


def tokenizer_digest(model: Path) -> str:
    """SHA-256 of it in hex; empty where there is none."""
    content = tokenizer_bytes(model)
    return hashlib.sha256(content).hexdigest() if content else ""
