"""The KV store against what it stands on, measured in one run: each tier's medium alone, Redis, and computing the prompt.

python -m benchmarks.kv [--only cpu,files,s3,peer,lookup,ttft] [--out results.json]
"""

import argparse
import tempfile
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.shapes import SHAPES, write_model
from benchmarks.kv import cpu, lookup, media, peer, ttft
from benchmarks.kv.cpu import block_bytes
from benchmarks.kv.lookup import LookUps
from benchmarks.kv.measure import Medium
from benchmarks.kv.ttft import FirstToken
from benchmarks.report import commit, machine
from kvrelay.cli.model import DEFAULT_DIR
from kvrelay.common.layout import KvDtype
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.loader.checkpoint import DTYPES
from kvrelay.engine.loader.dummy import open_dummy
from kvrelay.engine.models.config import ModelConfig
from kvrelay.engine.models.registry import find

PARTS = ("cpu", "files", "s3", "peer", "lookup", "ttft")


class Results(msgspec.Struct, kw_only=True):
    media: list[Medium] = []
    look_ups: list[LookUps] = []
    first_tokens: list[FirstToken] = []


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.kv", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas [%(default)s]")
    parser.add_argument("--model", type=Path, default=DEFAULT_DIR, help="directory [%(default)s]")
    parser.add_argument("--shape", choices=SHAPES, help="blocks as a model of that shape has them [those of --model]")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of blocks, and of the model [%(default)s]")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, as quick [%(default)s]")
    parser.add_argument("--blocks", type=int, default=256, help="of a run, in cpu, files, s3 and peer [%(default)s]")
    parser.add_argument("--runs", type=int, default=5, help="whose median is shown [%(default)s]")
    parser.add_argument("--directory", type=Path, help="on the disk to measure [a temporary one]")
    parser.add_argument("--index-blocks", type=int, default=1_000_000, help="in Redis [%(default)s]")
    parser.add_argument("--prefix-blocks", type=int, default=512, help="that are looked up [%(default)s]")
    parser.add_argument("--lengths", default="500,2000,4000", help="of prompts, in ttft [%(default)s]")
    parser.add_argument("--out", type=Path, help="results as JSON")
    return parser.parse_args()


def blocks_of(args: argparse.Namespace, folder: Path) -> ModelConfig:
    """The model whose blocks are stored. Only `ttft` loads one, that of --model."""
    path = write_model(folder / "shape", args.shape) if args.shape else args.model
    config = open_dummy(path, 0).config
    return find(config).describe(config)


async def measure(args: argparse.Namespace, parts: list[str], folder: Path) -> Results:
    results = Results()
    config = EngineConfig(
        model=args.model, dtype=args.dtype, load_format=args.load_format, max_model_len=8192, kv_cache_bytes=256 << 20
    )
    model, kv_dtype = blocks_of(args, folder), KvDtype(args.dtype)
    size = block_bytes(model, kv_dtype)
    print(f"blocks of {size / 1024:.0f} KiB")
    for part in parts:
        place = folder / part
        place.mkdir()
        match part:
            case "cpu":
                results.media += await cpu.measure(model, kv_dtype, args.blocks, args.runs, place)
            case "files":
                for direct in (True, False):
                    mode = place / f"direct-{direct}"
                    mode.mkdir()
                    results.media += await media.files(mode, args.blocks, size, args.runs, direct)
            case "s3":
                results.media += await media.objects(place, args.blocks, size, args.runs)
            case "peer":
                results.media += await peer.measure(place, args.blocks, size, args.runs)
            case "lookup":
                results.look_ups.append(await lookup.measure(place, args.index_blocks, args.prefix_blocks, 1000))
            case "ttft":
                lengths = [int(length) for length in args.lengths.split(",")]
                results.first_tokens += await ttft.measure(config, lengths, 3, place, 2 << 30)
            case _:
                raise SystemExit(f"{part} is none of {', '.join(PARTS)}")
    return results


def show(results: Results) -> list[Table]:
    tiers = Table(title="GB/s; the bound is the medium and then a pass of the checksum where there is one")
    for heading in ("tier", "ours", "raw", "bound", "share"):
        tiers.add_column(heading, justify="left" if heading == "tier" else "right")
    for each in results.media:
        tiers.add_row(each.name, *(f"{v:.2f}" for v in (each.ours, each.raw, each.bound)), f"{each.share:.0%}")
    index = Table(title="looking up a prefix in Redis")
    for heading in ("blocks there", "bytes each", "prefix", "p50 ms", "p99 ms", "announced/s"):
        index.add_column(heading, justify="right")
    for look in results.look_ups:
        figures = (f"{look.bytes_per_block:.0f}", str(look.prefix_blocks), f"{look.p50_ms:.2f}", f"{look.p99_ms:.2f}")
        index.add_row(str(look.blocks), *figures, f"{look.announced_per_second:.0f}")
    first = Table(title="milliseconds to the first token")
    for heading in ("prompt", "computed", "from the CPU tier", "ratio"):
        first.add_column(heading, justify="right")
    for token in results.first_tokens:
        first.add_row(str(token.prompt_tokens), f"{token.cold_ms:.0f}", f"{token.hit_ms:.0f}", f"{token.ratio:.0f}")
    return [table for table in (tiers, index, first) if table.row_count]


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        results = uvloop.run(measure(args, args.only.split(","), Path(folder)))
    for table in show(results):
        Console().print(table)
    if args.out:
        options = {name: str(value) for name, value in vars(args).items() if name != "out"}
        result = {"machine": machine(), "commit": commit(), "options": options, **msgspec.to_builtins(results)}
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


if __name__ == "__main__":
    main()
