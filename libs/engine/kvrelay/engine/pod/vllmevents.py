"""KV events as vLLM's subscribers read them, in MessagePack: the form of maps, and the older one of arrays.

    map      {ts, events: [{type, block_hashes, ...}, ...], data_parallel_rank}
    array    [ts, [[type, block_hashes, ...], ...], data_parallel_rank]       fields by place, absent ones at the end left out

Hashes are our block keys, 16 bytes. `extra_keys` has an entry a block, as the schema wants: what separates its tokens from equal ones.
"""

from collections.abc import Callable
from typing import Final, Literal

import msgspec

from kvrelay.common.blocks import NO_PARENT
from kvrelay.common.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch

Form = Literal["map", "array"]
Fields = dict[str, object]

MEDIUM: Final = "GPU"
"""The schema's name of the cache that the engine computes on, whatever the device."""
RANK: Final = 0
_encoder: Final = msgspec.msgpack.Encoder()


def encode(batch: EventBatch, form: Form) -> bytes:
    return _FORMS[form](batch)


def _map(batch: EventBatch) -> bytes:
    events = [{"type": name, **fields} for name, fields in map(_fields, batch.events)]
    return _encoder.encode({"ts": batch.time, "events": events, "data_parallel_rank": RANK})


def _array(batch: EventBatch) -> bytes:
    return _encoder.encode([batch.time, [[name, *f.values()] for name, f in map(_fields, batch.events)], RANK])


_FORMS: Final[dict[Form, Callable[[EventBatch], bytes]]] = {"map": _map, "array": _array}


def _fields(event: Event) -> tuple[str, Fields]:
    """The event's name and its fields, in the order of the array form."""
    match event:
        case BlockStored():
            return "BlockStored", _stored(event)
        case BlockRemoved(keys=keys):
            return "BlockRemoved", {"block_hashes": keys, "medium": MEDIUM}
        case AllBlocksCleared():
            return "AllBlocksCleared", {}


def _stored(event: BlockStored) -> Fields:
    fields: Fields = {
        "block_hashes": event.keys,
        "parent_block_hash": None if event.parent == NO_PARENT else event.parent,
        "token_ids": event.token_ids,
        "block_size": event.block_size,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
    }
    if event.extra_keys:
        fields["extra_keys"] = [event.extra_keys] * len(event.keys)
    return fields
