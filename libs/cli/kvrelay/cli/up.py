"""`kvrelay up` and `down`: the local stack."""

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvrelay.cli.model import DEFAULT_DIR
from kvrelay.cli.options import ROUTER_GRPC_PORT, ROUTER_HTTP_PORT, StackOptions, pairs
from kvrelay.cli.stack import READY_SECONDS, Stack, StackFailed, Watcher
from kvrelay.common.modelfiles import missing

RUN_DIR = Path("var/run")
ENGINE_OPTIONS = {
    "device": "cuda or cpu",
    "dtype": "auto (the checkpoint's), float32 or bfloat16",
    "kv-dtype": "auto or a dtype",
    "quantization": "none or fp8: weights in 8 bits",
    "block-size": "tokens, a multiple of 16",
    "kv-cache-bytes": "of each pod, such as 512MiB",
    "max-model-len": "tokens",
    "max-num-seqs": "of each pod",
    "max-num-batched-tokens": "of a step, at most",
    "max-step-ms": "that a step should last at most",
}


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    up = commands.add_parser("up", help="start the local stack; returns when it serves")
    up.set_defaults(run=run_up)
    add_stack_options(up)
    up.add_argument("--run-dir", type=Path, default=RUN_DIR, help="for logs and pids [%(default)s]")
    down = commands.add_parser("down", help="end what up started")
    down.add_argument("--run-dir", type=Path, default=RUN_DIR, help="[%(default)s]")
    down.set_defaults(run=run_down)


def add_stack_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=DEFAULT_DIR, help="directory [%(default)s]")
    parser.add_argument("--served-model-name", default="smollm2", help="in the API [%(default)s]")
    parser.add_argument("--prefill", type=int, help="prefill pods [1, or 0 with --both]")
    parser.add_argument("--decode", type=int, help="decode pods [1, or 0 with --both]")
    parser.add_argument("--both", type=int, default=0, help="pods that do both [%(default)s]")
    parser.add_argument("--no-kvstore", action="store_true", help="no KV store beside the pods [one, which all share]")
    parser.add_argument("--kvstore", type=int, metavar="N", help="so many, as on N nodes, each for a part of the pods")
    parser.add_argument(
        "--kvstore-tiers",
        default="",
        metavar="YAML",
        help="of each [512 MiB of memory, 2 GiB of files in the run directory]",
    )
    parser.add_argument("--engine", default="process", help="process, or fake: no model, for tests [%(default)s]")
    parser.add_argument(
        "--threads", type=int, default=0, help="of each pod's engine [decode pods share all cores, prefill pods half]"
    )
    for name, text in ENGINE_OPTIONS.items():
        parser.add_argument(f"--{name}", metavar="VALUE", help=text)
    parser.add_argument("--test-hooks", action="store_true", help="pods accept hold points")
    parser.add_argument(
        "--engine-option", action="append", default=[], metavar="NAME=VALUE", help="any other option of the pods"
    )
    parser.add_argument(
        "--kvstore-option", action="append", default=[], metavar="NAME=VALUE", help="any other option of the KV stores"
    )
    parser.add_argument(
        "--router-option", action="append", default=[], metavar="NAME=VALUE", help="any option of the router"
    )
    parser.add_argument("--policy", help="prefix_aware, least_loaded, round_robin or session [the router's default]")
    parser.add_argument("--local-prefill-tokens", metavar="N", help="prompts of under N tokens are computed on D [32]")
    parser.add_argument("--http-port", type=int, default=ROUTER_HTTP_PORT, help="of the router [%(default)s]")
    parser.add_argument("--grpc-port", type=int, default=ROUTER_GRPC_PORT, help="of the router [%(default)s]")
    parser.add_argument("--free-ports", action="store_true", help="any free ports, for all processes")
    parser.add_argument("--cluster", default="default", help="name in Redis [%(default)s]")
    parser.add_argument("--pod-auth-token-file", type=Path, metavar="FILE", help="with the token that pods ask for")
    parser.add_argument("--timeout", type=float, default=READY_SECONDS, help="seconds until ready [%(default)s]")


