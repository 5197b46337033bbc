"""Every step within the limits has a bucket, none is there twice, and none wastes much."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.config import EngineConfig
from dcpjax.errors import ConfigError
from neuron.buckets import Bucket, Buckets, BucketSettings, make_buckets

WITHOUT_LIMIT = 10**9


@st.composite
def settings(draw: st.DrawFn) -> BucketSettings:
    dcp, block_size = draw(st.integers(1, 8)), draw(st.integers(1, 64))
    interleave = draw(st.integers(1, block_size))
    stripe = dcp * interleave
    return BucketSettings(
        max_num_seqs=draw(st.integers(1, 70)),
        max_model_len=draw(st.integers(1, 100_000)),
        max_num_batched_tokens=draw(st.integers(stripe, stripe + 4096)),
        block_size=block_size,
        dcp=dcp,
        interleave=interleave,
        segment_tokens=tuple(draw(st.lists(st.integers(2, 9), max_size=2))),
        page_counts=tuple(draw(st.lists(st.integers(1, 9), max_size=3))),
        context_alignment=draw(st.sampled_from([1, 128, 128 * dcp])),
        least_context=draw(st.integers(1, 4096)),
        least_chunk=draw(st.integers(1, 600)),
        context_growth=draw(st.integers(2, 4)),
        sequence_growth=draw(st.integers(2, 4)),
        chunk_growth=draw(st.integers(2, 4)),
    )


def unit_of(made_from: BucketSettings) -> int:
    return math.lcm(made_from.block_size * made_from.dcp, made_from.context_alignment)


def largest_chunk(made_from: BucketSettings) -> int:
    stripe = made_from.dcp * made_from.interleave
    batched = made_from.max_num_batched_tokens // stripe * stripe
    return min(batched, made_from.max_model_len)


def is_bounded(size: int, used: int, growth: int, least: int, unit: int) -> bool:
    """Whether a bucket is at most what ``used``, in whole units, times the growth allows."""
    whole = -(-used // unit) * unit
    return size <= max(growth * whole, -(-least // unit) * unit)


@given(settings(), st.data())
def test_every_decode_step_fits_and_little_is_wasted(
    made_from: BucketSettings, data: st.DataObject
) -> None:
    buckets = make_buckets(made_from, max_programs=WITHOUT_LIMIT)
    sequences = data.draw(st.integers(1, made_from.max_num_seqs))
    length = data.draw(st.integers(1, made_from.max_model_len))
    found = buckets.find("decode", sequences=sequences, tokens=1, length=length)
    assert found.sequences >= sequences and found.context >= length and found.tokens == 1
    assert is_bounded(found.sequences, sequences, made_from.sequence_growth, 1, 1)
    growth, least = made_from.context_growth, made_from.least_context
    assert is_bounded(found.context, length, growth, least, unit_of(made_from))


@given(settings(), st.data())
def test_every_chunk_fits_and_little_is_wasted(
    made_from: BucketSettings, data: st.DataObject
) -> None:
    buckets = make_buckets(made_from, max_programs=WITHOUT_LIMIT)
    tokens = data.draw(st.integers(1, largest_chunk(made_from)))
    length = data.draw(st.integers(tokens, made_from.max_model_len))
    found = buckets.find("prefill", sequences=1, tokens=tokens, length=length)
    assert found.tokens >= tokens and found.context >= length and found.sequences == 1
    stripe = made_from.dcp * made_from.interleave
    assert is_bounded(found.tokens, tokens, made_from.chunk_growth, made_from.least_chunk, stripe)
    growth, least = made_from.context_growth, made_from.least_context
    assert is_bounded(found.context, length, growth, least, unit_of(made_from))


@given(settings(), st.data())
def test_every_segment_fits(made_from: BucketSettings, data: st.DataObject) -> None:
    buckets = make_buckets(made_from, max_programs=WITHOUT_LIMIT)
    for tokens in made_from.segment_tokens:
        sequences = data.draw(st.integers(1, made_from.max_num_seqs))
        length = data.draw(st.integers(min(2, made_from.max_model_len), made_from.max_model_len))
        if length == 1:  # too short for more than one token
            continue
        found = buckets.find("segment", sequences=sequences, tokens=tokens, length=length)
        assert found.tokens == tokens


@given(settings())
def test_shapes_are_whole_and_none_is_there_twice(made_from: BucketSettings) -> None:
    buckets = make_buckets(made_from, max_programs=WITHOUT_LIMIT)
    names = [bucket.name for bucket in buckets.steps]
    assert len(set(names)) == len(names)
    assert len(set(buckets.page_counts)) == len(buckets.page_counts)
    virtual_page = made_from.block_size * made_from.dcp
    for bucket in buckets.steps:
        assert bucket.context % unit_of(made_from) == 0
        assert bucket.table_width * virtual_page == bucket.context
        if bucket.kind == "prefill":
            assert bucket.tokens % (made_from.dcp * made_from.interleave) == 0
    assert buckets.num_programs == len(buckets.steps) + 2 * len(buckets.page_counts)
    assert sum(buckets.counts.values()) == buckets.num_programs


@given(settings())
def test_every_bucket_is_the_best_one_for_some_step(made_from: BucketSettings) -> None:
    """No program is compiled that no step would choose."""
    buckets = make_buckets(made_from, max_programs=WITHOUT_LIMIT)
    for bucket in buckets.steps:
        length = min(bucket.context, made_from.max_model_len)
        tokens = bucket.tokens
        if bucket.kind == "prefill":
            tokens = min(tokens, length, largest_chunk(made_from))
        sequences = bucket.sequences
        assert (
            buckets.find(bucket.kind, sequences=sequences, tokens=tokens, length=length) == bucket
        )


LIMITS = BucketSettings(
    max_num_seqs=6,
    max_model_len=1000,
    max_num_batched_tokens=512,
    block_size=16,
    dcp=4,
    interleave=16,
    segment_tokens=(4,),
    page_counts=(8, 32, 8),
)


def test_the_sizes_of_the_docstring() -> None:
    buckets = make_buckets(LIMITS)
    decode = [bucket for bucket in buckets.steps if bucket.kind == "decode"]
    assert sorted({bucket.context for bucket in decode}) == [512, 1024]
    assert sorted({bucket.sequences for bucket in decode}) == [1, 2, 4, 6]
    assert {bucket.tokens for bucket in buckets.steps if bucket.kind == "prefill"} == {128, 512}
    assert buckets.counts == {
        "decode": 8,
        "segment": 8,
        "prefill": 4,
        "page_gather": 2,
        "page_scatter": 2,
    }


def test_names_say_the_shape() -> None:
    assert Bucket("decode", 4, 1, 8192, 128).name == "decode_4x1_ctx8192"


@pytest.mark.parametrize("length", [1, 511, 512, 513, 1000])
def test_lengths_at_the_edges_of_a_bucket(length: int) -> None:
    found = make_buckets(LIMITS).find("decode", sequences=1, tokens=1, length=length)
    assert found.context == (512 if length <= 512 else 1024)


def test_a_chunk_larger_than_a_context_is_not_compiled_for_it() -> None:
    limits = dataclasses.replace(LIMITS, least_context=64, chunk_growth=2)
    shapes = {
        (bucket.tokens, bucket.context)
        for bucket in make_buckets(limits).steps
        if bucket.kind == "prefill"
    }
    assert (128, 64) in shapes  # a prompt of fifty tokens
    assert (256, 64) not in shapes and (256, 128) not in shapes and (256, 256) in shapes


def test_too_many_programs_are_refused_with_their_numbers() -> None:
    count = make_buckets(LIMITS).num_programs
    assert make_buckets(LIMITS, max_programs=count).num_programs == count
    with pytest.raises(ConfigError, match="too many") as error:
        make_buckets(LIMITS, max_programs=count - 1)
    assert error.value.values["programs"] == count
    assert error.value.values["decode"] == 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_seqs": 0},
        {"max_model_len": 0},
        {"max_num_batched_tokens": 63},  # one stripe is 64
        {"segment_tokens": (1,)},
        {"page_counts": (0,)},
        {"context_growth": 1},
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        dataclasses.replace(LIMITS, **wrong)


@pytest.mark.parametrize(
    ("kind", "sequences", "tokens", "length"),
    [
        ("decode", 7, 1, 10),
        ("decode", 1, 2, 10),
        ("decode", 1, 1, 1025),
        ("prefill", 2, 1, 10),
        ("prefill", 1, 513, 600),
        ("segment", 1, 5, 10),
    ],
)
def test_steps_beyond_the_limits_have_no_bucket(
    kind: str, sequences: int, tokens: int, length: int
) -> None:
    with pytest.raises(ConfigError, match="fits into a bucket"):
        make_buckets(LIMITS).find(kind, sequences=sequences, tokens=tokens, length=length)  # pyright: ignore[reportArgumentType]


def test_settings_of_an_engine() -> None:
    config = EngineConfig(
        "m", tensor_parallel_size=8, decode_context_parallel_size=4, cp_kv_cache_interleave_size=16
    )
    made = BucketSettings.of_engine(config, 4096, least_context=1024)
    assert (made.dcp, made.interleave, made.block_size, made.max_model_len) == (4, 16, 16, 4096)
    assert made.virtual_page_size == config.virtual_page_size
    assert made.least_context == 1024


def test_a_million_tokens_need_few_programs() -> None:
    limits = BucketSettings(
        max_num_seqs=8, max_model_len=2**20, max_num_batched_tokens=2048, dcp=4, block_size=32
    )
    buckets = make_buckets(limits)
    assert isinstance(buckets, Buckets)
    assert buckets.counts["decode"] == 4 * 12
