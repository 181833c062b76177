"""Block identity: the documented encoding, written out here once more, and literal values that may never change."""

import hashlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.common.blocks import ID_BYTES, NO_PARENT, SPAN, BlockHasher, extra_keys
from kvrelay.common.ids import BlockId, Fingerprint

pytestmark = pytest.mark.unit

TOKENS = st.integers(0, 2**32 - 1)


def plain_id(fingerprint: str, parent: bytes, keys: list[str], tokens: list[int]) -> bytes:
    data = b"kvrelay.block.v1\x00"
    data += len(fingerprint.encode()).to_bytes(2, "little") + fingerprint.encode()
    data += parent
    data += len(keys).to_bytes(2, "little")
    for key in sorted(keys):
        data += len(key.encode()).to_bytes(2, "little") + key.encode()
    data += b"".join(token.to_bytes(4, "little") for token in tokens)
    return hashlib.sha256(data).digest()[:16]


def chain(tokens: list[int], fingerprint: str = "model", keys: tuple[str, ...] = ()) -> list[BlockId]:
    ids: list[BlockId] = []
    BlockHasher(Fingerprint(fingerprint), keys).extend(ids, tokens)
    return ids


VECTORS: list[tuple[str, tuple[str, ...], list[int], list[str]]] = [
    ("", (), list(range(16)), ["0c51699c7aaffcd5ccf0d17093b5e3f9"]),
    (
        "smollm2@1",
        ("salt:tenant-1", "lora:ä"),
        [*[0, 1, 2**32 - 1, 65536] * 8, 5],
        ["646d0a2017c1261517a84e92c89e6fce", "c10ceb220c81b0ab8877d727da0477d1"],
    ),
    ("m", ("salt:s",), [7] * 40, ["d8f82f80d14e695872fdb80dca33eee1", "57df729ad5692b4156deda88fa20a33e"]),
]


@pytest.mark.parametrize(("fingerprint", "keys", "tokens", "expected"), VECTORS)
def test_literal_values(fingerprint: str, keys: tuple[str, ...], tokens: list[int], expected: list[str]) -> None:
    assert [block_id.hex() for block_id in chain(tokens, fingerprint, keys)] == expected


@given(
    fingerprint=st.text(max_size=20),
    keys=st.lists(st.text(max_size=10), max_size=3),
    tokens=st.lists(TOKENS, max_size=70),
)
def test_the_chain_is_the_documented_encoding(fingerprint: str, keys: list[str], tokens: list[int]) -> None:
    expected: list[bytes] = []
    parent = bytes(16)
    for start in range(0, len(tokens) // SPAN * SPAN, SPAN):
        parent = plain_id(fingerprint, parent, keys, tokens[start : start + SPAN])
        expected.append(parent)
    assert chain(tokens, fingerprint, tuple(keys)) == expected


@given(tokens=st.lists(TOKENS, min_size=1, max_size=100), cut=st.integers(0, 100))
def test_extending_goes_on_where_it_stopped(tokens: list[int], cut: int) -> None:
    hasher = BlockHasher(Fingerprint("model"))
    ids: list[BlockId] = []
    hasher.extend(ids, tokens[:cut])
    hasher.extend(ids, tokens)
    assert ids == chain(tokens)
    assert len(ids) == len(tokens) // SPAN
    assert all(len(block_id) == ID_BYTES for block_id in ids)


def test_each_part_of_the_identity_counts() -> None:
    tokens = list(range(32))
    other = [*tokens[:31], 99]
    swapped = [tokens[1], tokens[0], *tokens[2:]]
    found = [
        chain(tokens),
        chain(tokens, fingerprint="model2"),
        chain(tokens, keys=("salt:a",)),
        chain(tokens, keys=("salt:b",)),
        chain(tokens, keys=("lora:a",)),
        chain(tokens, keys=("salt:a", "lora:a")),
        chain(swapped),
    ]
    assert len({block_id for ids in found for block_id in ids}) == 14
    assert chain(other)[0] == chain(tokens)[0]
    assert chain(other)[1] != chain(tokens)[1]


def test_the_parent_counts_and_lengths_keep_parts_apart() -> None:
    hasher = BlockHasher(Fingerprint("model"))
    tokens = list(range(16))
    first = hasher.next_id(NO_PARENT, tokens)
    assert hasher.next_id(first, tokens) != first
    ids: list[Any] = [chain(tokens, "ab", ("c",)), chain(tokens, "a", ("bc",)), chain(tokens, "ab", ("c", ""))]
    assert ids[0] != ids[1] != ids[2] != ids[0]


def test_the_order_of_keys_does_not_count() -> None:
    tokens = list(range(16))
    assert chain(tokens, keys=("salt:x", "lora:y")) == chain(tokens, keys=("lora:y", "salt:x"))


def test_extra_keys() -> None:
    assert extra_keys() == ()
    assert extra_keys(cache_salt="s") == ("salt:s",)
    assert extra_keys(lora="l") == ("lora:l",)
    assert extra_keys("s", "l") == ("salt:s", "lora:l")


@pytest.mark.parametrize("tokens", [list(range(15)), list(range(17)), [-1] * 16, [2**32] * 16])
def test_a_span_is_16_tokens_of_32_bits(tokens: list[int]) -> None:
    with pytest.raises(struct.error):
        BlockHasher(Fingerprint("model")).next_id(NO_PARENT, tokens)
