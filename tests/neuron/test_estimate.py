"""Estimates of small programs, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from neuron.estimate import LIMITS, MAX_INSTRUCTIONS, estimate
from neuron.lint import lint
from neuron.targets import find_target
from tests.neuron.lint.programs import program, spec

F32 = np.float32
TRN2 = find_target("trn2")


def matrix(*shape):
    return spec(shape, F32)


@pytest.mark.parametrize(
    "rows, inner, columns, tiles",
    [(1, 1, 1, 1), (128, 128, 512, 1), (129, 128, 512, 2), (128, 129, 513, 4), (256, 256, 1024, 8)],
)
def test_a_product_counts_tiles_of_128_by_128_by_512(rows, inner, columns, tiles):
    small = program(lambda x, y: x @ y, matrix(rows, inner), matrix(inner, columns))
    assert estimate(small).instructions == tiles


def test_the_products_of_a_batch_are_counted_one_by_one():
    small = program(jnp.matmul, matrix(3, 128, 128), matrix(3, 128, 512))
    assert estimate(small).instructions == 3


@pytest.mark.parametrize("length, tiles", [(1, 1), (128 * 512, 1), (128 * 512 + 1, 2)])
def test_other_operations_count_tiles_of_128_by_512(length, tiles):
    assert estimate(program(jnp.sin, matrix(length))).instructions == tiles


def test_a_body_counts_as_often_as_it_runs():
    def loop(count):
        return program(lambda x: lax.fori_loop(0, count, lambda i, y: jnp.sin(y), x), matrix(8))

    one, many = (estimate(loop(count)).instructions for count in (1, 10))
    assert many == 10 * one


def test_rows_that_are_written_count_and_not_what_they_are_written_into():
    small = program(
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, jnp.int32(0))),
        matrix(10**6, 512),
        matrix(129, 512),
        spec((), np.int32, 0, 5),
    )
    assert estimate(small).instructions < 10


def test_a_view_takes_neither_work_nor_memory():
    small = program(lambda x: x.reshape(8, 2), matrix(16))
    found = estimate(small)
    assert (found.instructions, found.temporary_bytes) == (0, 0)
    assert (found.parameter_bytes, found.output_bytes, found.hbm_bytes) == (64, 64, 128)


def test_an_output_in_place_of_an_input_takes_no_memory():
    apart = program(lambda x, y: (x + y, x * y), matrix(8), matrix(8))
    shared = program(lambda x, y: (x + y, x * y), matrix(8), matrix(8), aliases={0: 1})
    assert estimate(apart).output_bytes == 64
    assert estimate(shared).output_bytes == 32


def test_arrays_that_nobody_needs_any_more_take_no_memory():
    """A chain needs two of its arrays at a time, however long it is, and its output is no
    intermediate array."""

    def chain(length):
        def run(x):
            for _ in range(length):
                x = jnp.sin(x)
            return x

        return estimate(program(run, matrix(256))).temporary_bytes

    assert [chain(length) for length in (1, 2, 3, 9)] == [0, 1024, 2048, 2048]


def test_arrays_that_are_needed_later_take_memory_until_then():
    def run(x):
        parts = [jnp.sin(x + float(n)) for n in range(4)]
        return jnp.stack(parts).sum(axis=0)

    small = estimate(program(run, matrix(256)))
    assert small.temporary_bytes >= 4 * 1024


def test_a_view_keeps_what_it_looks_at():
    def run(x):
        kept = jnp.sin(x).reshape(2, 128)
        other = jnp.cos(jnp.cos(jnp.cos(x)))
        return kept.reshape(256) + other

    assert estimate(program(run, matrix(256))).temporary_bytes == 3 * 1024


def broken(small):
    return {finding.rule.name for finding in lint(small, TRN2, further=LIMITS)}


def test_too_many_instructions_are_found():
    """A product of 5,000,000 tiles, and one with a tile more."""

    def product(tiles):
        return program(lambda x, y: x @ y, matrix(128, 128), matrix(128, 512 * tiles))

    assert "instruction-count" not in broken(product(MAX_INSTRUCTIONS))
    assert "instruction-count" in broken(product(MAX_INSTRUCTIONS + 1))


def test_too_much_memory_is_found():
    limit = TRN2.hbm_bytes_per_core(2)

    def of_bytes(num_bytes):
        return program(lambda x: x, matrix(num_bytes // 4), aliases={0: 0})

    assert "hbm-bytes" not in broken(of_bytes(limit))
    assert "hbm-bytes" in broken(of_bytes(limit + 4))


def test_one_physical_core_has_half_of_the_memory():
    small = program(lambda x: x, matrix(TRN2.hbm_bytes_per_core(2) // 4), aliases={0: 0})
    assert [f.rule.name for f in lint(small, TRN2, lnc=1, further=LIMITS)] == ["hbm-bytes"]
