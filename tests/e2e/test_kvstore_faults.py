"""What goes wrong below a KV store, on real pods: bits that flip, disks and buckets that fail. All answers come, and none is wrong.

One stack, with tiers so small that a few prompts fill them: what a conversation has left is in memory, then in a file, then in S3.
"""

import asyncio
import contextlib
import itertools
import mmap
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvrelay.cli.stack import Stack
from kvrelay.common.blocks import BlockHasher
from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.kvstore.level import HIGH_SHARE
from kvrelay.kvstore.tiers.blockfile import LOCK_NAME, PAGE_BYTES
from kvrelay.v1 import kvstore_pb2 as pb
from tests.exactness.fixtures import OVER_PREFILL_PODS, running
from tests.exactness.reference import References
from tests.exactness.served import ask_all, assert_whole
from tests.exactness.small import TOKEN_BYTES, VOCAB, make
from tests.exactness.storing import all_attached, all_stored, assert_store_whole, blocks_of, stat
from tests.kvstore.faulty_s3 import Fault, FaultyS3, serving
from tests.kvstore.file_tier import flip, mount_at, remount, unmount
from tests.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300, func_only=True)]

BLOCK = 16
BLOCK_BYTES = BLOCK * TOKEN_BYTES
OUTPUT_TOKENS = 6
PROMPT_TOKENS, LONG_TOKENS = 200, 590
FOUND = (PROMPT_TOKENS - 1) // BLOCK * BLOCK
"""Tokens of a prompt that the store can have."""
POD_BLOCKS = 40
"""Of a pod's own cache: a long prompt leaves nothing else in it."""
TIER_BLOCKS = 64
"""Of memory, and of files: one long prompt fits beside another one, two do not."""
DISK_BYTES = 4 << 20
COOL_SECONDS = 8.0
"""Within which a tier that failed is used again."""


@dataclass
class Scene:
    """A stack, and what its store keeps things in."""

    stack: Stack
    references: References
    s3: FaultyS3
    folder: Path
    disk: Path
    not_mounted: str
    """Why the disk is none of its own."""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def new(self, length: int = PROMPT_TOKENS) -> tuple[int, ...]:
        rng = random.Random(next(self.numbers))
        return tuple(rng.randrange(3, VOCAB) for _ in range(length))

    def ask(self, *prompts: Sequence[int]) -> list[int]:
        """How many tokens of each were found, once all answers are known to be right."""
        answers = asyncio.run(ask_all(self.stack.url, prompts, 2, max_tokens=OUTPUT_TOKENS, ignore_eos=True))
        for prompt, (answer,) in zip(prompts, answers, strict=True):
            self.references.of(prompt, OUTPUT_TOKENS).check(f"{len(prompt)} tokens", answer.tokens, answer.logprobs)
        return [answer.cached_tokens for (answer,) in answers]

    def keep(self, tier: str) -> tuple[int, ...]:
        """A prompt whose blocks are in that tier, and in no pod."""
        wanted = {pb.Tier.Value(f"TIER_{tier.upper()}")}
        for _ in range(12):
            prompt = self.new()
            self.ask(prompt)
            self.settled()
            while pb.TIER_UNSPECIFIED not in self.places(prompt):  # else some were refused: there was no room yet
                self.ask(self.new(LONG_TOKENS))
                self.settled()
                if set(self.places(prompt)) == wanted:
                    return prompt
                if set(self.places(prompt)) == {pb.TIER_S3}:
                    break
        raise AssertionError(f"no prompt was in the {tier} tier, all of it")

    def settled(self) -> None:
        """Nothing waits to be stored, or to go down."""

        def sunk() -> bool:
            tiers = [self.tier(name) for name in ("cpu", "file")]
            return all(tier.used_bytes <= HIGH_SHARE * tier.limit_bytes for tier in tiers if tier.healthy)

        eventually(
            lambda: all_stored(self.stack) and sunk(), "what was computed is stored, and what is too much went down"
        )

    def finds(self, prompt: Sequence[int]) -> None:
        """All of it, in the end: memory that has not gone down yet refuses some, and a store that is slow is left alone for a while."""

        def found() -> bool:
            self.ask(self.new(LONG_TOKENS))
            self.settled()
            return self.ask((*prompt, 8)) == [FOUND]

        eventually(found, "the prompt is found")

    def places(self, prompt: Sequence[int]) -> "list[pb.Tier.ValueType]":
        """The nearest tier of each of its blocks; TIER_UNSPECIFIED: it is in none."""
        found = {block.id: block for block in blocks_of(self.stack.node("kvstore-0"))}
        ids: list[BlockId] = []
        for fingerprint in {block.fingerprint for block in found.values()}:
            BlockHasher(Fingerprint(fingerprint)).extend(ids, prompt)
        return [found[block_id].tier if block_id in found else pb.TIER_UNSPECIFIED for block_id in ids]

    def tier(self, name: str) -> pb.TierStat:
        wanted = pb.Tier.Value(f"TIER_{name.upper()}")
        return next(tier for tier in stat(self.stack.node("kvstore-0")).tiers if tier.tier == wanted)

    def healthy(self) -> None:
        eventually(lambda: all(self.tier(name).healthy for name in ("file", "s3")), "all tiers are used", COOL_SECONDS)

    def whole(self) -> None:
        """Nothing is held for anyone any more."""
        assert_whole(self.stack.pods, 5.0)
        assert_store_whole(self.stack.node("kvstore-0"))


