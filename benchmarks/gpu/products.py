"""Products of a few tokens with a weight, beside torch's own and beside what it takes to read the weight once.

python -m benchmarks.gpu.products            at the shapes of two models, alone and as a layer has them
python -m benchmarks.gpu.products --sweep    by other configurations of the kernel; the best of each shape
python -m benchmarks.gpu.products --fp8      the same of weights in 8 bits, beside torch's products in bfloat16
"""

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
import triton

from benchmarks.gpu.ops import FLOOR_TB_S, Timing, sets_for, time_us
from kvrelay.kernels.ops import Norm
from kvrelay.kernels.scaled import Scaled, quantize
from kvrelay.kernels.triton.gate import silu_gate
from kvrelay.kernels.triton.gemv import GemvConfig, gemv, gemv_config
from kvrelay.kernels.triton.narrow import NarrowConfig, narrow, narrow_config
from kvrelay.kernels.triton.norm import add_norm
from kvrelay.kernels.triton.ops import scaled_product
from kvrelay.kernels.triton.thin import MAX_TOKENS, ThinConfig, thin, thin_config

Config = GemvConfig | ThinConfig | NarrowConfig
Weight = torch.Tensor | Scaled
BF16 = torch.bfloat16
ROUGHLY = 1e-2
"""By how much of the largest a result may differ from the twin's: bfloat16 keeps 8 bits. Tests have the tight bounds."""
AFTER_FOUR = 4e-2
"""The same, of a product of products."""
ROUNDED = 0.15
"""The same, where tokens are rounded to 8 bits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shapes:
    """Of a model's weights, [out, in]."""

    model: str
    qkv: tuple[int, int]
    output: tuple[int, int]
    gate_up: tuple[int, int]
    down: tuple[int, int]
    head: tuple[int, int]


