"""Compressed tiers: what comes back is what went in, after a restart as well; what is damaged or lies about itself is a miss."""

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvrelay.common.layout import KvDtype
from kvrelay.kvstore.policy import Lru
from kvrelay.kvstore.tiers.base import Corrupt, Missing
from kvrelay.kvstore.tiers.compressed import CompressedSinking, decode, decoded, encode
from kvrelay.kvstore.tiers.files import FileTier
from kvrelay.transfer.block import BlockInfo, checksum
from tests.kvstore.blocks import make_block, read
from tests.kvstore.file_tier import files_of, flip

pytestmark = pytest.mark.unit

SIZE = 64 << 10


def files(directory: Path, limit_bytes: int = 4 << 20) -> FileTier:
    return FileTier(directory, limit_bytes, Lru(), direct="auto", threads=2, timeout_s=20)


def kv_block(rng: random.Random, size: int = SIZE) -> tuple[BlockInfo, memoryview]:
    """As KV is: floats of about one size."""
    info, _ = make_block(rng, size)
    values = np.random.default_rng(rng.randrange(1 << 30)).normal(size=size // 4).astype(np.float32)
    payload = memoryview(values.view(np.uint8)).toreadonly()
    info = msgspec.structs.replace(info, dtype=KvDtype.FLOAT32, checksum=0)
    return msgspec.structs.replace(info, checksum=checksum(info, payload)), payload


async def test_what_went_in_comes_back_after_a_restart(tmp_path: Path) -> None:
    rng = random.Random(1)
    alike, noise, odd = kv_block(rng), make_block(rng, SIZE), make_block(rng, 777)
    zeros, _ = make_block(rng, SIZE)
    zeros = msgspec.structs.replace(zeros, checksum=0)
    zeros = msgspec.structs.replace(zeros, checksum=checksum(zeros, memoryview(bytes(SIZE))))
    blocks = [alike, noise, odd, (zeros, memoryview(bytes(SIZE)))]
    tier = CompressedSinking(files(tmp_path / "t"))
    await tier.open()
    for info, payload in blocks:
        assert await tier.put(info, payload) == []
    on_disk = sum(files_of(tmp_path / "t").values())
    assert tier.used_bytes == on_disk < sum(info.size for info, _ in blocks)
    await tier.close()

    tier = CompressedSinking(files(tmp_path / "t"))
    assert {info.id: info for info in await tier.open()} == {info.id: info for info, _ in blocks}
    assert len(tier) == len(list(tier.ids())) == 4
    for info, payload in blocks:
        assert tier.find(info.id) == info
        assert await read(tier, info) == bytes(payload)
    assert tier.coldest() == blocks[0][0]
    await tier.evict(blocks[0][0].id)
    await tier.remove(blocks[1][0].id)
    assert [tier.find(info.id) for info, _ in blocks[:2]] == [None, None]
    await tier.close()


async def test_damage_is_a_miss(tmp_path: Path) -> None:
    info, payload = kv_block(random.Random(2))
    tier = CompressedSinking(files(tmp_path / "t"))
    await tier.open()
    await tier.put(info, payload)
    (path,) = files_of(tmp_path / "t")
    flip(path, 8 * 6000)
    with pytest.raises(Corrupt):
        await read(tier, info)
    with pytest.raises(Missing):
        await read(tier, info)
    await tier.close()


@pytest.mark.parametrize("packed", [b"", b"not zstd at all", encode(*kv_block(random.Random(4)))[1]])  # type: ignore[index]
async def test_what_does_not_decode_to_what_it_says_is_a_miss(tmp_path: Path, packed: bytes) -> None:
    """Though its checksum is right: of another version, say."""
    info, _ = kv_block(random.Random(3))
    lie = msgspec.structs.replace(
        info, size=len(packed), encoding="zstd", decoded_size=SIZE // 2, decoded_checksum=info.checksum, checksum=0
    )
    lie = msgspec.structs.replace(lie, checksum=checksum(lie, memoryview(packed)))
    inner = files(tmp_path / "t")
    tier = CompressedSinking(inner)
    await tier.open()
    await inner.put(lie, memoryview(packed))
    with pytest.raises(Corrupt):
        await read(tier, decoded(lie))
    assert tier.find(info.id) is None
    await tier.close()


async def test_what_is_evicted_for_a_block_is_told_as_it_was(tmp_path: Path) -> None:
    rng = random.Random(5)
    tier = CompressedSinking(files(tmp_path / "t", limit_bytes=2 * (SIZE + 4096)))
    await tier.open()
    blocks = [kv_block(rng) for _ in range(6)]
    gone = [evicted for info, payload in blocks for evicted in await tier.put(info, payload)]
    assert gone
    assert gone == [info for info, _ in blocks[: len(gone)]]
    await tier.close()


def test_encoding_is_without_loss() -> None:
    info, payload = kv_block(random.Random(6))
    encoded = encode(info, payload)
    assert encoded is not None
    kept, packed = encoded
    assert decoded(kept) == info
    assert kept.size == len(packed) < info.size
    into = bytearray(info.size)
    decode(kept, memoryview(packed), memoryview(into))
    assert into == payload