@pytest.fixture(scope="module")
def scene(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("faults")
    small, disk = make(folder / "small" / "model", model_dir), folder / "disk"
    disk.mkdir()
    engine = {"kv-cache-bytes": str(POD_BLOCKS * BLOCK_BYTES), "max-model-len": "620", "kvstore-load": "always"}
    with contextlib.ExitStack() as leaving:
        s3 = leaving.enter_context(serving())
        not_mounted = mount_at(disk, "tmpfs", f"size={DISK_BYTES}")
        if not not_mounted:
            leaving.callback(unmount, disk)
        for name in ("access_key_id", "secret_access_key"):
            (folder / name).write_text("who")
        tiers = [
            f"{{tier: cpu, bytes: {TIER_BLOCKS * BLOCK_BYTES}, policy: lru}}",
            f"{{tier: file, bytes: {TIER_BLOCKS * (BLOCK_BYTES + PAGE_BYTES)}, directory: {disk}/blocks, policy: lru}}",
            f"{{tier: s3, bytes: 64MiB, bucket: bucket, endpoint: '{s3.endpoint}', region: us-east-1, timeout_seconds: 0.5,"
            f" access_key_id_file: {folder}/access_key_id, secret_access_key_file: {folder}/secret_access_key}}",
        ]
        options = {"prefill": 1, "decode": 1, "kvstore": 1, "kvstore_tiers": f"[{', '.join(tiers)}]"}
        stores = {"kvstore-0": {"arena-directory": str(folder)}}
        stack = leaving.enter_context(
            running(
                small,
                folder / "run",
                engine_options=engine,
                pod_options=stores,
                router_options=OVER_PREFILL_PODS,
                **options,
            )
        )
        eventually(lambda: all_attached(stack), "all pods are attached")
        yield Scene(stack, References(small), s3, folder, disk, not_mounted)


# Bits that flip.


def flip_memory(scene: Scene) -> None:
    (arena,) = scene.folder.glob("*.arena")
    with arena.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        for at in range(100, len(view), PAGE_BYTES):
            view[at] ^= 8


def flip_files(scene: Scene) -> None:
    for path in scene.disk.glob("blocks/**/*"):
        if path.is_file() and path.name != LOCK_NAME:
            flip(path, 8 * (PAGE_BYTES + 5000))


def flip_objects(scene: Scene) -> None:
    for key, (data, written) in scene.s3.objects.items():
        scene.s3.objects[key] = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], written


