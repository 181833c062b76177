"""Products of a few tokens with a weight, beside torch's own and beside what it takes to read the weight once.

python -m benchmarks.gpu.products            at the shapes of two models, alone and as a layer has them
python -m benchmarks.gpu.products --sweep    by other configurations of the kernel; the best of each shape
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu.ops import FLOOR_TB_S, Timing, sets_for, time_us
from kvrelay.kernels import reference
from kvrelay.kernels.ops import Norm
from kvrelay.kernels.triton.gate import silu_gate
from kvrelay.kernels.triton.gemv import GemvConfig, gemv, gemv_config
from kvrelay.kernels.triton.norm import add_norm

BF16 = torch.bfloat16
ROUGHLY = 1e-2
"""By how much of the largest a result may differ from the twin's: bfloat16 keeps 8 bits. Tests have the tight bounds."""
AFTER_FOUR = 4e-2
"""The same, of a product of products."""


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


def weights(shape: tuple[int, int], count: int) -> list[torch.Tensor]:
    return [(torch.randn(shape, device="cuda") * shape[1] ** -0.5).to(BF16) for _ in range(count)]


def check(got: torch.Tensor, expected: torch.Tensor, roughly: float = ROUGHLY) -> None:
    off = (got.float() - expected.float()).abs().max() / expected.float().abs().max()
    if not off <= roughly:
        raise ArithmeticError(f"results are {off.item():.2g} of the largest apart")


def time_product(tokens: int, name: str, shape: tuple[int, int], config: GemvConfig | None = None) -> Compared:
    """Plain, without what may be fused."""
    moved = shape[0] * shape[1] * 2
    sets = weights(shape, sets_for(moved))
    x = torch.randn(tokens, shape[1], device="cuda").to(BF16)
    outs = [torch.full((tokens, shape[0]), float("nan"), device="cuda", dtype=BF16) for _ in sets]
    check(gemv(x, sets[0], out=outs[0], config=config), reference.gemv(x, sets[0]))
    us = time_us(lambda i: gemv(x, sets[i], out=outs[i], config=config), len(sets))
    torch_us = time_us(lambda i: F.linear(x, sets[i]), len(sets))
    return Compared(Timing(f"gemv: {name}", f"T {tokens} {shape[0]} x {shape[1]}", us, moved), torch_us)


def time_fused(tokens: int, name: str, shape: tuple[int, int], gated: bool) -> Compared:
    """Sum, norm and gate in the kernel; beside torch's product and our kernels for the rest."""
    moved = shape[0] * shape[1] * 2
    sets = weights(shape, sets_for(moved))
    x, delta = torch.randn(2, tokens, shape[1], device="cuda").to(BF16)
    norm = Norm(torch.rand(shape[1], device="cuda") + 0.5, torch.tensor(1e-5, device="cuda"))
    summed = torch.empty_like(x)

    def ours(i: int) -> torch.Tensor:
        return gemv(x, sets[i], delta=delta, residual=summed, norm=norm, gated=gated)

    def others(i: int) -> torch.Tensor:
        products = F.linear(add_norm(x, delta, norm.weight, norm.eps), sets[i])
        return silu_gate(products) if gated else products

    twin = torch.empty_like(x)
    check(ours(0), reference.gemv(x, sets[0], delta=delta, residual=twin, norm=norm, gated=gated))
    check(summed, twin)
    us, torch_us = time_us(ours, len(sets)), time_us(others, len(sets))
    label = f"gemv: norm, {name}{', gate' if gated else ''}"
    return Compared(Timing(label, f"T {tokens} {shape[0]} x {shape[1]}", us, moved), torch_us)