LLAMA_8B = Shapes("Llama-3.1-8B", (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
QWEN3_600M = Shapes("Qwen3-0.6B", (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024))
MODELS = (LLAMA_8B, QWEN3_600M)


def shapes_of(model: Shapes) -> dict[str, tuple[int, int]]:
    fields = dataclasses.asdict(model)
    return {name: shape for name, shape in fields.items() if name != "model"}


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    ours: Timing
    torch_us: float

    def __str__(self) -> str:
        tb_s = self.ours.gb_s / 1e3
        return f"{self.ours}  {tb_s:5.2f} TB/s  torch {self.torch_us:8.2f} us  x {self.torch_us / self.ours.us:5.2f}"


def weights(shape: tuple[int, int], count: int, fp8: bool) -> list[Weight]:
    found = ((torch.randn(shape, device="cuda") * shape[1] ** -0.5).to(BF16) for _ in range(count))
    return [quantize(weight) if fp8 else weight for weight in found]


def plain(weights: list[Weight]) -> list[torch.Tensor]:
    """In bfloat16."""
    return [weight.wide(BF16) if isinstance(weight, Scaled) else weight for weight in weights]


def bytes_of(shape: tuple[int, int], fp8: bool) -> int:
    return shape[0] * shape[1] * (1 if fp8 else 2)


def check(got: torch.Tensor, expected: torch.Tensor, roughly: float = ROUGHLY) -> None:
    off = (got.float() - expected.float()).abs().max() / expected.float().abs().max()
    if not off <= roughly:
        raise ArithmeticError(f"results are {off.item():.2g} of the largest apart")


def product(x: torch.Tensor, weight: Weight, gated: bool = False, config: Config | None = None) -> torch.Tensor:
    fp8 = isinstance(weight, Scaled)
    config = config or chosen(len(x), (len(weight), x.shape[1]), gated, fp8)
    if config is None:
        assert isinstance(weight, Scaled)
        products = scaled_product(x, weight, None)
        return silu_gate(products) if gated else products
    if isinstance(config, GemvConfig):
        return gemv(x, weight, gated=gated, config=config)
    if isinstance(config, ThinConfig):
        return thin(x, weight, gated=gated, config=config)
    assert isinstance(weight, torch.Tensor)
    return narrow(x, weight, gated=gated, config=config)


def chosen(tokens: int, shape: tuple[int, int], gated: bool = False, fp8: bool = False) -> Config | None:
    """None: torch's product of 8 bits."""
    if tokens == 1:
        return gemv_config(*shape, gated, fp8)
    if tokens <= MAX_TOKENS:
        return thin_config(*shape)
    return None if fp8 else narrow_config(tokens, *shape, gated)


def time_product(tokens: int, name: str, shape: tuple[int, int], fp8: bool = False) -> Compared:
    moved = bytes_of(shape, fp8)
    sets = weights(shape, sets_for(moved), fp8)
    wide = plain(sets)
    x = torch.randn(tokens, shape[1], device="cuda").to(BF16)
    gated = name == "gate_up"

    def others(i: int) -> torch.Tensor:
        products = F.linear(x, wide[i])
        return silu_gate(products) if gated else products

    check(product(x, sets[0], gated), others(0), ROUNDED if fp8 and tokens > MAX_TOKENS else ROUGHLY)
    us = time_us(lambda i: product(x, sets[i], gated), len(sets))
    torch_us = time_us(others, len(sets))
    label = f"product: {name}{' and gate' if gated else ''}{', fp8' if fp8 else ''}"
    return Compared(Timing(label, f"T {tokens} {shape[0]} x {shape[1]}", us, moved), torch_us)


def time_layers(tokens: int, model: Shapes, fp8: bool = False, **changes: int) -> Compared:
    """All products of a layer and both norms, one after the other, each on what the one before gives (attention left out), of so
    many layers that the cache does not hold them. Time and bytes are a layer's."""
    shapes = [shape for name, shape in shapes_of(model).items() if name != "head"]
    moved = sum(bytes_of(shape, fp8) for shape in shapes)
    count = max(3, sets_for(moved))
    each = [weights(shape, count, fp8) for shape in shapes]
    layers, wide = list(zip(*each, strict=True)), list(zip(*map(plain, each), strict=True))
    hidden = model.qkv[1]
    norm = Norm(torch.rand(hidden, device="cuda") + 0.5, torch.tensor(1e-5, device="cuda"))
    x, delta = torch.randn(2, tokens, hidden, device="cuda").to(BF16)
    stream = torch.empty_like(x)

    def ours(x: torch.Tensor, weight: Weight, gated: bool = False) -> torch.Tensor:
        config = chosen(tokens, (len(weight), x.shape[1]), gated, fp8)
        return product(x, weight, gated, config and dataclasses.replace(config, **changes))

    def others(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> torch.Tensor:
        products = F.linear(x, weight)
        return silu_gate(products) if gated else products

    def layer(by: Callable[..., torch.Tensor], i: int) -> torch.Tensor:
        qkv, output, gate_up, down = (layers if by is ours else wide)[i]
        heads = by(add_norm(stream, delta, norm.weight, norm.eps), qkv)
        mixed = by(heads.view(-1)[: tokens * model.output[1]].view(tokens, -1), output)
        return by(by(add_norm(stream, mixed, norm.weight, norm.eps), gate_up, True), down)

    def from_the_start(by: Callable[..., torch.Tensor]) -> torch.Tensor:
        stream.copy_(x)
        return layer(by, 0)

    check(from_the_start(ours), from_the_start(others), ROUNDED if fp8 and tokens > MAX_TOKENS else AFTER_FOUR)
    us, torch_us = time_us(lambda i: layer(ours, i), count), time_us(lambda i: layer(others, i), count)
    label = "a layer" + ", fp8" * fp8 + "".join(f", {name} {value}" for name, value in changes.items())
    return Compared(Timing(label, f"T {tokens} {model.model}", us, moved), torch_us)


def timings(fp8: bool) -> Iterator[Compared]:
    for model, tokens in itertools.product(MODELS, (1, 2, 4, 8, 16, 32, 64, 256)):
        if chosen(tokens, model.qkv, fp8=fp8) is not None:
            yield time_layers(tokens, model, fp8, early=False)
        yield time_layers(tokens, model, fp8)
    for model, tokens in itertools.product(MODELS, (1, 4, 16, 32, 64, *(256, 2048, 8192) * fp8)):
        for name, shape in shapes_of(model).items():
            if name != "head" or not fp8:
                yield time_product(tokens, name, shape, fp8)


SHARED_BYTES = 225 << 10
"""That a program's loads on their way may take."""


def candidates(tokens: int, shape: tuple[int, int], gated: bool, fp8: bool) -> list[Config]:
    """Those of one token that hold 16 to 64 weights a thread; of more, those whose loads fit into the shared memory."""
    rows, columns = shape
    if tokens == 1:
        return [
            GemvConfig(block_n, block_k, warps, ahead=ahead)
            for block_n, block_k, warps in itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096), (2, 4, 8))
            for ahead in (False, True)
            if block_n > gated and block_k < 2 * columns and 16 <= block_n * block_k / (32 * warps) <= 64
        ]
    thin_ones = [
        ThinConfig(parts, block_k, stages, ahead=ahead)
        for parts, block_k, stages in itertools.product((1, 2, 4, 8, 16), (64, 128, *(256,) * fp8), (3, 5, 8))
        for ahead in (False, True)
        if columns % (parts * block_k) == 0
        and (64 * (1 if fp8 else 2) + 16 * 2) * block_k * stages <= SHARED_BYTES
        and 64 <= parts * (rows // 64) <= 4096
    ]
    padded = max(16, triton.next_power_of_2(tokens))
    narrow_ones = [
        NarrowConfig(taken, parts, block_k, block, warps, stages, ahead=ahead)
        for block in (64, 128)[: 1 + (tokens > 64)]
        for taken, parts, block_k in itertools.product((64, 128, 256), (1, 2, 4, 8, 16), (64, 128))
        for warps, stages, ahead in itertools.product((4, 8), (4, 6), (0,))
        if columns % (parts * block_k) == 0
        and 64 <= parts * (rows // taken) * triton.cdiv(tokens, block) <= 2048
        and taken * (1 + (gated and parts == 1)) * min(block, padded) // (32 * warps) <= 128
        and 64 * warps // 4 <= taken
        and (taken * (1 + (gated and parts == 1)) + min(block, padded)) * block_k * 2 * stages <= SHARED_BYTES
        and ahead <= columns // parts
    ]
    return [*thin_ones * (tokens <= MAX_TOKENS), *narrow_ones * (not fp8)]


def compile_one(tokens: int, columns: int, gated: bool, fp8: bool, config: Config) -> None:
    """Into Triton's cache, for any number of rows."""
    (weight,) = weights((512, columns), 1, fp8)
    product(torch.zeros(tokens, columns, device="cuda", dtype=BF16), weight, gated, config)


def sweep(tokens: int, fp8: bool, models: str) -> None:
    """Each alone, in a row of others like it."""
    shapes = [
        (model.model, name, shape)
        for model in MODELS
        for name, shape in shapes_of(model).items()
        if fnmatch.fnmatch(model.model, models) and (name != "head" or not fp8)
    ]
    wanted = {
        (shape[1], name == "gate_up", fp8, config)
        for _, name, shape in shapes
        for config in candidates(tokens, shape, name == "gate_up", fp8)
    }
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=spawn) as pool:
        list(pool.map(compile_one, *zip(*((tokens, *each) for each in wanted), strict=True)))
    for model, name, shape in shapes:
        gated = name == "gate_up"
        moved = bytes_of(shape, fp8)
        sets = weights(shape, sets_for(moved), fp8)
        wide = plain(sets)
        x = torch.randn(tokens, shape[1], device="cuda").to(BF16)

        def others(i: int, x: torch.Tensor = x, wide: list[torch.Tensor] = wide, gated: bool = gated) -> torch.Tensor:
            products = F.linear(x, wide[i])
            return silu_gate(products) if gated else products

        expected = others(0)

        def timed(
            config: Config,
            x: torch.Tensor = x,
            sets: list[Weight] = sets,
            gated: bool = gated,
            expected: torch.Tensor = expected,
        ) -> float:
            check(product(x, sets[0], gated, config), expected)
            return time_us(lambda i: product(x, sets[i], gated, config), len(sets))

        own = chosen(tokens, shape, gated, fp8)
        assert own is not None
        by_config = {config: timed(config) for config in [*candidates(tokens, shape, gated, fp8), own]}
        print(
            f"{model} {name} {shape}: torch {time_us(others, len(sets)):.2f} us, floor {moved / FLOOR_TB_S / 1e6:.2f}, "
            f"as chosen {by_config[own]:.2f} {own}"
        )
        ranked = sorted(by_config, key=by_config.__getitem__)
        for config in [*ranked[:6], ranked[len(ranked) // 2], ranked[-1]]:
            print(f"    {by_config[config]:8.2f} us {moved / by_config[config] / 1e6:5.2f} TB/s {config}", flush=True)
        del sets, wide
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--tokens", type=int, default=1, help="of a sweep")
    parser.add_argument("--model", default="*", help="pattern of the models of a sweep [%(default)s]")
    arguments = parser.parse_args()
    if arguments.sweep and arguments.fp8 and arguments.tokens > MAX_TOKENS:
        parser.error(f"products of more than {MAX_TOKENS} tokens in 8 bits are torch's")
    if arguments.sweep:
        sweep(arguments.tokens, arguments.fp8, arguments.model)
    else:
        for compared in timings(arguments.fp8):
            print(compared, flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
