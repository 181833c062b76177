"""The planner's pods against simulations step by step, and what it says of loads whose answer is known."""

import json
import random
from pathlib import Path

import msgspec
import pytest

from kvrelay.cli.main import main
from kvrelay.cli.plan import pods, profile, search
from kvrelay.cli.plan.autoscale import targets
from kvrelay.cli.plan.demand import Request, faster, of_rate, of_trace, rate_of
from kvrelay.cli.plan.profile import Profile
from kvrelay.cli.plan.search import Target

pytestmark = pytest.mark.unit

COSTS = profile.read("h200-8b")
TARGET = Target(ttft=2.0, ttft_times=0.0, tpot=0.03, share=0.99)


def costs(**changes: float) -> Profile:
    return msgspec.structs.replace(COSTS, **changes)


def some(count: int, rate: float, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    at, found = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        found.append(Request(at, rng.randrange(1, 4000), 0, rng.randrange(1, 60)))
    return found


def by_steps(requests: list[Request], computed: list[float], costs: Profile, num_pods: int) -> list[float]:
    """When each ends: every step of every pod on its own. A sequence joins at the end of the step that it finds running."""
    pending = sorted(
        (computed[i] + request.num_prompt * costs.transfer_seconds_per_token, i)
        for i, request in enumerate(requests)
        if request.num_output > 1
    )
    ends = list(computed)
    running: list[dict[int, int]] = [{} for _ in range(num_pods)]
    clocks = [0.0] * num_pods
    while pending or any(running):
        pod = min((p for p in range(num_pods) if running[p]), key=clocks.__getitem__, default=None)
        if pending and (pod is None or pending[0][0] <= clocks[pod]):
            at, i = pending.pop(0)
            best = min(range(num_pods), key=lambda p: len(running[p]))
            clocks[best] = max(clocks[best], at) if not running[best] else clocks[best]
            running[best][i] = 0
            continue
        assert pod is not None
        context = sum(requests[i].num_prompt + done for i, done in running[pod].items())
        clocks[pod] += costs.step_seconds(len(running[pod]), context)
        for i in list(running[pod]):
            running[pod][i] += 1
            if running[pod][i] == requests[i].num_output - 1:
                ends[i] = clocks[pod]
                del running[pod][i]
    return ends


@pytest.mark.parametrize("num_pods", [1, 3])
@pytest.mark.parametrize("rate", [2.0, 40.0])
def test_decode_is_what_its_steps_are(num_pods: int, rate: float) -> None:
    """Up to a step at each end: here a token does not wait for the next step to begin."""
    requests = some(200, rate)
    computed, _ = pods.prefill(requests, COSTS, 4)
    served, load = pods.decode(requests, computed, COSTS, num_pods)
    ends = by_steps(requests, computed, COSTS, num_pods)
    for request, first, end, one in zip(requests, computed, ends, served, strict=True):
        assert one.ttft == first - request.arrival
        exact = (end - first) / max(request.num_output - 1, 1)
        slack = 3 * COSTS.step_seconds(64, 64 * 4000) / max(request.num_output - 1, 1)
        assert one.tpot == pytest.approx(exact, rel=0.15, abs=slack)
    assert 0 < load.busy <= 1 + 1e-9


def test_a_pod_has_only_so_much_room() -> None:
    """What does not fit waits until another has ended; alone, everything fits."""
    requests = [Request(0.0, 100, 0, 11), Request(0.0, 100, 0, 11), Request(0.0, 500, 0, 2)]
    alone = costs(transfer_seconds_per_token=0, step_seconds_per_context_token=0, step_seconds_per_sequence=0)
    small = msgspec.structs.replace(alone, step_seconds_fixed=0.01, max_kv_tokens=150)
    served, _ = pods.decode(requests, [0.0, 0.0, 0.0], small, 1)
    assert [round(each.tpot * (request.num_output - 1), 9) for request, each in zip(requests, served, strict=True)] == [
        0.1, 0.2, 0.21,
    ]  # fmt: skip
    seats = msgspec.structs.replace(small, max_kv_tokens=10_000, max_sequences=2)
    served, load = pods.decode(requests, [0.0, 0.0, 0.0], seats, 1)
    assert served[2].tpot == pytest.approx(0.11)
    assert load.sequences == pytest.approx((2 * 0.1 + 0.01) / 0.11)


def test_prompts_wait_for_the_pod_that_is_free_first() -> None:
    even = costs(prefill_seconds_fixed=0, prefill_seconds_per_token=1.0, prefill_seconds_per_token_pair=0)
    requests = [Request(0.0, 4, 0, 1), Request(0.0, 2, 0, 1), Request(1.0, 5, 4, 1), Request(9.0, 1, 0, 1)]
    assert pods.prefill(requests, even, 2) == ([4.0, 2.0, 3.0, 10.0], pytest.approx(8 / 20))


def test_what_a_prefill_pod_carries_before_there_are_more() -> None:
    """Two pods, a second a token."""
    even = costs(prefill_seconds_fixed=0, prefill_seconds_per_token=1.0, prefill_seconds_per_token_pair=0)
    crowd = [
        Request(0.0, 4, 0, 2),
        Request(0.0, 5, 1, 2),
        Request(0.0, 6, 0, 2),
        Request(2.0, 8, 0, 2),
        Request(3.0, 1, 0, 2),
    ]
    requests = crowd + [Request(100.0 * number, 1, 0, 2) for number in range(1, 36)]

    def of(count: int) -> tuple[float, float]:
        found = targets(requests[:count], even, search.evaluate(requests[:count], even, TARGET, 2, 3))
        return found.prefill_queued, found.prefill_tokens

    # What the fifth finds: a second each of the first two, and the third and the fourth whole.
    assert of(20) == (2 / 2, (1 + 1 + 6 + 8) / 2)
    # One in forty may find more: what the fourth finds.
    assert of(40) == (1 / 2, (2 + 2 + 6) / 2)


@pytest.mark.parametrize("seed", range(3))
def test_fewer_pods_do_not_keep_the_target(seed: int) -> None:
    requests = of_rate(20.0, 3000, 150, 0.25, 60.0, seed)
    found = search.fewest(requests, COSTS, TARGET)
    assert found.share >= TARGET.share
    for num_prefill in range(1, found.num_pods - 1):
        fewer = search.evaluate(requests, COSTS, TARGET, num_prefill, found.num_pods - 1 - num_prefill)
        assert fewer.share < TARGET.share


def test_the_best_split_is_the_best_of_all() -> None:
    requests = of_rate(8.0, 3000, 150, 0.0, 30.0)
    best = search.best_split(requests, COSTS, TARGET, 4)
    others = [search.fastest(requests, COSTS, TARGET, n, 4 - n) for n in (1, 2, 3)]
    assert best.goodput == max(other.goodput for other in others if other is not None)
    faster_still = search.evaluate(
        faster(requests, 1.05 * best.rate / rate_of(requests)), COSTS, TARGET, best.num_prefill, best.num_decode
    )
    assert faster_still.share < TARGET.share


def test_long_prompts_may_have_longer() -> None:
    requests = of_rate(0.5, 100_000, 20, 0.0, 200.0)
    with pytest.raises(ValueError, match="too many prompts take longer even alone"):
        search.fewest(requests, COSTS, TARGET)
    assert search.fewest(requests, COSTS, TARGET._replace(ttft_times=3.0)).share >= TARGET.share
    with pytest.raises(ValueError, match="a step takes longer even with few sequences"):
        search.fewest(requests, COSTS, TARGET._replace(ttft_times=3.0, tpot=0.001))
    with pytest.raises(ValueError, match="cannot be kept at any rate"):
        search.best_split(requests, COSTS, TARGET, 4)
    with pytest.raises(ValueError, match="two pods"):
        search.best_split(requests, COSTS, TARGET, 1)


def line(at: float, num_prompt: int, blocks: list[int]) -> str:
    return json.dumps({"timestamp": at, "input_length": num_prompt, "output_length": 5, "hash_ids": blocks})


def test_prefixes_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [line(0, 1024, [1, 2]), line(2000, 1500, [1, 2, 3]), line(1000, 512, [4]), line(3000, 600, [1, 5])]
    trace.write_text("\n".join(lines))
    assert of_trace(trace, None) == [
        Request(0.0, 1024, 0, 5), Request(1.0, 512, 0, 5), Request(2.0, 1500, 1024, 5), Request(3.0, 600, 512, 5),
    ]  # fmt: skip
    # Two blocks: a prompt's end goes first, so its first block is what the next one finds.
    assert [request.num_cached for request in of_trace(trace, 1024)] == [0, 0, 512, 512]
    assert [request.num_cached for request in of_trace(trace, 0)] == [0, 0, 0, 0]
    trace.write_text(line(0, 512, [1]) + "\n" + line(1, 512, [1]))
    assert of_trace(trace, None)[1].num_cached == 511, "the last token is computed"
    for bad in ("", '{"timestamp": 0}', line(0, 0, [])):
        trace.write_text(bad)
        with pytest.raises(ValueError, match=r"no trace|no requests"):
            of_trace(trace, None)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--rate", "10", "--prompt-tokens", "4000", "--output-tokens", "100", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["plan"]["share"] >= 0.99
    assert said["most"]["rate"] >= said["plan"]["rate"]
    assert said["cost_per_hour"] == said["plan"]["num_prefill"] + said["plan"]["num_decode"]
    assert all(value > 0 for name, value in said["autoscaling"].items() if name != "prefill_queued")
    assert main(["plan", "--rate", "10", "--pods", "3"]) == 0
    assert "prefill pods" in capsys.readouterr().out
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"about": "nothing"}')
    for options in (
        [], ["--rate", "1", "--trace", "x"], ["--rate", "-1"], ["--rate", "1", "--share", "1.5"],
        ["--rate", "1", "--profile", str(wrong)], ["--rate", "1", "--profile", "none"],
    ):  # fmt: skip
        assert main(["plan", *options]) == 1
        assert "kvrelay:" in capsys.readouterr().err
