"""`kvrelay chat` and `kvrelay complete`: the answer in the terminal, as it comes."""

import argparse
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from kvrelay.cli.client import ApiError, Body, Client, Timing
from kvrelay.cli.options import ROUTER_HTTP_PORT

DEFAULT_URL = f"http://127.0.0.1:{ROUTER_HTTP_PORT}"


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    chat = commands.add_parser("chat", help="talk with the model; with MESSAGE, ask once")
    chat.add_argument("message", nargs="?", help="one question; without it, a conversation")
    chat.add_argument("--system", help="the system message")
    chat.set_defaults(run=run_chat)
    complete = commands.add_parser("complete", help="continue a text, without the chat template")
    complete.add_argument("prompt", nargs="?", help="without it, standard input")
    complete.set_defaults(run=run_complete)
    for parser in (chat, complete):
        parser.add_argument("--url", default=DEFAULT_URL, help="of the router [%(default)s]")
        parser.add_argument("--model", default="smollm2", help="its name in the API [%(default)s]")
        parser.add_argument("--max-tokens", type=int, default=256, help="[%(default)s]")
        parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy [%(default)s]")
        parser.add_argument("--seed", type=int, help="for the same text again")


def run_complete(args: argparse.Namespace, console: Console) -> int:
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    with Client(args.url) as client:
        answer(client, "/v1/completions", {**_sampling(args), "prompt": prompt}, console)
    return 0


def run_chat(args: argparse.Namespace, console: Console) -> int:
    messages = [{"role": "system", "content": args.system}] if args.system else []
    questions = _typed(console) if args.message is None else iter([args.message])
    with Client(args.url) as client:
        for question in questions:
            asked = [*messages, {"role": "user", "content": question}]
            try:
                text = answer(client, "/v1/chat/completions", {**_sampling(args), "messages": asked}, console)
            except ApiError as error:
                if args.message is not None:
                    raise
                console.print(f"[red]{escape(str(error))}[/]")
                continue
            messages = [*asked, {"role": "assistant", "content": text}]
    return 0


def answer(client: Client, path: str, body: Body, console: Console) -> str:
    """Prints the answer as it comes, then one line of what it cost; returns the text. Raises ApiError."""
    timing = Timing()
    text = stream_text(client, path, body, timing)
    usage = timing.usage
    console.print(
        f"[dim]{usage.prompt_tokens} tokens in ({usage.cached_tokens} cached), {usage.completion_tokens} out, "
        f"first after {timing.ttft_ms:.0f} ms, then {timing.tokens_per_second:.0f} a second[/]",
        highlight=False,
    )
    return text


def stream_text(client: Client, path: str, body: Body, timing: Timing) -> str:
    """Writes to standard output, unchanged, and returns what it wrote. Raises ApiError."""
    parts: list[str] = []
    try:
        for part in client.stream(path, body, timing):
            parts.append(part)
            sys.stdout.write(part)
            sys.stdout.flush()
    finally:
        if parts:
            sys.stdout.write("\n")
            sys.stdout.flush()
    return "".join(parts)


def _sampling(args: argparse.Namespace) -> dict[str, object]:
    body = {"model": args.model, "max_tokens": args.max_tokens, "temperature": args.temperature}
    return body if args.seed is None else {**body, "seed": args.seed}


def _typed(console: Console) -> Iterator[str]:
    """Lines from the terminal until end of file, or `/quit`."""
    console.print("[dim]an empty line is skipped, /quit or Ctrl-D leaves[/]")
    while True:
        try:
            line = console.input("[bold green]you:[/] ").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line:
            yield line
