"""The model that a router serves, as far as it has to know it: names and sizes, tokenizer and template; no weights."""

import json
from pathlib import Path

from kvrelay.common.errors import Internal
from kvrelay.common.modelfiles import tokenizer_digest
from kvrelay.common.tokenizer import Tokenizer


class ServedModel:
    """Read once, at start. Raises Internal, naming the file, where the folder holds no model that can be served."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            self.vocab_size = int(config["vocab_size"])
            self.max_model_len = int(config["max_position_embeddings"])
            self.tokenizer = Tokenizer(folder)
            self.tokenizer_digest = tokenizer_digest(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Internal(f"the model in {folder} cannot be read: {type(error).__name__}: {error}") from error
