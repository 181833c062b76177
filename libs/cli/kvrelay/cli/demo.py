"""`kvrelay demo`: a stack of its own, one question, the answer as it comes, and what happened on the way."""

import argparse
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvrelay.cli.chat import stream_text
from kvrelay.cli.client import Client, Timing
from kvrelay.cli.inspection import PodReport, inspect
from kvrelay.cli.model import DEFAULT_DIR, ensure_model
from kvrelay.cli.options import StackOptions
from kvrelay.cli.stack import Stack
from kvrelay.cli.status import mebibytes
from kvrelay.cli.store import stat
from kvrelay.cli.terminal import terminal
from kvrelay.cli.up import require_model, watched
from kvrelay.common.access import PodAccess, bearer

RUN_DIR = Path("var/demo")
PROMPT = "What is the capital of France? Tell me one thing to see there."
MAX_TOKENS = 64


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    demo = commands.add_parser("demo", help="start a stack, ask the bundled model, show what happened, stop")
    demo.add_argument("--prompt", default=PROMPT, help="[%(default)s]")
    demo.add_argument("--model", type=Path, default=DEFAULT_DIR, help="[%(default)s]")
    demo.add_argument("--engine", default="process", help=argparse.SUPPRESS)
    demo.add_argument("--run-dir", type=Path, default=RUN_DIR, help="for logs [%(default)s]")
    demo.set_defaults(run=run_demo)


def run_demo(args: argparse.Namespace, console: Console) -> int:
    if args.model == DEFAULT_DIR:
        ensure_model(console=console)
    require_model(args.model)
    options = StackOptions(
        model=args.model.resolve(),
        engine=args.engine,
        kvstore=1,
        free_ports=True,
        redis_url=os.environ.get("REDIS_URL", ""),
        cluster=f"demo-{os.getpid()}",
        # A short prompt would be computed on D by itself: here its way over P is the point.
        router_options={"local-prefill-tokens": "0"},
    )
    with watched(console) as watch:
        stack = Stack(options, args.run_dir, watch=watch)
        stack.start()
    try:
        # What was asked, answered and done is the demo's output; progress is not.
        _ask(stack, args.prompt or PROMPT, terminal())
    finally:
        with console.status("stopping"):
            stack.stop()
    return 0


def _ask(stack: Stack, prompt: str, console: Console) -> None:
    body = {
        "model": stack.options.served_model_name,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    console.print()
    console.print(f"you: {prompt}", style="bold green", markup=False, highlight=False)
    timing = Timing()
    with Client(stack.url) as client:
        stream_text(client, "/v1/chat/completions", body, timing)
    console.print()
    console.print(_happened(stack, timing))


def _happened(stack: Stack, timing: Timing) -> Table:
    reports = {node.name: inspect(node.grpc_address, stack.pod_token) for node in stack.pods}
    table = Table("what happened", "", show_header=True)
    table.add_row("pods", ", ".join(f"{name} ({_transport(report)})" for name, report in reports.items()))
    sent = [report for report in reports.values() if report is not None]
    pushed = sum(report.payload_bytes_sent for report in sent)
    seconds = sum(report.transfer_seconds for report in sent)
    table.add_row("KV pushed over UCX", f"{pushed} bytes ({mebibytes(pushed)}) in {1000 * seconds:.1f} ms")
    usage = timing.usage
    table.add_row("prompt", f"{usage.prompt_tokens} tokens, {usage.cached_tokens} of them prefix hits")
    for node in stack.kvstores:
        kept = stat(node.grpc_address, PodAccess(bearer(stack.pod_token)))
        table.add_row("KV store", ", ".join(f"{tier.tier} {tier.num_blocks} blocks" for tier in kept.tiers))
    table.add_row("time to first token", f"{timing.ttft_ms:.0f} ms")
    after = f"{usage.completion_tokens} tokens, {timing.tokens_per_second:.1f} a second after the first"
    table.add_row("answer", f"{after} ({timing.finish_reason})")
    return table


def _transport(report: PodReport | None) -> str:
    return report.transport if report is not None else "no answer"
