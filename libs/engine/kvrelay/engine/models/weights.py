"""Takes a checkpoint's tensors one by one, and knows at the end what is missing, left over or misshapen."""

from collections.abc import Callable, Collection
from typing import Protocol

import torch

from kvrelay.engine.models.errors import BadWeights, UnsupportedModel
from kvrelay.kernels.scaled import Scaled, quantize

MULTIPLE = 16
"""What rows and columns of a weight in 8 bits come in: products on a GPU take no others."""


class TensorSource(Protocol):
    """A checkpoint, under the names of Hugging Face."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of its own memory: nothing keeps the file mapped."""
        ...


class Weights:
    """What a model is built from. Each tensor is read when it is asked for, so that few are in memory twice.

    Their values are those of `dtype`; they come as `arithmetic`, which holds all of them. With `in_8_bits`, a layer's products
    get theirs rounded to 8 bits, with a scale for each row.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        arithmetic: torch.dtype,
        on_progress: Callable[[int, int], None],
        device: torch.device | str = "cpu",
        *,
        in_8_bits: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self._source = source
        self._names = frozenset(source.names())
        self._dtype = dtype
        self._arithmetic = arithmetic
        self._in_8_bits = in_8_bits
        self._taken: set[str] = set()
        self._on_progress = on_progress

    @property
    def dtype(self) -> torch.dtype:
        """That the model computes in."""
        return self._arithmetic

    @property
    def stored_dtype(self) -> torch.dtype:
        """The narrowest that holds all values."""
        return self._dtype

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Raises BadWeights, which names the tensor, where it is missing or has another shape."""
        if name not in self._names:
            raise BadWeights(f"the weights lack {name}")
        found = self._source.shape(name)
        if found != shape:
            raise BadWeights(f"{name} has the shape {list(found)}, not {list(shape)}")
        tensor = self._source.read(name, self._dtype, self.device).to(self._arithmetic)
        self._taken.add(name)
        self._on_progress(len(self._taken), len(self._names))
        return tensor

    def merge(self, names: tuple[str, ...], rows: tuple[int, ...], *rest: int) -> torch.Tensor:
        """Several tensors, of `rows` rows each, one under the other."""
        return torch.cat([self.take(name, count, *rest) for name, count in zip(names, rows, strict=True)])

    def factor(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> torch.Tensor | Scaled:
        """What the products of a layer are made with: `merge`, in 8 bits if so asked.

        On a CPU those are widened again: it has no products of 8 bits, and its results are those of the same weights. Raises
        UnsupportedModel for shapes that are not in 8 bits.
        """
        weight = self.merge(names, rows, columns)
        if not self._in_8_bits:
            return weight
        if sum(rows) % MULTIPLE or columns % MULTIPLE:
            raise UnsupportedModel(
                f"{' and '.join(names)}: {sum(rows)} x {columns} is no multiple of {MULTIPLE} each way, which fp8 needs",
                "quantization",
            )
        scaled = quantize(weight)
        return scaled.wide(self._arithmetic) if self.device.type == "cpu" else scaled

    def finish(self, ignored: Callable[[str], bool]) -> None:
        """Raises BadWeights where tensors are left over that are not `ignored`."""
        extra = sorted(name for name in self._names - self._taken if not ignored(name))
        if extra:
            more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
            raise BadWeights(f"the weights hold what this model does not use: {', '.join(extra[:3])}{more}")
