"""Rows go into a pool and come out of it, one by one and by pages, without a copy of the pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dcpjax.cache import formats, rows
from dcpjax.engine.audit import audit_step

PAGES, LAYERS, HEADS, PAGE, WIDTH = 7, 3, 2, 4, 6
DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "float8_e4m3"]


def slots_of(random: np.random.Generator, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Distinct places: pages, offsets."""
    slots = random.permutation(PAGES * PAGE)[:tokens]
    pages, offsets = np.divmod(slots, PAGE)
    return jnp.asarray(pages, jnp.int32), jnp.asarray(offsets, jnp.int32)


def full_pool(random: np.random.Generator, dtype: str) -> tuple[jax.Array, np.ndarray]:
    """A pool of random values, and the values."""
    values = jnp.asarray(random.standard_normal((PAGES, LAYERS, HEADS, PAGE, WIDTH)), dtype)
    return formats.encode(values, formats.storage_dtype(dtype)), np.array(values, np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, PAGE, PAGES * PAGE])
def test_rows_come_out_as_they_went_in(dtype, tokens):
    random = np.random.default_rng(tokens)
    pool, before = full_pool(random, dtype)
    pages, offsets = slots_of(random, tokens)
    values = jnp.asarray(random.standard_normal((tokens, HEADS, WIDTH)), jnp.float32)
    layer = jnp.int32(1)
    written = rows.write_rows(pool, layer, pages, offsets, values)
    back = rows.read_rows(written, layer, pages, offsets, jnp.float32)
    kept = np.asarray(values.astype(dtype).astype(jnp.float32))
    np.testing.assert_array_equal(back, kept)
    before[pages, 1, :, offsets] = kept
    np.testing.assert_array_equal(formats.decode(written, jnp.float32), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", [[], [3], [6, 0, 2], [5, 5]])
def test_pages_are_read_in_the_given_order(dtype, ids):
    pool, values = full_pool(np.random.default_rng(0), dtype)
    found = rows.read_pages(pool, 2, jnp.asarray(ids, jnp.int32), jnp.bfloat16)
    expected = values[ids, 2].transpose(1, 0, 2, 3).reshape(HEADS, -1, WIDTH)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), jnp.bfloat16(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_writes_and_reads_in_loops_leave_the_pool_in_place(dtype, tokens):
    """Each layer: write, then read rows and pages in a loop whose length is not known before."""

    def step(pool, pages, offsets, values, trips):
        total = jnp.zeros((HEADS, WIDTH))
        for layer in range(LAYERS):
            pool = rows.write_rows(pool, layer, pages, offsets, values + total[None])

            def read(index, total, pool=pool, layer=layer):
                here = rows.read_pages(pool, layer, pages, jnp.float32)
                chosen = rows.read_rows(pool, layer, pages, (offsets + index) % PAGE, jnp.float32)
                return total + jnp.sum(here, axis=1) + jnp.sum(chosen, axis=0)

            total = lax.fori_loop(0, trips, read, total)
        return pool, total

    pool, _ = full_pool(np.random.default_rng(0), dtype)
    pages, offsets = slots_of(np.random.default_rng(1), tokens)
    arguments = (pool, pages, offsets, jnp.ones((tokens, HEADS, WIDTH)), jnp.int32(2))
    compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    found = audit_step(compiled, "rows", pool_shapes=[pool.shape])
    assert found.aliased_bytes == pool.nbytes
