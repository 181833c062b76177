"""Checkpoints of safetensors: one file, or several with an index."""

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.engine.loader.checkpoint import DTYPES, Checkpoint, named_dtype, read_eos, read_json
from kvrelay.engine.models.errors import BadWeights

INDEX = "model.safetensors.index.json"
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class _File(Protocol):
    """What is used of `safe_open`, whose stub names no types."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> _Slice: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class SafetensorsSource:
    """Files are mapped while they are read; what is read is copied out."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._homes: dict[str, _File] = {}
        for path in files:
            try:
                opened: _File = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise BadWeights(f"{path.name} cannot be read: {error}") from error
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if name in self._homes:
                    raise BadWeights(f"{name} stands in two files")
                self._homes[name] = opened

    def names(self) -> Collection[str]:
        return self._homes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._homes[name].get_slice(name).get_shape())

    def stored(self, name: str) -> str:
        return self._homes[name].get_slice(name).get_dtype()

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.stored(name) not in _STORED:
            raise BadWeights(f"{name} is stored as {self.stored(name)}, which is not supported")
        return self._homes[name].get_tensor(name).to(device, dtype, copy=True)


def open_safetensors(folder: Path) -> Checkpoint:
    """Raises BadWeights."""
    files = _files(folder)
    source = SafetensorsSource(files)
    config = read_json(folder / "config.json")
    first = _STORED.get(source.stored(min(source.names(), default="")), "float32") if source.names() else "float32"
    return Checkpoint(config, source, named_dtype(config) or DTYPES[first], files, read_eos(folder, config))


def _files(folder: Path) -> tuple[Path, ...]:
    if (folder / INDEX).is_file():
        shards = read_json(folder / INDEX).part("weight_map")
        names = sorted({shards.text(name) for name in shards.names()})
        # Plain names only: an index does not reach outside of its folder.
        if any(Path(name).name != name for name in names):
            raise BadWeights(f"{INDEX} names a file outside of its folder")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise BadWeights(f"{INDEX} names {missing[0]}, which is not there")
        return tuple(folder / name for name in names)
    found = tuple(sorted(folder.glob("*.safetensors")))
    if not found:
        raise BadWeights(f"there are no safetensors in {folder}")
    return found
