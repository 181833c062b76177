"""Where the KV lies: one tensor for all layers, in blocks, and its rows as plain bytes for the transfer."""

import mmap
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.common.blocks import SPAN
from kvrelay.common.errors import Unsupported
from kvrelay.common.ids import Fingerprint
from kvrelay.common.layout import KvDtype, KvGroup, KvGroupKind, KvLayout
from kvrelay.engine.convert import Bits, convert, storage
from kvrelay.engine.models.config import ModelConfig
from kvrelay.transfer.checksum import leaves
from kvrelay.transfer.copies import Check, Copy, Done, Part
from kvrelay.transfer.staging import host_memory
from kvrelay.transfer.transport import Memory

TORCH_DTYPES = {
    KvDtype.FLOAT32: torch.float32,
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.FLOAT16: torch.float16,
}


def kv_dtype_of(name: str, model_dtype: torch.dtype) -> KvDtype:
    """Of the option `kv_dtype`; auto is the model's. Raises Unsupported."""
    if name == "auto":
        return next(kv for kv, dtype in TORCH_DTYPES.items() if dtype is model_dtype)
    if KvDtype(name) not in TORCH_DTYPES:
        raise Unsupported(f"a KV cache of {name} is not supported", "kv_dtype")
    return KvDtype(name)