def time_layers(tokens: int, model: Shapes, early: bool = True) -> Compared:
    """All products of a layer one after the other, each on what the one before gives (attention left out), of so many
    layers that the cache does not hold them. Time and bytes are a layer's."""
    moved = sum(rows * columns for name, (rows, columns) in shapes_of(model).items() if name != "head") * 2
    count = max(3, sets_for(moved))
    layers = list(
        zip(*(weights(shape, count) for name, shape in shapes_of(model).items() if name != "head"), strict=True)
    )
    hidden = model.qkv[1]
    norm = Norm(torch.rand(hidden, device="cuda") + 0.5, torch.tensor(1e-5, device="cuda"))
    x, delta = torch.randn(2, tokens, hidden, device="cuda").to(BF16)
    streams = torch.empty(2, tokens, hidden, device="cuda", dtype=BF16)

    def config(weight: torch.Tensor) -> GemvConfig:
        return dataclasses.replace(gemv_config(tokens, *weight.shape), early=early)

    def ours(i: int) -> torch.Tensor:
        qkv, output, gate_up, down = layers[i]
        heads = gemv(x, qkv, delta=delta, residual=streams[0], norm=norm, config=config(qkv))
        mixed = gemv(heads.view(-1)[: tokens * output.shape[1]].view(tokens, -1), output, config=config(output))
        inner = gemv(
            streams[0], gate_up, delta=mixed, residual=streams[1], norm=norm, gated=True, config=config(gate_up)
        )
        return gemv(inner, down, config=config(down))

    def others(i: int) -> torch.Tensor:
        qkv, output, gate_up, down = layers[i]
        stream = streams[0].copy_(x)
        heads = F.linear(add_norm(stream, delta, norm.weight, norm.eps), qkv)
        mixed = F.linear(heads.view(-1)[: tokens * output.shape[1]].view(tokens, -1), output)
        return F.linear(silu_gate(F.linear(add_norm(stream, mixed, norm.weight, norm.eps), gate_up)), down)

    check(ours(0), others(0), AFTER_FOUR)
    us, torch_us = time_us(ours, count), time_us(others, count)
    label = f"a layer{'' if early else ', not early'}"
    return Compared(Timing(label, f"T {tokens} {model.model}", us, moved), torch_us)


def timings() -> Iterator[Compared]:
    for model, tokens in itertools.product(MODELS, (1, 2, 4)):
        for name, shape in shapes_of(model).items():
            yield time_product(tokens, name, shape)
    for model, tokens in itertools.product(MODELS, (1, 4)):
        yield time_fused(tokens, "qkv", model.qkv, gated=False)
        yield time_fused(tokens, "gate_up", model.gate_up, gated=True)
        yield time_layers(tokens, model, early=False)
        yield time_layers(tokens, model)


def candidates(tokens: int, columns: int) -> list[GemvConfig]:
    """Those that hold 16 to 64 weights a thread, and as many sums for each of the tokens as there are registers for."""
    most = {1: 64, 2: 32}.get(tokens, 16)
    return [
        GemvConfig(block_n, block_k, warps)
        for block_n, block_k, warps in itertools.product((2, 4, 8, 16, 32), (256, 512, 1024, 2048), (2, 4, 8))
        if block_k <= columns and 16 <= block_n * block_k / (32 * warps) <= most
    ]


def compile_one(tokens: int, columns: int, config: GemvConfig) -> None:
    """Into Triton's cache, for any number of rows."""
    x, weight = (torch.zeros(rows, columns, device="cuda", dtype=BF16) for rows in (tokens, 64))
    gemv(x, weight, config=config)


def sweep(tokens: int) -> None:
    shapes = [(model.model, name, shape) for model in MODELS for name, shape in shapes_of(model).items()]
    wanted = {(columns, config) for *_, (_, columns) in shapes for config in candidates(tokens, columns)}
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=spawn) as pool:
        list(pool.map(compile_one, *zip(*((tokens, *each) for each in wanted), strict=True)))
    for model, name, shape in shapes:
        moved = shape[0] * shape[1] * 2
        sets = weights(shape, sets_for(moved))
        x = torch.randn(tokens, shape[1], device="cuda").to(BF16)
        outs = [torch.empty(tokens, shape[0], device="cuda", dtype=BF16) for _ in sets]
        torch_us = time_us(lambda i, x=x, sets=sets: F.linear(x, sets[i]), len(sets))
        by_config = {}
        for config in [*candidates(tokens, shape[1]), gemv_config(tokens, *shape)]:
            for early in (True, False):
                tried = dataclasses.replace(config, early=early)
                by_config[tried] = time_us(
                    lambda i, x=x, sets=sets, outs=outs, tried=tried: gemv(x, sets[i], out=outs[i], config=tried),
                    len(sets),
                )
        print(
            f"{model} {name} {shape}: torch {torch_us:.2f} us, floor {moved / FLOOR_TB_S / 1e6:.2f}, "
            f"as chosen {by_config[gemv_config(tokens, *shape)]:.2f}"
        )
        ranked = sorted(by_config, key=by_config.__getitem__)
        late = [config for config in ranked if not config.early]
        for config in [*ranked[:5], late[0], ranked[-1]]:
            print(f"    {by_config[config]:8.2f} us {moved / by_config[config] / 1e6:5.2f} TB/s {config}", flush=True)
        del sets, outs
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tokens", type=int, default=1, help="of a sweep")
    arguments = parser.parse_args()
    if arguments.sweep:
        sweep(arguments.tokens)
    else:
        for compared in timings():
            print(compared, flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
