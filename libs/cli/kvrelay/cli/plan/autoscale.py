"""What a pod of each kind carries when it is time for more of them: an autoscaler's targets, also as a kustomize component."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvrelay.cli.plan import pods
from kvrelay.cli.plan.demand import Request
from kvrelay.cli.plan.profile import Profile
from kvrelay.cli.plan.search import Outcome

USUAL = 0.95
"""The share of arrivals that find no longer a queue than the target: one that is longer at times does not call for more pods."""
_HEAD = """\
# By kvrelay plan: what a pod carries when it is time for more of them. List it after the component autoscale.
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component
patches:"""


class Targets(NamedTuple):
    """Each for one pod."""

    prefill_busy: float
    """Share of the time."""
    prefill_tokens: float
    """Of prompts, still to be computed."""
    prefill_queued: float
    """Requests that no prefill pod has begun."""
    decode_sequences: float
    decode_kv_use: float
    """Share of its KV blocks."""

    @property
    def thresholds(self) -> dict[str, dict[str, str]]:
        """Of the triggers in deploy/k8s/components/autoscale, by what they scale and their names, in their order there."""
        return {
            "kvrelay-prefill": {
                "waiting-tokens": _whole(self.prefill_tokens),
                "router-queue": _whole(self.prefill_queued),
            },
            "kvrelay-decode": {
                "kv-use": f"{max(0.01, self.decode_kv_use):.2f}",
                "streams": _whole(self.decode_sequences),
            },
        }


def _whole(value: float) -> str:
    return str(max(1, math.ceil(value)))


def targets(requests: Sequence[Request], profile: Profile, outcome: Outcome) -> Targets:
    """`requests` are the load of that outcome, which is as high as it may get before there are more pods."""
    queued, tokens = _usual_queue(requests, profile, outcome.num_prefill)
    return Targets(
        prefill_busy=outcome.prefill_busy,
        prefill_tokens=tokens / outcome.num_prefill,
        prefill_queued=queued / outcome.num_prefill,
        decode_sequences=outcome.decode.sequences,
        decode_kv_use=outcome.decode.kv_tokens / profile.max_kv_tokens,
    )


def _usual_queue(requests: Sequence[Request], profile: Profile, num_pods: int) -> tuple[float, float]:
    """Requests that are not begun and tokens that are not computed, as USUAL arrivals find at most."""
    ends, _ = pods.prefill(requests, profile, num_pods)
    queued, tokens = [], []
    ahead: list[tuple[float, float, int]] = []
    for request, end in zip(requests, ends, strict=True):
        now = request.arrival
        ahead = [each for each in ahead if each[1] > now]
        queued.append(sum(start > now for start, _, _ in ahead))
        tokens.append(sum(count * min(1.0, (last - now) / (last - start)) for start, last, count in ahead))
        seconds = profile.prefill_seconds(request.num_prompt, request.num_cached)
        ahead.append((end - seconds, end, request.num_prompt - request.num_cached))
    at = min(len(requests) - 1, int(USUAL * len(requests)))
    return float(sorted(queued)[at]), sorted(tokens)[at]


def write_component(folder: Path, found: Targets) -> None:
    """Into `folder`, for an overlay that names it after the component autoscale. Raises OSError."""
    lines = [_HEAD]
    for name, triggers in found.thresholds.items():
        lines += [f"  - target: {{kind: ScaledObject, name: {name}}}", "    patch: |-"]
        for number, (trigger, threshold) in enumerate(triggers.items()):
            path = f"/spec/triggers/{number}"
            # A patch does not apply where a trigger is not the one that is meant.
            lines += [
                f"      - {{op: test, path: {path}/name, value: {trigger}}}",
                f'      - {{op: replace, path: {path}/metadata/threshold, value: "{threshold}"}}',
            ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kustomization.yaml").write_text("\n".join(lines) + "\n")