class KvCache:
    """`data` [layers, 2, num_blocks, block_size, Hkv, D]: a token's keys in one layer are one contiguous row.

    The pages are the system's zeros until they are first written: memory grows with use, and what was never written
    is finite. Whose a block is, the block pool says; nothing here checks it.
    A slot is block × block_size + offset.
    """

    def __init__(self, model: ModelConfig, dtype: KvDtype, block_size: int, kv_cache_bytes: int) -> None:
        """As many blocks as fit into `kv_cache_bytes`. Raises Unsupported where not two do, or where there is not as much memory."""
        self.dtype = dtype
        self.block_size = block_size
        self._model = model
        row_bytes = model.kv_size * dtype.itemsize
        block_bytes = model.num_layers * 2 * block_size * row_bytes
        self.num_blocks = kv_cache_bytes // block_bytes
        if self.num_blocks < 2:
            raise Unsupported(
                f"kv_cache_bytes {kv_cache_bytes} is under two blocks of {block_bytes} bytes", "kv_cache_bytes"
            )
        self.data = self._allocate().view(
            model.num_layers, 2, self.num_blocks, block_size, model.num_kv_heads, model.head_dim
        )
        # Views for attention, made once: a layer's keys and values by slot, [slots, Hkv, D], and both by block (values after keys).
        self.keys = [layer[0].flatten(0, 1) for layer in self.data]
        self.values = [layer[1].flatten(0, 1) for layer in self.data]
        self._blocks = [layer.flatten(0, 1) for layer in self.data]

    def _allocate(self) -> torch.Tensor:
        """Zeros, for all blocks. Raises Unsupported."""
        entries = self.num_blocks * self.block_size * self._model.num_layers * 2 * self._model.kv_size
        size = entries * self.dtype.itemsize
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise Unsupported(
                f"kv_cache_bytes: {size} bytes cannot be had: {error.strerror}", "kv_cache_bytes"
            ) from error
        raw = np.frombuffer(memory, np.dtype(f"u{self.dtype.itemsize}"))
        self._rows = raw.reshape(self._model.num_layers, 2, -1, self._model.kv_size)
        return torch.frombuffer(memory, dtype=torch.uint8).view(TORCH_DTYPES[self.dtype])

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self._model.kv_size * self.dtype.itemsize

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keys and values [T, Hkv, D], of the cache's dtype, into `slots` int64 [T]."""
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)

    def gather(self, layer: int, indices: torch.Tensor, out: torch.Tensor) -> None:
        """Blocks into `out` [len(indices), block_size, Hkv, D]; block b's keys are index b, its values b + num_blocks."""
        torch.index_select(self._blocks[layer], 0, indices, out=out)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Each source block onto its target, in order, in all layers."""
        for source, target in pairs:
            self.data[:, :, target].copy_(self.data[:, :, source])

    def slots(self, blocks: Sequence[int], first_token: int, num_tokens: int) -> NDArray[np.int64]:
        """Where a sequence's tokens lie, whose blocks are `blocks`."""
        first_block = first_token // self.block_size
        end_block = -(-(first_token + num_tokens) // self.block_size)
        starts = np.asarray(blocks[first_block:end_block], np.int64) * self.block_size
        slots: NDArray[np.int64] = (starts[:, None] + np.arange(self.block_size)).reshape(-1)
        offset = first_token - first_block * self.block_size
        return slots[offset : offset + num_tokens]

    def read_part(self, part: Part, blocks: Sequence[int], out: Memory, *, hashed: bool) -> Copy[bytes]:
        """A sequence's rows, whose blocks are `blocks`, into `out` of this cache's staging. See `transfer.copies.Part`.

        Gives the leaves of their checksum where it is `hashed`. Uses no thread of torch's. Raises IncompatibleLayout for a type
        that is not converted.
        """
        assert isinstance(out, np.ndarray)
        slots = self.slots(blocks, part.first_token, part.num_tokens)
        for plane, rows in zip(self._planes_of(part), self._packed(part, out), strict=True):
            if part.dtype is self.dtype:
                # A mode other than raise writes into `out` without a copy between; slots are the pool's own.
                np.take(plane, slots, axis=0, out=rows, mode="clip")
            else:
                convert(plane[slots], self.dtype, rows, part.dtype)
        return Done(leaves(out.data) if hashed else b"")

    def write_part(self, part: Part, blocks: Sequence[int], data: Memory, check: Check | None) -> Copy[None]:
        """What `read_part` gave, into a sequence's blocks, once `check` has found its leaves right."""
        assert isinstance(data, np.ndarray)
        if check is not None:
            check(leaves(data.data))
        slots = self.slots(blocks, part.first_token, part.num_tokens)
        for plane, rows in zip(self._planes_of(part), self._packed(part, data), strict=True):
            if part.dtype is self.dtype:
                plane[slots] = rows
            else:
                converted = np.empty(rows.shape, plane.dtype)
                convert(rows, part.dtype, converted, self.dtype)
                plane[slots] = converted
        return Done(None)

    def enter_thread(self) -> None:
        """Makes the calling thread one that can use the memory where the cache lies."""

    def staging(self, num_bytes: int, *, on_device: bool) -> Memory:
        """For parts, for as long as the process lives. `on_device`: where the cache lies, if it can; else in the host's memory.

        Raises Unsupported where there is no room.
        """
        return host_memory(num_bytes)

    def _planes_of(self, part: Part) -> Bits:
        """Keys and values of each of the part's layers, by slot."""
        planes: Bits = self._rows[part.layer : part.layers.stop].reshape(2 * part.num_layers, -1, self._model.kv_size)
        return planes

    def _packed(self, part: Part, data: NDArray[np.uint8]) -> Bits:
        return data.view(storage(part.dtype)).reshape(2 * part.num_layers, part.num_tokens, self._model.kv_size)

    def span_bytes(self, dtype: KvDtype) -> int:
        """Of 16 tokens in all layers, as `read_span` gives them."""
        return self._model.num_layers * SPAN * 2 * self._model.kv_size * dtype.itemsize

    def read_span(self, slot: int, out: NDArray[np.uint8], dtype: KvDtype) -> None:
        """The 16 tokens from `slot` on, of one block, as `dtype` into `out` [layers, 2, 16, Hkv, D] as bytes.

        Uses no thread of torch's. Raises IncompatibleLayout for a type that is not converted.
        """
        rows = self._rows[:, :, slot : slot + SPAN]
        if dtype is self.dtype:
            np.copyto(self._span(out, dtype), rows)
        else:
            convert(np.ascontiguousarray(rows), self.dtype, self._span(out, dtype), dtype)

    def write_span(self, slot: int, data: NDArray[np.uint8], dtype: KvDtype) -> None:
        """What `read_span` gave as `dtype`, into the 16 slots from `slot` on."""
        rows = self._rows[:, :, slot : slot + SPAN]
        if dtype is self.dtype:
            np.copyto(rows, self._span(data, dtype))
        else:
            converted = np.empty(rows.shape, rows.dtype)
            convert(self._span(data, dtype), dtype, converted, self.dtype)
            np.copyto(rows, converted)

    def read_spans(self, slots: Sequence[int], outs: Sequence[NDArray[np.uint8]], dtype: KvDtype) -> list[bytes]:
        """`read_span` of each. Gives the leaves of the checksum of each as it was read (see `transfer.checksum`)."""
        found = []
        for slot, out in zip(slots, outs, strict=True):
            self.read_span(slot, out, dtype)
            found.append(leaves(out.data))
        return found

    def write_spans(self, slots: Sequence[int], datas: Sequence[NDArray[np.uint8]], dtype: KvDtype) -> list[bytes]:
        """`write_span` of each. Gives the leaves of what was written, or of what was there after that: where they are right,
        so is what was written."""
        found = []
        for slot, data in zip(slots, datas, strict=True):
            self.write_span(slot, data, dtype)
            found.append(leaves(data.data))
        return found

    def pin(self, memory: NDArray[np.uint8]) -> Callable[[], None]:
        """Spans will be copied to and from `memory`, until what this gives is called. May take seconds, on any thread."""
        return lambda: None

    def _span(self, data: NDArray[np.uint8], dtype: KvDtype) -> Bits:
        return data.view(storage(dtype)).reshape(self._model.num_layers, 2, SPAN, self._model.kv_size)

    def layout(self, fingerprint: Fingerprint) -> KvLayout:
        group = KvGroup(
            kind=KvGroupKind.FULL,
            layers=tuple(range(self._model.num_layers)),
            block_size=self.block_size,
            dtype=self.dtype,
            num_kv_heads=self._model.num_kv_heads,
            head_dim=self._model.head_dim,
            shard_heads=self._model.num_kv_heads,
        )
        return KvLayout(fingerprint=fingerprint, groups=(group,))