def flip_answers(scene: Scene) -> None:
    scene.s3.always(Fault.FLIPPED, "GET")


@pytest.mark.parametrize(
    ("tier", "damage"), [("cpu", flip_memory), ("file", flip_files), ("s3", flip_objects), ("s3", flip_answers)]
)
def test_flipped_bits_are_a_miss(scene: Scene, tier: str, damage: Callable[[Scene], None]) -> None:
    """In what is kept, and on the way: never a wrong token. It is counted, and stored anew."""
    prompt = scene.keep(tier)
    before = scene.tier(tier).counters.corrupt
    damage(scene)
    (found,) = scene.ask((*prompt, 7))
    scene.s3.always(None, "GET")
    assert found < FOUND
    eventually(lambda: scene.tier(tier).counters.corrupt > before, "the damage is counted")
    scene.finds(prompt)
    scene.whole()


# Media that fail.


def through(scene: Scene, tier: str, prompt: Sequence[int]) -> None:
    """While the tier does not work: what it has, what is new, and what would go down into it, until its failure shows."""
    before = scene.tier(tier).counters.failures
    scene.ask((*prompt, 7), scene.new())
    scene.settled()
    for _ in range(20):
        if scene.tier(tier).counters.failures > before:
            break
        scene.ask(scene.new(LONG_TOKENS))
        scene.settled()
    said = scene.tier(tier)
    assert said.counters.failures > before
    assert said.reason
    scene.whole()


@contextlib.contextmanager
def full(scene: Scene) -> Iterator[None]:
    ballast = scene.disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(PAGE_BYTES)):
            pass
    assert os.statvfs(scene.disk).f_bavail == 0
    yield
    ballast.unlink()


@contextlib.contextmanager
def read_only(scene: Scene) -> Iterator[None]:
    remount(scene.disk, "ro")
    yield
    remount(scene.disk, "rw")


@pytest.mark.parametrize("harm", [full, read_only])
def test_a_disk_that_takes_nothing(
    scene: Scene, harm: Callable[[Scene], contextlib.AbstractContextManager[None]]
) -> None:
    if scene.not_mounted:
        pytest.skip(scene.not_mounted)
    scene.healthy()
    prompt = scene.keep("cpu")
    with harm(scene):
        through(scene, "file", prompt)


@contextlib.contextmanager
def revoked(scene: Scene) -> Iterator[None]:
    scene.s3.known_key = "somebody else"
    yield
    scene.s3.known_key = ""


def always(fault: Fault) -> Callable[[Scene], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def harm(scene: Scene) -> Iterator[None]:
        scene.s3.always(fault)
        yield
        scene.s3.always(None)

    return harm


@pytest.mark.parametrize(
    "harm",
    [always(Fault.ERROR), always(Fault.SLOW_DOWN), always(Fault.HANG), always(Fault.TRUNCATED), revoked],
    ids=["500", "503", "timeouts", "truncated", "credentials"],
)
def test_a_bucket_that_fails(scene: Scene, harm: Callable[[Scene], contextlib.AbstractContextManager[None]]) -> None:
    scene.healthy()
    prompt = scene.keep("s3")
    with harm(scene):
        through(scene, "s3", prompt)


@pytest.mark.parametrize("tier", ["file", "s3"])
def test_a_tier_that_is_back_is_used(scene: Scene, tier: str) -> None:
    """After all that has happened to it above."""
    scene.healthy()

    def used() -> bool:
        prompt = scene.keep(tier)
        before = scene.tier(tier).counters.hits
        return scene.ask((*prompt, 8)) == [FOUND] and scene.tier(tier).counters.hits > before

    eventually(used, "a prompt is found in the tier", 60.0)
    scene.whole()
