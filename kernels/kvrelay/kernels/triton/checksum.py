"""Leaves of the checksums that go with KV: XXH3-64 of 16 KiB each (`transfer.checksum`).

XXH3 has eight accumulators of 64 bits. What 64 bytes (a stripe) add to them depends on nothing before; only after each 1,024
bytes (a round) they are scrambled. So all of a leaf's rounds are summed side by side, 16 bytes a thread and stripe; what remains to
be done one after the other is small, and a thread does it for a pair of a leaf's accumulators.

The hash is Yann Collet's: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

import functools

import torch
import triton
import triton.language as tl

from kvrelay.kernels.reference import LEAF_BYTES

MIN_BYTES = 256
"""XXH3 has other ways for what is shorter than that, which KV has no need of."""
STRIPE_BYTES = 64

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_ACCUMULATORS = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip

# Places in the table of keys: of stripe i of a round, i and the seven after it.
_SCRAMBLE = tl.constexpr(16)
_LAST = tl.constexpr(24)
_FOLD = tl.constexpr(32)
_START = tl.constexpr(40)

_LEAF_WORDS = tl.constexpr(LEAF_BYTES // 8)
_ROUNDS = tl.constexpr(LEAF_BYTES // 1024)
_PRIME_32 = tl.constexpr(0x9E3779B1)
_PRIME_64 = tl.constexpr(0x9E3779B185EBCA87)
_PRIME_MIX = tl.constexpr(0x165667919E3779F9)


@functools.cache
def _keys(device: torch.device) -> torch.Tensor:
    """Words of the secret, at steps of 8 bytes; for the last stripe from byte 121 on, to fold from byte 11 on; and with
    what accumulators start."""
    words = _SECRET + _SECRET[121:185] + _SECRET[11:75] + b"".join(x.to_bytes(8, "little") for x in _ACCUMULATORS)
    return torch.frombuffer(bytearray(words), dtype=torch.uint64).to(device)


@triton.jit
def _sum_rounds(words, item_stride, item_words, num_leaves, keys, sums):
    """Of all stripes but the leaf's last, in `sums` [leaves, 16 rounds, 8]. A program's are a leaf's."""
    program = tl.program_id(0).to(tl.int64)
    words, stripes = _place(words, item_stride, item_words, num_leaves, program)
    rounds = tl.arange(0, _ROUNDS)[:, None, None]
    lane = 2 * tl.arange(0, 4)[None, :, None] + tl.arange(0, 2)[None, None, :]
    first = tl.zeros((_ROUNDS, 4), tl.uint64)
    second = tl.zeros((_ROUNDS, 4), tl.uint64)
    for i in tl.static_range(16):
        stripe = rounds * 16 + i
        inside = stripe < stripes - 1
        x = tl.load(words + stripe * 8 + lane, mask=inside, other=0)
        keyed = x ^ tl.load(keys + i + lane)
        first, second = _add(first, second, x, tl.where(inside, keyed.to(tl.uint32), 0), keyed)
    tl.store(sums + program * (_ROUNDS * 8) + rounds * 8 + lane, tl.join(first, second))


@triton.jit(do_not_specialize=["count"])
def _merge(words, item_stride, item_words, num_leaves, count, keys, sums, out, LEAVES: tl.constexpr):
    leaf = tl.program_id(0).to(tl.int64) * LEAVES + tl.arange(0, LEAVES)
    inside = leaf < count
    leaf = tl.minimum(leaf, count - 1)
    words, stripes = _place(words, item_stride, item_words, num_leaves, leaf)
    lane = 2 * tl.arange(0, 4)[:, None] + tl.arange(0, 2)
    first, second = tl.split(tl.load(keys + _START + lane)[None])
    first_key, second_key = tl.split(tl.load(keys + _SCRAMBLE + lane)[None])
    for i in tl.static_range(_ROUNDS):
        first_sum, second_sum = tl.split(tl.load(sums + leaf[:, None, None] * (_ROUNDS * 8) + i * 8 + lane[None]))
        goes_on = (i + 1) * 16 < stripes[:, None]
        first += first_sum
        second += second_sum
        first = tl.where(goes_on, (first ^ (first >> 47) ^ first_key) * _PRIME_32, first)
        second = tl.where(goes_on, (second ^ (second >> 47) ^ second_key) * _PRIME_32, second)
    x = tl.load((words + (stripes - 1) * 8)[:, None, None] + lane[None])
    keyed = x ^ tl.load(keys + _LAST + lane)[None]
    first, second = _add(first, second, x, keyed.to(tl.uint32), keyed)

    first_key, second_key = tl.split(tl.load(keys + _FOLD + lane)[None])
    first ^= first_key
    second ^= second_key
    merged = tl.sum((first * second) ^ tl.umulhi(first, second), axis=1)
    merged += (stripes * 64).to(tl.uint64) * _PRIME_64
    merged = (merged ^ (merged >> 37)) * _PRIME_MIX
    tl.store(out + leaf, merged ^ (merged >> 32), mask=inside)


@triton.jit
def _place(words, item_stride, item_words, num_leaves, leaf):
    """Where the words of a leaf, or of several, begin, and how many stripes they have."""
    item, at = leaf // num_leaves, leaf % num_leaves * _LEAF_WORDS
    return words + item * item_stride + at, tl.minimum(item_words - at, _LEAF_WORDS) // 8


@triton.jit
def _add(first, second, x, low, keyed):
    """What is read is added to the neighbour's accumulator, the product of its keyed halves to its own."""
    first_product, second_product = tl.split(low.to(tl.uint64) * (keyed >> 32))
    first_x, second_x = tl.split(x)
    return first + first_product + second_x, second + second_product + first_x


def leaves(data: torch.Tensor) -> torch.Tensor:
    """See `reference.leaves`. Each of `data` begins at a multiple of 8 bytes.

    Raises ValueError for a last leaf under 256 bytes or not of whole stripes of 64.
    """
    count, size = data.shape
    last = size % LEAF_BYTES
    if size == 0 or last % STRIPE_BYTES or 0 < last < MIN_BYTES:
        raise ValueError(f"a leaf of {last} bytes is not hashed here")
    num_leaves = triton.cdiv(size, LEAF_BYTES)
    out = torch.empty((count, num_leaves), dtype=torch.uint64, device=data.device)
    if count:
        words, keys = data.view(torch.uint64), _keys(data.device)
        sums = out.new_empty((out.numel(), LEAF_BYTES // 1024, 8))
        place = (words, words.stride(0), size // 8, num_leaves)
        _sum_rounds[(out.numel(),)](*place, keys, sums, num_warps=2)
        _merge[(triton.cdiv(out.numel(), 8),)](*place, out.numel(), keys, sums, out, LEAVES=8, num_warps=1)
    return out
