"""Inputs stay in their declared ranges; a NEFF's tensors are the manifest's or are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron.errors import ManifestError
from neuron.inputs import NeffTensor, dtype_of, make_inputs, match_names, num_bytes, shared_tensors
from neuron.manifest import Tensor

POOL = Tensor(name="pool", shape=(4, 2), dtype="bfloat16")
TOKENS = Tensor(name="tokens", shape=(3,), dtype="int32", ranges=((0, 2, 5, 9),))
RANK = Tensor(name="rank_ids", shape=(1, 1), dtype="uint32", ranges=((0, 1, 0, 7),))


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, int, int, int], ...]:
    start = draw(st.integers(0, 5))
    stop = draw(st.integers(start, 12))  # the last two of them end past the tensor
    low = draw(st.integers(-100, 100))
    return ((start, stop, low, draw(st.integers(low, 120))),)


@given(ranges(), st.sampled_from(["int8", "int16", "int32", "int64"]), st.integers(0, 2**32))
def test_integers_are_inside_their_ranges_and_zero_elsewhere(
    declared: tuple[tuple[int, int, int, int], ...], dtype: str, seed: int
) -> None:
    tensor = Tensor(name="x", shape=(5, 2), dtype=dtype, ranges=declared)
    (array,) = make_inputs([tensor], rank=0, seed=seed)
    assert array.shape == (5, 2) and array.dtype == np.dtype(dtype)
    flat = array.reshape(-1)
    ((start, stop, low, high),) = declared
    assert np.all((flat[start:stop] >= low) & (flat[start:stop] <= high))
    assert not flat[:start].any() and not flat[stop:].any()


def test_both_ends_of_a_range_are_taken() -> None:
    tensor = Tensor(name="x", shape=(1000,), dtype="uint8", ranges=((0, 1000, 254, 255),))
    assert set(make_inputs([tensor], rank=0)[0].tolist()) == {254, 255}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2"])
def test_floats_are_random_and_small(dtype: str) -> None:
    tensor = Tensor(name="weights", shape=(3, 1 << 20), dtype=dtype)
    (array,) = make_inputs([tensor], rank=0)
    values = array.astype(np.float32)
    assert array.dtype == dtype_of(dtype) and array.shape == tensor.shape
    assert np.isfinite(values).all() and np.abs(values).max() < 1
    assert len(np.unique(values)) > 2


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_scalars_and_empty_tensors(shape: tuple[int, ...], dtype: str) -> None:
    (array,) = make_inputs([Tensor(name="x", shape=shape, dtype=dtype)], rank=0)
    assert array.shape == shape


def test_only_the_rank_differs_between_ranks() -> None:
    first, second = (make_inputs([POOL, TOKENS, RANK], rank=rank) for rank in (0, 5))
    assert first[2].tolist() == [[0]] and second[2].tolist() == [[5]]
    for one, other in zip(first[:2], second[:2], strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_unknown_dtype() -> None:
    with pytest.raises(ManifestError, match="float7"):
        dtype_of("float7")


def offered(*tensors: Tensor, names: tuple[str, ...]) -> list[NeffTensor]:
    return [NeffTensor(name, num_bytes(t)) for name, t in zip(names, tensors, strict=True)]


def test_the_same_names_are_taken_in_any_order() -> None:
    found = offered(TOKENS, RANK, POOL, names=("tokens", "rank_ids", "pool"))
    assert match_names([POOL, TOKENS, RANK], found) == ["pool", "tokens", "rank_ids"]


def test_unknown_names_are_taken_by_order() -> None:
    found = offered(POOL, TOKENS, RANK, names=("input0", "input1", "input2"))
    assert match_names([POOL, TOKENS, RANK], found) == ["input0", "input1", "input2"]


def test_names_that_the_program_set_come_first() -> None:
    named = [
        Tensor(name="pool", shape=(4, 2), dtype="bfloat16", neff_name="b"),
        Tensor(name="b", shape=(3,), dtype="int32", neff_name="a"),
    ]
    assert match_names(named, [NeffTensor("a", 12), NeffTensor("b", 16)]) == ["b", "a"]
    with pytest.raises(ManifestError, match="tensors of its manifest"):
        match_names(named, [NeffTensor("x", 16), NeffTensor("y", 12)])


@pytest.mark.parametrize(
    "found",
    [
        [],
        [NeffTensor("pool", 16)],
        [NeffTensor("pool", 16), NeffTensor("tokens", 11)],
        [NeffTensor("x", 12), NeffTensor("y", 16)],  # the other way round
        [NeffTensor("x", 16), NeffTensor("y", 12), NeffTensor("z", 1)],
    ],
)
def test_other_tensors_are_refused_with_both_lists(found: list[NeffTensor]) -> None:
    with pytest.raises(ManifestError, match=r"manifest=\[\('pool', 16\), \('tokens', 12\)\], neff"):
        match_names([POOL, TOKENS], found)


def test_shared_tensors_by_name() -> None:
    assert shared_tensors([(1, 0)], ["a", "b"], ["c", "d"]) == {"d": "a"}
