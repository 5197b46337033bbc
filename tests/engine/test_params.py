"""Sampling parameters: each field has its type and range, and convenient forms become one."""

import math
from typing import Any

import pytest

from dcpjax.config import has_type
from dcpjax.engine.params import MAX_FACTOR, SamplingParams
from dcpjax.errors import RequestError


@pytest.mark.parametrize("name", sorted(SamplingParams.__dataclass_fields__))
@pytest.mark.parametrize("wrong", ["x", b"x", 1.5, object(), [None], {"a": "b"}, True])
def test_no_type_of_value_is_more_than_a_request_error(name: str, wrong: Any) -> None:
    """What is accepted is stored in the field's own type, what is not names the field."""
    try:
        params = SamplingParams(**{name: wrong})
    except RequestError as error:
        assert error.param == name
        assert len(str(error)) < 300
    else:
        kind = SamplingParams.__dataclass_fields__[name].type
        assert has_type(getattr(params, name), kind)
        assert isinstance(wrong, str | bool | float), "no collection stands for another thing"


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("max_tokens", [None, 1], [0, -1, 1.0]),
        ("temperature", [0, 0.5, MAX_FACTOR], [-0.1, math.nan, math.inf, 1e300, 10**400]),
        ("top_k", [-1, 0, 2**31 - 1], [-2, 2**31]),
        ("top_p", [1e-9, 1], [0, 1.1, math.nan]),
        ("min_p", [0, 1], [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [1 / MAX_FACTOR, MAX_FACTOR], [0, 1e-40, math.inf, math.nan]),
        ("presence_penalty", [-2, 2], [2.1, math.nan]),
        ("seed", [None, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1]),
        ("n", [1, 128], [0, 129]),
        ("stop_token_ids", [[], range(60)], [range(61), [1.0], [True]]),
        ("stop", [[], "x", ["x"] * 64], [["x"] * 65, [""], ["x" * 4097]]),
        (
            "logit_bias",
            [{}, {1: -math.inf}, {1: -(10**9)}],
            [{1: math.inf}, {1: math.nan}, {1: 1e300}, {1: "1"}],
        ),
        ("logit_bias", [[(1, 2)]], [[(1, 2, 3)], [1], {"1": 2}, {i: 0 for i in range(65)}]),
        ("logprobs", [None, 0, 20], [-1, 21, True]),
    ],
)
def test_ranges(name: str, accepted: list[Any], refused: list[Any]) -> None:
    for value in accepted:
        SamplingParams(**{name: value})
    for value in refused:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


def test_forms_of_one_value_are_equal() -> None:
    by_mapping = SamplingParams(logit_bias={5: 1, 7: -2.5}, stop="x", stop_token_ids=[1, 2])  # type: ignore[arg-type]
    pairs = ((5, 1.0), (7, -2.5))
    assert by_mapping == SamplingParams(logit_bias=pairs, stop=("x",), stop_token_ids=(1, 2))
    assert [type(bias) for _, bias in by_mapping.logit_bias] == [float, float]
    assert SamplingParams(logit_bias=[[5, 1], (7, -2.5)]).logit_bias == pairs  # type: ignore[arg-type]
    hash(by_mapping)


def test_min_tokens_is_at_most_max_tokens() -> None:
    SamplingParams(min_tokens=16)
    SamplingParams(min_tokens=17, max_tokens=None)
    with pytest.raises(RequestError, match="min_tokens is at most max_tokens"):
        SamplingParams(min_tokens=17)