def stack_options(args: argparse.Namespace) -> StackOptions:
    """Raises ValueError for what does not fit together."""
    engine_options: dict[str, str | bool] = {}
    for name in ENGINE_OPTIONS:
        value = getattr(args, name.replace("-", "_"))
        if value is not None:
            engine_options[name] = value
    if args.test_hooks:
        engine_options["test-hooks"] = True
    router_options: dict[str, str | bool] = {}
    if args.policy is not None:
        router_options["policy"] = args.policy
    if args.local_prefill_tokens is not None:
        router_options["local-prefill-tokens"] = args.local_prefill_tokens
    if args.no_kvstore and args.kvstore:
        raise ValueError("--no-kvstore and --kvstore exclude each other")
    stores = 0 if args.no_kvstore else 1
    split = 0 if args.both else 1
    return StackOptions(
        model=args.model.resolve(),
        served_model_name=args.served_model_name,
        prefill=split if args.prefill is None else args.prefill,
        decode=split if args.decode is None else args.decode,
        both=args.both,
        kvstore=stores if args.kvstore is None else args.kvstore,
        kvstore_tiers=args.kvstore_tiers,
        engine=args.engine,
        threads=args.threads,
        free_ports=args.free_ports,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        redis_url=os.environ.get("REDIS_URL", ""),
        cluster=args.cluster,
        pod_auth_token_file=str(args.pod_auth_token_file.resolve()) if args.pod_auth_token_file else "",
        engine_options={**engine_options, **pairs(args.engine_option)},
        kvstore_options=pairs(args.kvstore_option),
        router_options={**router_options, **pairs(args.router_option)},
    )


def run_up(args: argparse.Namespace, console: Console) -> int:
    options = stack_options(args)
    require_model(args.model)
    running = Stack.attach(args.run_dir)
    if running is not None and any(node.alive for node in running.nodes):
        return _report_running(running, options, console)
    with watched(console) as watch:
        stack = Stack(options, args.run_dir, watch=watch)
        stack.start(args.timeout)
    console.print(f"ready: [bold]{stack.url}/v1[/], gRPC {stack.router.grpc_address}, logs in {args.run_dir}")
    return 0


def _report_running(stack: Stack, options: StackOptions, console: Console) -> int:
    if not stack.ready:
        raise StackFailed(
            f"a stack in {stack.run_dir} is up but not ready: kvrelay status shows it, kvrelay down ends it"
        )
    if _without_ports(stack.options) != _without_ports(options):
        raise StackFailed(f"a stack with other options is up in {stack.run_dir}: kvrelay down ends it")
    console.print(f"up already: [bold]{stack.url}/v1[/]")
    return 0


def _without_ports(options: StackOptions) -> StackOptions:
    """Free ones differ each time."""
    return replace(options, http_port=ROUTER_HTTP_PORT, grpc_port=ROUTER_GRPC_PORT)


def require_model(model: Path) -> None:
    """Raises StackFailed where the directory holds none."""
    if not (model / "config.json").is_file():
        what = f"{model} has no config.json: give a model of Hugging Face's form" if model.is_dir() else missing(model)
        raise StackFailed(f"{what}; `kvrelay model` makes the bundled one")


def run_down(args: argparse.Namespace, console: Console) -> int:
    stack = Stack.attach(args.run_dir)
    if stack is None:
        console.print(f"nothing is up in {args.run_dir}")
        return 0
    count = len(stack.nodes)
    with console.status("stopping"):
        stack.stop()
    console.print(f"ended {count} processes")
    return 0


@contextmanager
def watched(console: Console) -> Iterator[Watcher]:
    """One line a process, with what it is doing, while a stack starts."""
    columns = (SpinnerColumn(finished_text="[green]✓[/]"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks = {}

        def watch(doing: Mapping[str, str]) -> None:
            for name, what in doing.items():
                if name not in tasks:
                    tasks[name] = progress.add_task("", total=1)
                done = 1 if what == "ready" else 0
                progress.update(tasks[name], description=f"{name:<10} {what}", completed=done)

        yield watch
