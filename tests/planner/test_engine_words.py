"""Engines in words: what is printed is read again, and what nobody meant is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import ConfigError, UnsupportedCombination
from dcpjax.planner import Deployment, parse_engines
from dcpjax.planner.candidates import Candidate, decode_deployments, prefill_deployments
from dcpjax.planner.engine_words import engines_label

ENGINES = [
    deployment
    for size in (1, 2, 4, 8)
    for make in (prefill_deployments, decode_deployments)
    for deployment in make(size, 2, "fp8")
]
counts, engines = st.integers(1, 40), st.sampled_from(ENGINES)
SETTINGS = {"draft_tokens": 2, "cache_dtype": "fp8"}


def test_the_search_looks_at_every_kind_of_engine():
    """So the properties below are about all of them."""
    assert {engine.prefill_kv for engine in ENGINES} == {"replicated", "sharded", "layer_split"}
    assert any(engine.dp > 1 for engine in ENGINES) and Deployment(**SETTINGS) in ENGINES
    assert any(engine.prefill_kv == "layer_split" and engine.tp > 1 for engine in ENGINES)


@given(count=counts, engine=engines)
def test_printed_engines_are_read_again(count, engine):
    assert parse_engines(engines_label(count, engine), **SETTINGS) == (count, engine)
    assert parse_engines(engine.label().lower(), **SETTINGS) == (1, engine)


@given(decode=engines, num_decode=counts, source=st.none() | st.tuples(engines, counts))
def test_printed_clusters_are_read_again(decode, num_decode, source):
    candidate = Candidate(decode, num_decode, *(source or ()))
    assert Candidate.parse(candidate.label(), **SETTINGS) == candidate
    if source is not None:
        before, after = candidate.label().split(" → ")
        assert Candidate.parse(after, before, **SETTINGS) == candidate


@pytest.mark.parametrize(
    "text, expected",
    [
        ("PCP8 DCP8", (1, Deployment(pcp=8, dcp=8, prefill_kv="sharded"))),
        ("2 x tp8 dcp4", (2, Deployment(tp=8, dcp=4))),
        ("2x dcp4 TP8 ", (2, Deployment(tp=8, dcp=4))),
        *(
            (f"3×PCP8 layer{between}split", (3, Deployment(pcp=8, prefill_kv="layer_split")))
            for between in "- _"
        ),
        ("Layer Split PCP2 TP4", (1, Deployment(pcp=2, tp=4, prefill_kv="layer_split"))),
    ],
)
def test_people_may_write_otherwise(text, expected):
    assert parse_engines(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "TP",
        "2 x",
        "0 x TP8",
        "00 x TP8",
        "TP8 fast",
        "TP8 TP4",
        "layer split",
        "PCP8 split",
        "PCP8 layer",
        "PCP8 layer split layer split",
        "TP8 → TP8",
        "TP8 x 2",
    ],
)
def test_other_words_are_refused(text):
    with pytest.raises(ConfigError, match="engines are written"):
        parse_engines(text)


def test_sizes_that_do_not_fit_together_are_refused():
    with pytest.raises(UnsupportedCombination, match="sharded"):
        parse_engines("PCP8 DCP8 layer split")
    with pytest.raises(UnsupportedCombination, match="needs pcp"):
        parse_engines("TP8 layer split")


@pytest.mark.parametrize("decode", ["TP8 → TP8", "1 × TP8, prompts included"])
def test_prompts_are_given_to_one_kind_of_engines(decode):
    with pytest.raises(ConfigError, match="said once"):
        Candidate.parse(decode, "PCP8")
