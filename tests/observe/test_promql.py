"""The reader of PromQL that other tests rely on."""

import pytest

from tests.observe.promql import Matcher, read

pytestmark = pytest.mark.unit


def test_metrics_matchers_and_groups_are_found() -> None:
    query = read(
        """histogram_quantile(0.95, sum by (le, role) (rate(a:b_bucket{x="1",y=~"p.*|q",z!="{"}[5m])))
           / clamp_min(c, 1e-9) * on (instance) group_left (kind) d > 0 unless max without (w) (e[$__rate_interval]) or 3 == c"""
    )
    wanted = [Matcher("x", "=", "1"), Matcher("y", "=~", "p.*|q"), Matcher("z", "!=", "{")]
    assert query.metrics == {"a:b_bucket": wanted, "c": [], "d": [], "e": []}
    assert query.labels == {"le", "role", "instance", "kind", "w"}


def test_what_a_matcher_wants() -> None:
    assert Matcher("x", "=", "1").wanted == ["1"]
    assert Matcher("x", "=~", "p.*|q").wanted == ["p.*", "q"]
    assert Matcher("x", "!=", "1").wanted == []
