"""KV made of numbers that tell their own place, for sources and sinks without an engine."""

import asyncio
import secrets

import numpy as np
import numpy.typing as npt

from kvrelay.common.errors import KvrelayError
from kvrelay.common.ids import Epoch, Fingerprint, PodId, RequestId
from kvrelay.common.layout import KvDtype, KvGroup, KvGroupKind, KvLayout
from kvrelay.common.request import ChoiceDelta, Ticket, TicketTarget
from kvrelay.transfer.checksum import leaves
from kvrelay.transfer.copies import Check, Copy, Done, Part
from kvrelay.transfer.frame import FinalFrame
from kvrelay.transfer.sender import PushHandle
from kvrelay.transfer.transport import Memory

HEADS = 2
HEAD_DIM = 8
NUMPY = {KvDtype.FLOAT32: np.float32, KvDtype.FLOAT16: np.float16}


def make_layout(num_layers: int = 4, dtype: KvDtype = KvDtype.FLOAT32, fingerprint: str = "model") -> KvLayout:
    group = KvGroup(
        kind=KvGroupKind.FULL,
        layers=tuple(range(num_layers)),
        block_size=16,
        dtype=dtype,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        shard_heads=HEADS,
    )
    return KvLayout(fingerprint=Fingerprint(fingerprint), groups=(group,))


def make_ticket(
    address: bytes, epoch: str, layout: KvLayout, first: int, end: int, *, timeout_ms: int = 10_000, generation: int = 7
) -> Ticket:
    bits = secrets.randbits(40) or 1
    target = TicketTarget(rank=0, group=0, address=address, ticket_bits=bits, first_token=first, end_token=end)
    return Ticket(
        request_id=RequestId(f"r-{bits}"),
        attempt=1,
        pod_id=PodId("decode"),
        epoch=Epoch(epoch),
        generation=generation,
        timeout_ms=timeout_ms,
        targets=(target,),
        layout=layout,
    )


def kv_of(seed: int, num_layers: int, num_tokens: int) -> npt.NDArray[np.float32]:
    """[layers, K or V, tokens, heads, head size]"""
    shape = (num_layers, 2, num_tokens, HEADS, HEAD_DIM)
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


class ArraySource:
    def __init__(self, kv: npt.NDArray[np.float32]) -> None:
        self.kv = kv
        self.reads = 0

    def read(self, part: Part, out: Memory, *, hashed: bool) -> Copy[bytes]:
        self.reads += 1
        return Done(self.pack(part, out, hashed=hashed))

    def pack(self, part: Part, out: Memory, *, hashed: bool) -> bytes:
        assert isinstance(out, np.ndarray)
        rows = self.kv[part.layer : part.layers.stop, :, part.first_token : part.end_token].astype(NUMPY[part.dtype])
        out[:] = rows.reshape(-1).view(np.uint8)
        return leaves(out.data) if hashed else b""


class ArraySink:
    """`kv` starts as NaN: what was not written shows."""

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        self.kv = np.full((num_layers, 2, num_tokens, HEADS, HEAD_DIM), np.nan, np.float32)
        self.writes = 0
        self.ended: asyncio.Future[FinalFrame] = asyncio.get_running_loop().create_future()

    def write(self, part: Part, data: Memory, check: Check | None) -> Copy[None]:
        return Done(self.unpack(part, data, check))

    def unpack(self, part: Part, data: Memory, check: Check | None) -> None:
        assert isinstance(data, np.ndarray)
        if check is not None:
            check(leaves(data.data))
        self.writes += 1
        rows = data.view(NUMPY[part.dtype]).reshape(part.num_layers, 2, part.num_tokens, HEADS, HEAD_DIM)
        self.kv[part.layer : part.layers.stop, :, part.first_token : part.end_token] = rows

    def complete(self, final: FinalFrame) -> None:
        self.ended.set_result(final)

    def failed(self, error: KvrelayError) -> None:
        self.ended.set_exception(error)

    @property
    def untouched(self) -> bool:
        return self.writes == 0 and bool(np.isnan(self.kv).all())


def make_final(num_tokens: int) -> FinalFrame:
    delta = ChoiceDelta(request_id=RequestId("r"), choice=0, index=0, token_ids=(42,))
    return FinalFrame(deltas=(delta,), num_prompt_tokens=num_tokens, extra=b"state")


def feed(handle: PushHandle, num_layers: int, num_tokens: int, chunk: int) -> None:
    """As an engine that computes `chunk` tokens a step, layer by layer, and is done at once."""
    for start in range(0, num_tokens, chunk):
        end = min(start + chunk, num_tokens)
        for layer in range(num_layers):
            if end == num_tokens and layer == num_layers - 1:
                handle.mark_last_layer()
            handle.ready(layer, start, end)
    handle.finish(make_final(num_tokens))
