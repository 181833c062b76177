"""Sampling parameters: each field's bounds, and which field an error names."""

import math
from typing import Any

import pytest

from kvrelay.common.errors import InvalidRequest
from kvrelay.common.request import SamplingParams

pytestmark = pytest.mark.unit

VOCAB = 1000
INT_MAX = 2**31 - 1

# Field, values that are allowed, values that are not.
BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    ("n", [1, 128], [0, -1, 129]),
    ("max_tokens", [None, 1, INT_MAX], [0, -1, INT_MAX + 1]),
    ("min_tokens", [0, 1, INT_MAX], [-1, INT_MAX + 1]),
    ("temperature", [0.0, 1e-9, 2.0, 100.0], [-0.1, 100.1, math.inf]),
    ("top_p", [1e-9, 0.5, 1.0], [0.0, -0.1, 1.0001, math.inf]),
    ("top_k", [-1, 0, 1, INT_MAX], [-2, INT_MAX + 1]),
    ("min_p", [0.0, 0.5, 1.0], [-0.1, 1.1, -math.inf]),
    ("repetition_penalty", [1e-9, 1.0, 100.0], [0.0, -1.0, 100.1, math.inf]),
    ("presence_penalty", [-2.0, 0.0, 2.0], [-2.1, 2.1, math.inf]),
    ("frequency_penalty", [-2.0, 0.0, 2.0], [-2.1, 2.1, -math.inf]),
    (
        "logit_bias",
        [{}, {0: -100.0, VOCAB - 1: 100.0}, dict.fromkeys(range(VOCAB), 0.0)],
        [{0: 100.1}, {0: -100.1}, {0: math.inf}, {-1: 0.0}, {VOCAB: 0.0}, dict.fromkeys(range(1025), 0.0)],
    ),
    ("seed", [None, 0, -(2**63), 2**63 - 1], [-(2**63) - 1, 2**63]),
    ("logprobs", [None, 0, 20], [-1, 21]),
    ("prompt_logprobs", [None, 0, 20], [-1, 21]),
    ("stop", [(), ("a",), ("x",) * 64, ("é" * 512,)], [("",), ("a", ""), ("x",) * 65, ("é" * 512 + "x",)]),
    ("stop_token_ids", [(), (0, VOCAB - 1), (1,) * 256], [(-1,), (VOCAB,), (1,) * 257]),
]
FLOATS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]


def with_field(name: str, value: Any) -> SamplingParams:
    return SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, good, _ in BOUNDS for value in good])
def test_what_is_within_the_bounds_is_taken(name: str, value: Any) -> None:
    params = with_field(name, value)
    params.validate(VOCAB)
    assert getattr(params, name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, _, bad in BOUNDS for value in bad])
def test_what_is_outside_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as raised:
        with_field(name, value).validate(VOCAB)
    assert raised.value.param == name


@pytest.mark.parametrize("name", FLOATS)
def test_nan_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        with_field(name, math.nan).validate(VOCAB)
    assert raised.value.param == name


def test_nan_bias_is_refused() -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(logit_bias={3: math.nan}).validate(VOCAB)
    assert raised.value.param == "logit_bias"


def test_every_number_has_a_row_in_this_table() -> None:
    switches = {"include_stop_str_in_output", "ignore_eos", "skip_special_tokens"}
    assert {name for name, _, _ in BOUNDS} | switches == set(SamplingParams.__struct_fields__)


def test_min_tokens_over_max_tokens() -> None:
    SamplingParams(min_tokens=5, max_tokens=5).validate(VOCAB)
    with pytest.raises(InvalidRequest, match="max_tokens") as raised:
        SamplingParams(min_tokens=6, max_tokens=5).validate(VOCAB)
    assert raised.value.param == "min_tokens"


def test_the_first_wrong_field_is_named() -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(n=0, temperature=-1.0, stop=("",)).validate(VOCAB)
    assert raised.value.param == "n"


def test_a_stop_string_with_a_lone_surrogate_does_not_break_the_check() -> None:
    params = SamplingParams(stop=("\ud800",))
    params.validate(VOCAB)
    assert params.stop == ("\ud800",)


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(temperature=-0.0).greedy
    assert not SamplingParams().greedy
