"""`kvrelay plan`: how many prefill and decode pods a load takes, by measured costs."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvrelay.cli.plan import profile as profiles
from kvrelay.cli.plan.autoscale import Targets, targets, write_component
from kvrelay.cli.plan.demand import Request, faster, of_rate, of_trace, rate_of
from kvrelay.cli.plan.profile import Profile
from kvrelay.cli.plan.search import Outcome, Target, best_split, evaluate, fastest, fewest
from kvrelay.cli.terminal import terminal

SECONDS = 600.0
HEADROOM = 0.8
"""Of the highest rate that pods keep up with: there it is time for more of them."""
FACTORS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)
"""Of that rate, in the plot."""
_BAR = 40


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    plan = commands.add_parser(
        "plan",
        help="how many prefill and decode pods a load takes",
        description="Simulates prefill and decode pods at measured costs under a load, and finds the fewest that keep the targets.",
    )
    load = plan.add_argument_group("load: a trace, or requests that are all alike")
    load.add_argument("--trace", type=Path, help="JSON lines in Mooncake's format")
    load.add_argument("--speed", type=float, default=1.0, help="times the trace's own rate [%(default)s]")
    load.add_argument("--cache-tokens", type=int, help="of a shared KV store that has the trace's prefixes [no limit]")
    load.add_argument("--rate", type=float, help="requests a second")
    load.add_argument("--prompt-tokens", type=int, default=2000, help="of each [%(default)s]")
    load.add_argument("--output-tokens", type=int, default=200, help="of each [%(default)s]")
    load.add_argument("--hit-rate", type=float, default=0.0, help="share of a prompt that is cached [%(default)s]")
    plan.add_argument("--ttft", type=float, default=2.0, help="target, seconds to the first token [%(default)s]")
    plan.add_argument(
        "--ttft-times",
        type=float,
        default=0.0,
        help="or so many times what the prompt takes alone, where that is later [%(default)s]",
    )
    plan.add_argument("--tpot", type=float, default=0.03, help="target, seconds a token after that [%(default)s]")
    plan.add_argument("--share", type=float, default=0.99, help="of the requests that are to keep both [%(default)s]")
    plan.add_argument("--pods", type=int, help="that there are: their best split, and the rate that it keeps up with")
    plan.add_argument(
        "--profile",
        default="h200-8b",
        help=f"what pods cost: one of {', '.join(profiles.names())}, or a file like them [%(default)s]",
    )
    plan.add_argument("--json", action="store_true", help="for programs")
    plan.add_argument(
        "--kustomize", type=Path, metavar="DIR", help="write the autoscaler's targets there, as a kustomize component"
    )
    plan.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    if (args.trace is None) == (args.rate is None):
        raise ValueError("give a load: --trace or --rate")
    target = Target(args.ttft, args.ttft_times, args.tpot, args.share)
    if min(args.ttft, args.tpot, args.share, args.speed) <= 0 or target.share > 1 or target.ttft_times < 0:
        raise ValueError("targets and speed must be positive, and the share at most 1")
    costs = profiles.read(args.profile)
    if args.trace is not None:
        requests = faster(of_trace(args.trace, args.cache_tokens), args.speed)
    else:
        requests = of_rate(args.rate, args.prompt_tokens, args.output_tokens, args.hit_rate, SECONDS)
    found = best_split(requests, costs, target, args.pods) if args.pods else fewest(requests, costs, target)
    most = found if args.pods else fastest(requests, costs, target, found.num_prefill, found.num_decode)
    assert most is not None, "the load itself is kept up with"

    def sped(factor: float) -> list[Request]:
        return faster(requests, factor * most.rate / rate_of(requests))

    def at(factor: float) -> Outcome:
        return evaluate(sped(factor), costs, target, found.num_prefill, found.num_decode)

    plan = Plan(found, most, targets(sped(HEADROOM), costs, at(HEADROOM)), [at(factor) for factor in FACTORS])
    if args.kustomize:
        write_component(args.kustomize, plan.targets)
    out = terminal()
    if args.json:
        out.print_json(data=_as_data(plan, costs))
        return 0
    out.print(_table(requests, plan, costs))
    out.print(_plot(plan.curve, target))
    return 0


class Plan(NamedTuple):
    found: Outcome
    most: Outcome
    """The same pods at the highest rate that they keep up with."""
    targets: Targets
    """At HEADROOM of that."""
    curve: list[Outcome]
    """By rate."""


def _as_data(plan: Plan, costs: Profile) -> dict[str, Any]:
    def plain(outcome: Outcome) -> dict[str, Any]:
        return {**outcome._asdict(), "decode": outcome.decode._asdict(), "goodput": outcome.goodput}

    return {
        "plan": plain(plan.found),
        "most": plain(plan.most),
        "cost_per_hour": plan.found.num_pods * costs.cost_per_hour,
        "autoscaling": plan.targets._asdict(),
        "rates": [plain(outcome) for outcome in plan.curve],
        "profile": msgspec.to_builtins(costs),
    }


def _table(requests: Sequence[Request], plan: Plan, costs: Profile) -> Table:
    found, more = plan.found, plan.targets
    table = Table(box=SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(style="bold")
    count = len(requests)
    prompt, cached, output = (sum(each[i] for each in requests) / count for i in (1, 2, 3))
    rows = {
        "load": f"{found.rate:.2f} requests/s: {prompt:,.0f} tokens in ({cached / prompt:.0%} cached), {output:,.0f} out",
        "prefill pods": f"{found.num_prefill}, {found.prefill_busy:.0%} busy",
        "decode pods": f"{found.num_decode}, {found.decode.busy:.0%} busy with {found.decode.sequences:.0f} sequences each",
        "first token": f"p50 {found.ttft_p50:.2f} s, p99 {found.ttft_p99:.2f} s",
        "a token after that": f"p50 {found.tpot_p50 * 1e3:.1f} ms, p99 {found.tpot_p99 * 1e3:.1f} ms",
        "goodput": f"{found.goodput:.2f} requests/s, {found.share:.1%} of all",
        "kept up to": f"{plan.most.rate:.2f} requests/s",
        "cost": f"{found.num_pods * costs.cost_per_hour:g} an hour, {found.num_pods} pods",
        "more prefill pods at": f"{more.prefill_busy:.0%} busy: {more.prefill_tokens:,.0f} tokens to compute each",
        "more decode pods at": f"{more.decode_sequences:.0f} sequences each, or {more.decode_kv_use:.0%} of their KV",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _plot(curve: Sequence[Outcome], target: Target) -> Table:
    """Goodput by rate: a bar as long as the rate, full as far as requests keep the targets."""
    title = f"within {target.ttft:g} s to the first token and {target.tpot * 1e3:g} ms a token, by rate"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("requests/s", justify="right")
    table.add_column("goodput", justify="right")
    table.add_column("")
    table.add_column("share", justify="right")
    highest = max(outcome.rate for outcome in curve)
    for outcome in curve:
        whole, kept = (round(_BAR * each / highest) for each in (outcome.rate, outcome.goodput))
        bar = "█" * kept + "░" * (whole - kept)
        table.add_row(f"{outcome.rate:.2f}", f"{outcome.goodput:.2f}", bar, f"{outcome.share:.1%}")
    return table
