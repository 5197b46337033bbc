"""Partial results form a commutative monoid; merged over all shares they are the softmax."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from dcpjax.attention import attention_reference, merge, merge_partials
from tests.attention.sequences import EPS32, Tolerance

QUERIES, KEYS, HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 3, 21, 4, 2, 8, 6
SCALE = 0.4
EMPTY = (jnp.zeros((QUERIES, HEADS, VALUE_WIDTH)), jnp.full((QUERIES, HEADS), -jnp.inf))
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=20)


@functools.cache
def compiled_reference():
    return jax.jit(functools.partial(attention_reference, scale=SCALE))


@functools.cache
def compiled_merge():
    return jax.jit(merge_partials)


def partial_of(inputs, keys):
    """Dense attention to some of the keys: the others lie after every query."""
    q, k, v = inputs
    positions = np.where(np.isin(np.arange(KEYS), keys), 0, 1)
    return compiled_reference()(q, k, v, np.zeros(QUERIES, int), positions)


def random_inputs(seed, spread=1.0):
    random = np.random.default_rng(seed)
    shapes = (QUERIES, HEADS, WIDTH), (KEYS, KV_HEADS, WIDTH), (KEYS, KV_HEADS, VALUE_WIDTH)
    q, k, v = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    return q * np.float32(spread), k, v


def random_partials(seed, count):
    """Partials over random, often empty, shares of the keys."""
    holder = np.random.default_rng(seed + 1).integers(0, count, KEYS) // 2 * 2  # odd ranks: empty
    inputs = random_inputs(seed)
    return inputs, [partial_of(inputs, np.flatnonzero(holder == rank)) for rank in range(count)]


def merge_all(*partials):
    outs, lses = zip(*partials, strict=True)
    return compiled_merge()(jnp.stack(outs), jnp.stack(lses))


def assert_same(got, expected, inputs):
    q, k, v = (np.abs(x) for x in inputs)
    score = SCALE * float(np.max(np.sum(q.max((0, 1)) * k.max((0, 1)))))
    tolerance = Tolerance(WIDTH, KEYS + 8, score, float(v.max()))
    np.testing.assert_allclose(got[0], expected[0], rtol=0, atol=tolerance.out)
    np.testing.assert_allclose(got[1], expected[1], rtol=0, atol=tolerance.lse)


@few
@given(seed=seeds, count=st.integers(1, 8))
def test_any_split_of_the_keys_gives_the_softmax_over_all(seed, count):
    inputs, partials = random_partials(seed, count)
    assert_same(merge_all(*partials), partial_of(inputs, np.arange(KEYS)), inputs)


@few
@given(seed=seeds)
def test_associative(seed):
    inputs, (a, b, c) = random_partials(seed, 3)
    left, right = merge_all(merge_all(a, b), c), merge_all(a, merge_all(b, c))
    assert_same(left, right, inputs)


@few
@given(seed=seeds, order=st.permutations(range(4)))
def test_commutative(seed, order):
    inputs, partials = random_partials(seed, 4)
    assert_same(merge_all(*(partials[i] for i in order)), merge_all(*partials), inputs)


@few
@given(seed=seeds)
def test_identity(seed):
    _, (a, _) = random_partials(seed, 2)
    for merged in (merge_all(a, EMPTY), merge_all(EMPTY, a)):
        np.testing.assert_array_equal(merged[0], a[0])
        np.testing.assert_array_equal(merged[1], a[1])


def test_nothing_and_nothing_is_nothing():
    out, lse = merge_all(EMPTY, EMPTY, EMPTY)
    assert (out == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("lse", [-np.inf, np.nan, np.inf])
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_what_foreign_kernels_return_for_an_empty_shard_does_no_harm(lse, value):
    _, (a, _) = random_partials(3, 2)
    empty = jnp.full_like(EMPTY[0], value), jnp.full_like(EMPTY[1], lse)
    for merged in (merge_all(a, empty), merge_all(empty, a)):
        np.testing.assert_array_equal(merged[0], a[0])
        np.testing.assert_array_equal(merged[1], a[1])


def test_a_partial_that_saw_something_does_not_hide_its_nan():
    _, (a, _) = random_partials(3, 2)
    assert np.isnan(merge_all(a, (a[0] * np.nan, a[1]))[0]).all()


def test_natural_logarithm():
    """Weights of 1 and 3 keys with equal scores: 1/4 and 3/4."""
    out, lse = merge_partials(
        jnp.array([[[0.0]], [[4.0]]]), jnp.array([[math.log(1.0)], [math.log(3.0)]])
    )
    assert out.item() == pytest.approx(3.0, rel=4 * EPS32)
    assert lse.item() == pytest.approx(math.log(4.0), rel=4 * EPS32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_results_are_float32(dtype):
    out, lse = merge_partials(jnp.ones((2, 3, 4), dtype), jnp.zeros((2, 3), dtype))
    assert out.dtype == lse.dtype == jnp.float32


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_large_scores_neither_overflow_nor_vanish(shift):
    out, lse = merge_partials(jnp.array([[[1.0]], [[3.0]]]), jnp.full((2, 1), shift))
    assert lse.item() == pytest.approx(shift + math.log(2), rel=EPS32)
    # The merged lse is rounded to half an ulp of its size, and that much is a weight off.
    assert out.item() == pytest.approx(2.0, rel=abs(shift) * EPS32)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_the_axis_of_the_partials_may_be_any_of_the_lse(axis):
    random = np.random.default_rng(0)
    outs, lses = random.standard_normal((3, 4, 2, 5)), random.standard_normal((3, 4, 2))
    outs, lses = outs.astype(np.float32), lses.astype(np.float32)
    merged = merge_partials(jnp.asarray(outs), jnp.asarray(lses), axis=axis)
    place = axis % 3
    expected = merge_partials(
        jnp.asarray(np.moveaxis(outs, place, 0)), jnp.asarray(np.moveaxis(lses, place, 0))
    )
    for got, want in zip(merged, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=8 * EPS32, atol=8 * EPS32)


def partials_of_ranks(ranks, empty):
    """[ranks, 8, 16, 5] and [ranks, 8, 16]; those in ``empty`` saw nothing and return NaN."""
    random = np.random.default_rng(ranks)
    outs = random.standard_normal((ranks, 8, 16, 5)).astype(np.float32)
    lses = 3 * random.standard_normal((ranks, 8, 16)).astype(np.float32)
    outs[list(empty)], lses[list(empty)] = np.nan, -np.inf
    lses[:, 0, 0] = -np.inf  # a query that nobody can answer
    return outs, lses


@pytest.mark.parametrize("ranks, empty", [(1, ()), (2, (0,)), (4, ()), (4, (1, 3)), (8, (0, 5, 7))])
@pytest.mark.parametrize("scatter", [0, 1])
@pytest.mark.parametrize("backend", sorted(merge.MERGES))
def test_merging_over_a_mesh_axis_is_merging_locally(backend, scatter, ranks, empty):
    def on_rank(out, lse):
        return merge.MERGES[backend](out[0], lse[0], "r", scatter=scatter)

    mesh = Mesh(np.array(jax.devices()[:ranks]), ("r",))
    spread, cut = PartitionSpec("r"), PartitionSpec(*(None,) * scatter, "r")
    merged = jax.jit(
        jax.shard_map(on_rank, mesh=mesh, in_specs=(spread, spread), out_specs=cut, check_vma=True)
    )
    outs, lses = partials_of_ranks(ranks, empty)
    expected, _ = merge_partials(jnp.asarray(outs), jnp.asarray(lses))
    # The ranks' shares are summed in another order.
    size = float(np.nanmax(np.abs(outs))) * (ranks + 8) * EPS32
    np.testing.assert_allclose(merged(outs, lses), expected, rtol=0, atol=size)
    assert (np.asarray(expected)[0, 0] == 0).all()
