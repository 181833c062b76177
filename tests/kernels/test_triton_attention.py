"""Triton's attention against its twins in float64: in the interpreter, and on a GPU where there is one."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvrelay.kernels.reference import paged_decode, paged_prefill
from kvrelay.kernels.triton import decode_attention, prefill_attention
from kvrelay.kernels.triton.decode_attention import DecodeConfig, PagedDecode
from kvrelay.kernels.triton.prefill_attention import PrefillConfig
from tests.kernels.paged import Paged, check
from tests.kernels.triton_device import DEVICE, DTYPES, ON_GPU

pytestmark = pytest.mark.kernels

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="there are no graphs in the interpreter")
# Small, so that short sequences have several tiles and programs; what the GPU is tuned to runs on the GPU.
DECODE = None if ON_GPU else DecodeConfig(tile=32, warps=4, stages=3, programs=2)
PREFILL = None if ON_GPU else PrefillConfig(rows=64, tile=32, warps=4, stages=3)


def scaled(q: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """For the twins, which know the usual scale alone."""
    return q.double() * options.get("scale", q.shape[2] ** -0.5) * q.shape[2] ** 0.5


def bounds(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "scale"}


DECODES: list[tuple[list[int], int, int, int, int, dict[str, Any]]] = [
    # lengths, KV heads, query heads of each, head dim, block size, options
    ([1], 1, 1, 64, 16, {}),
    ([33, 0, 1, 130, 0], 2, 3, 64, 16, {}),
    ([190], 1, 16, 128, 32, {}),
    ([70, 64, 65], 1, 7, 128, 64, {"window": 40}),
    ([0, 0, 200, 31], 2, 4, 256, 32, {"softcap": 3.0}),
    ([129], 1, 64, 256, 16, {"window": 1, "softcap": 20.0}),
    ([16] * 9, 1, 2, 64, 16, {"scale": 0.3}),
]


def draw_decode(seed: int) -> tuple[list[int], int, int, int, int, dict[str, Any]]:
    draw = random.Random(seed)
    longest = draw.choice([20, 700, 5000, 32768])
    lens = [draw.choice([0, 1, draw.randint(1, longest), longest]) for _ in range(draw.choice([1, 2, 9, 40]))]
    group = draw.choice([1, 2, 3, 4, 5, 7, 8, 12, 16, 32, 64])
    options = draw.choice([{}, {}, {"window": draw.randint(1, longest)}, {"softcap": 10.0}])
    return (
        [*lens, longest],
        draw.choice([1, 2, 8]),
        group,
        draw.choice([64, 128, 256]),
        draw.choice([16, 32, 64]),
        options,
    )


if ON_GPU:
    DECODES += [draw_decode(seed) for seed in range(24)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lens", "heads", "group", "dim", "block_size", "options"), DECODES)
def test_decode(
    lens: list[int], heads: int, group: int, dim: int, block_size: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(len(lens))
    cache = Paged(lens, heads, dim, block_size, dtype)
    # As a step gives them: beside keys and values in one buffer.
    q = torch.randn(len(lens), heads * (group + 2), dim, device=DEVICE).to(dtype)[:, : heads * group]
    kernel = PagedDecode(len(lens) + 2, heads * group, heads, dim, block_size, dtype, DEVICE, config=DECODE, **options)
    kernel.plan(cache.lens)
    out = torch.full(q.shape, float("nan"), dtype=dtype, device=DEVICE)
    assert kernel(q, cache.keys, cache.values, cache.tables, cache.lens, out) is out
    keys, values = cache.blocks()
    expected, spread = (
        paged_decode(scaled(q, options), keys, side, cache.tables, cache.lens, **bounds(options))
        for side in (values, values.abs())
    )
    check(out, expected, spread, max(lens))
    assert not out[cache.lens == 0].any()
    again = kernel(q, cache.keys, cache.values, cache.tables, cache.lens)
    assert torch.equal(out, again), "the sums' order is fixed, and nothing is left of the call before"


def test_decode_of_fewer_sequences_than_before() -> None:
    """What was planned for a longer batch is not seen."""
    torch.manual_seed(0)
    cache = Paged([40, 100, 33], 2, 64, 16, torch.float32)
    q = torch.randn(3, 4, 64, device=DEVICE)
    kernel = PagedDecode(3, 4, 2, 64, 16, torch.float32, DEVICE, config=DECODE)
    for rows in (slice(0, 3), slice(1, 3), slice(2, 3)):
        lens, tables = cache.lens[rows], cache.tables[rows]
        kernel.plan(lens)
        out = kernel(q[rows], cache.keys, cache.values, tables, lens)
        expected = paged_decode(q[rows].double(), *cache.blocks(), tables, lens)
        torch.testing.assert_close(out.double(), expected, rtol=2**-16, atol=2**-16)


def test_nan_in_the_cache_comes_out() -> None:
    """A fault upstream must not turn into a plausible token."""
    torch.manual_seed(0)
    cache = Paged([100, 20], 2, 64, 16, torch.float16)
    cache.keys[cache.tables[0, 2] * 16 + 5, 1, 7] = float("nan")
    q = torch.randn(2, 4, 64, device=DEVICE).half()
    kernel = PagedDecode(2, 4, 2, 64, 16, torch.float16, DEVICE, config=DECODE)
    kernel.plan(cache.lens)
    out = kernel(q, cache.keys, cache.values, cache.tables, cache.lens)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    packed = prefill_attention.paged_prefill(
        q, cache.keys, cache.values, cache.tables, starts, cache.lens, 16, config=PREFILL
    )
    for result in (out, packed):
        assert result[0, 2:].isnan().all()
        assert not result[0, :2].isnan().any()
        assert not result[1].isnan().any()


PREFILLS: list[tuple[list[tuple[int, int]], int, int, int, int, int, dict[str, Any]]] = [
    # (part, context) of each sequence, padding tokens, KV heads, query heads of each, head dim, block size, options
    ([(1, 1)], 0, 1, 1, 64, 16, {}),
    ([(70, 70), (0, 5), (1, 40), (0, 0), (9, 75)], 12, 2, 4, 64, 16, {}),
    ([(33, 100), (3, 3)], 1, 1, 7, 128, 32, {"window": 20}),
    ([(5, 90)], 0, 1, 64, 64, 64, {"window": 70, "scale": 0.2}),
    ([(20, 31), (0, 0)], 40, 1, 3, 256, 32, {"softcap": 3.0}),
]


def draw_prefill(seed: int) -> tuple[list[tuple[int, int]], int, int, int, int, int, dict[str, Any]]:
    draw = random.Random(seed)
    longest = draw.choice([40, 700, 2048])
    before = draw.choice([0, 100, 30000])
    parts = [
        draw.choice([0, 1, draw.randint(1, longest)]) for _ in range(draw.choice([1, 2, 9, 200]) if longest < 99 else 3)
    ]
    group = draw.choice([1, 2, 3, 4, 5, 7, 8, 12, 16, 32, 64])
    # The twin's scores are to fit into a gigabyte or two.
    heads = draw.choice([heads for heads in (1, 2, 4) if heads * group * longest * (longest + before) < 2**28] or [1])
    last = min(longest, 2**28 // (heads * group * (longest + before)))
    contexts = [part + draw.choice([0, draw.randint(0, before)]) for part in [*parts, last]]
    options = draw.choice([{}, {}, {"window": draw.randint(1, longest)}, {"softcap": 10.0}])
    drawn = list(zip([*parts, last], contexts, strict=True))
    return drawn, draw.choice([0, 1, 99]), heads, group, draw.choice([64, 128, 256]), draw.choice([16, 32, 64]), options


if ON_GPU:
    PREFILLS += [draw_prefill(seed) for seed in range(16)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "padding", "heads", "group", "dim", "block_size", "options"), PREFILLS)
def test_prefill(
    parts: list[tuple[int, int]],
    padding: int,
    heads: int,
    group: int,
    dim: int,
    block_size: int,
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(len(parts))
    lens = [context for _, context in parts]
    cache = Paged(lens, heads, dim, block_size, dtype)
    starts = torch.tensor([0, *itertools.accumulate(part for part, _ in parts)], dtype=torch.int32, device=DEVICE)
    tokens = int(starts[-1]) + padding
    q = torch.randn(tokens, heads * (group + 2), dim, device=DEVICE).to(dtype)[:, : heads * group]
    out = torch.full(q.shape, float("nan"), dtype=dtype, device=DEVICE)
    given = prefill_attention.paged_prefill(
        q, cache.keys, cache.values, cache.tables, starts, cache.lens, block_size, out, config=PREFILL, **options
    )
    assert given is out
    keys, values = cache.blocks()
    expected, spread = (
        paged_prefill(scaled(q, options), keys, side, cache.tables, starts, cache.lens, **bounds(options))
        for side in (values, values.abs())
    )
    check(out, expected, spread, max(lens))
    assert not out[tokens - padding :].any()


@pytest.mark.parametrize("first", [1, 37, 64])
@pytest.mark.parametrize("parts", [[(20, 33), (0, 0), (3, 70)], [(0, 0)] * 200, [(1, 1)] * 20])
def test_what_comes_before_the_first_part_stays(parts: list[tuple[int, int]], first: int) -> None:
    """As in a padded step, where single tokens come first, and any number of parts has no tokens."""
    torch.manual_seed(first)
    cache = Paged([context for _, context in parts], 2, 64, 16, torch.float32)
    ends = itertools.accumulate((part for part, _ in parts), initial=first)
    starts = torch.tensor(list(ends), dtype=torch.int32, device=DEVICE)
    q = torch.randn(int(starts[-1]) + 40, 8, 64, device=DEVICE)
    out = torch.full(q.shape, 7.0, device=DEVICE)
    arguments = q, cache.keys, cache.values, cache.tables, starts, cache.lens, 16, out
    prefill_attention.paged_prefill(*arguments, config=PREFILL)
    expected = paged_prefill(q.double(), *cache.blocks(), cache.tables, starts, cache.lens)
    assert out[:first].eq(7.0).all()
    torch.testing.assert_close(out[first:].double(), expected[first:], rtol=2**-16, atol=2**-16)


def test_a_part_without_context_reads_no_cache() -> None:
    """As rows of a graph have that stand for no sequence: their blocks may be any number."""
    torch.manual_seed(0)
    cache = Paged([40, 0, 20], 2, 64, 16, torch.float16)
    starts = torch.arange(4, dtype=torch.int32, device=DEVICE)
    q = torch.randn(3, 4, 64, device=DEVICE).half()
    out = prefill_attention.paged_prefill(
        q, cache.keys, cache.values, cache.tables, starts, cache.lens, 16, config=PREFILL
    )
    keys, values = cache.blocks()
    expected, spread = (
        paged_decode(q.double(), keys, side, cache.tables, cache.lens) for side in (values, values.abs())
    )
    check(out, expected, spread, 40)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dim", decode_attention.HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_programs_run_at_once(monkeypatch: pytest.MonkeyPatch, group: int, dim: int, dtype: torch.dtype) -> None:
    """Else some begin when the others have ended, and a step takes twice as long: none may need more registers than its share."""
    compiled = []
    launched = decode_attention._decode

    class Seen:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: compiled.append(launched[grid](*args, **options))

    monkeypatch.setattr(decode_attention, "_decode", Seen())
    cache = Paged([100], 2, dim, 16, dtype)
    kernel = PagedDecode(1, 2 * group, 2, dim, 16, dtype, DEVICE)
    kernel.plan(cache.lens)
    kernel(
        torch.zeros(1, 2 * group, dim, dtype=dtype, device=DEVICE), cache.keys, cache.values, cache.tables, cache.lens
    )
    (found,) = compiled
    assert found.n_regs * 32 * kernel.config.warps * kernel.config.programs <= 65536
    assert (found.metadata.shared + 1024) * kernel.config.programs <= 228 << 10, (
        "a program's shared memory, and the system's part"
    )


@pytest.mark.gpu
@needs_gpu
def test_one_graph_serves_other_lengths() -> None:
    torch.manual_seed(0)
    heads, group, dim, block_size, dtype = 8, 4, 128, 16, torch.bfloat16
    caches = [Paged(lens, heads, dim, block_size, dtype) for lens in ([900, 1, 3000, 17], [5, 2000, 0, 2999])]
    blocks = max(len(cache.keys) for cache in caches)
    keys, values = (torch.empty(blocks, heads, dim, dtype=dtype, device=DEVICE) for _ in "kv")
    tables = torch.zeros(4, 200, dtype=torch.int32, device=DEVICE)
    lens = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(5, dtype=torch.int32, device=DEVICE)
    q = torch.randn(4, heads * group, dim, device=DEVICE).to(dtype)
    kernel = PagedDecode(4, heads * group, heads, dim, block_size, dtype, DEVICE)
    out, packed = torch.empty_like(q), torch.empty_like(q)

    def step() -> None:
        kernel.plan(lens)
        kernel(q, keys, values, tables, lens, out)
        prefill_attention.paged_prefill(q, keys, values, tables, starts, lens, block_size, packed)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for cache in caches:
        for target, source in ((keys, cache.keys), (values, cache.values), (lens, cache.lens)):
            target[: len(source)].copy_(source)
        tables[:, : cache.tables.shape[1]].copy_(cache.tables)
        for result in (out, packed):
            result.fill_(float("nan"))
        graph.replay()
        arguments = (q.double(), *cache.blocks(), cache.tables, cache.lens)
        spread = paged_decode(q.double(), cache.blocks()[0], cache.blocks()[1].abs(), cache.tables, cache.lens)
        check(out, paged_decode(*arguments), spread, 3000)
        check(packed, paged_decode(*arguments), spread, 3000)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(4, 4, 80), (6, 4, 64), (65, 1, 64), (2, 4, 64)])
def test_shapes_without_a_kernel_are_refused(num_heads: int, num_kv_heads: int, dim: int) -> None:
    with pytest.raises(ValueError, match="no attention kernel for"):
        PagedDecode(1, num_heads, num_kv_heads, dim, 16, torch.float16, DEVICE)
    q, cache = torch.zeros(1, num_heads, dim, device=DEVICE), torch.zeros(16, num_kv_heads, dim, device=DEVICE)
    starts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="no attention kernel for"):
        prefill_attention.paged_prefill(q, cache, cache, starts[None], starts, starts[:1], 16)


def test_more_sequences_than_there_is_room_for() -> None:
    kernel = decode_attention.PagedDecode(2, 1, 1, 64, 16, torch.float16, DEVICE)
    with pytest.raises(ValueError, match="3 sequences are more than 2"):
        kernel.plan(torch.ones(3, dtype=torch.int32, device=DEVICE))
