"""Who may connect to whom by the NetworkPolicies of some manifests, within their namespace."""

from collections.abc import Iterable

from tests.deploy.k8s.manifests import Doc, Workload, of_kind


def allowed(docs: Iterable[Doc], source: Workload, target: Workload, port: int) -> bool:
    """By TCP. Both ends must allow it."""
    policies = of_kind(docs, "NetworkPolicy")
    return _leaves(policies, source, target, port) and _enters(policies, source, target, port)


def _leaves(policies: list[Doc], source: Workload, target: Workload, port: int) -> bool:
    rules = _rules(policies, source, "Egress")
    return rules is None or any(_matches(rule, "to", target, port, target) for rule in rules)


def _enters(policies: list[Doc], source: Workload, target: Workload, port: int) -> bool:
    rules = _rules(policies, target, "Ingress")
    return rules is None or any(_matches(rule, "from", source, port, target) for rule in rules)


def _rules(policies: list[Doc], pod: Workload, direction: str) -> list[Doc] | None:
    """None: nothing selects the pod, so all is allowed."""
    specs = [policy["spec"] for policy in policies]
    chosen = [spec for spec in specs if direction in spec["policyTypes"] and selects(spec["podSelector"], pod.labels)]
    if not chosen:
        return None
    return [rule for spec in chosen for rule in spec.get(direction.lower(), ())]


def _matches(rule: Doc, side: str, other: Workload, port: int, target: Workload) -> bool:
    peers = rule.get(side)
    if peers is not None and not any(_is_peer(peer, other) for peer in peers):
        return False
    return "ports" not in rule or any(_is_port(entry, port, target) for entry in rule["ports"])


def _is_peer(peer: Doc, other: Workload) -> bool:
    """Of other namespaces and of addresses, none is one of these pods."""
    return set(peer) == {"podSelector"} and selects(peer["podSelector"], other.labels)


def _is_port(entry: Doc, port: int, target: Workload) -> bool:
    first = entry["port"]
    if isinstance(first, str):
        [first] = [each["containerPort"] for each in target.container["ports"] if each["name"] == first]
    return entry["protocol"] == "TCP" and first <= port <= entry.get("endPort", first)


def selects(selector: Doc, labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    if any(labels.get(name) != value for name, value in selector.get("matchLabels", {}).items()):
        return False
    for part in selector.get("matchExpressions", ()):
        assert part["operator"] == "In"
        if labels.get(part["key"]) not in part["values"]:
            return False
    return True
