"""Rows with scales, bit for bit against NumPy, and through pools without a copy of them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from dcpjax.cache import rows
from dcpjax.cache.pool import PoolShape, allocate_pool
from dcpjax.cache.rows import RowFormat
from dcpjax.cache.scaled_rows import Fp8KeyPages, Fp8LatentRows
from dcpjax.engine.audit import audit_step
from dcpjax.errors import ConfigError
from dcpjax.mesh import decode_mesh

FP8 = jnp.dtype(jnp.float8_e4m3fn)
TINY = np.finfo(np.float32).tiny
LATENT, KEYS = Fp8LatentRows(512, 64), Fp8KeyPages(128)
FORMATS: dict[str, tuple[RowFormat, int]] = {
    "latent": (LATENT, 576),
    "small latent": (Fp8LatentRows(128, 6), 134),
    "no rope": (Fp8LatentRows(256, 0), 256),
    "keys": (KEYS, 128),
    "small keys": (Fp8KeyPages(16), 16),
}
PAGES, LAYERS, PAGE = 6, 2, 4


def flushed(values: np.ndarray) -> np.ndarray:
    """As XLA:CPU takes numbers below the least normal one."""
    return np.where(np.abs(values) < TINY, np.copysign(np.float32(0), values), values)


def latent_by_numpy(row: np.ndarray, latent: int) -> bytes:
    """One row of fp8_ds_mla."""
    tiles = flushed(row[:latent]).reshape(-1, 128)
    scales = np.maximum(np.abs(tiles).max(axis=1) / np.float32(448), TINY)
    values = np.clip(tiles / scales[:, None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    rope = row[latent:].astype(ml_dtypes.bfloat16)
    return values.tobytes() + scales.astype("<f4").tobytes() + rope.tobytes()


def key_page_by_numpy(keys: np.ndarray) -> bytes:
    """A page of an indexer's keys [P, D]."""
    scales = np.maximum(np.abs(keys).max(axis=1), np.float32(1e-4)) / np.float32(448)
    values = np.clip(keys / scales[:, None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return values.tobytes() + scales.astype("<f4").tobytes()


def edge_rows(width: int) -> np.ndarray:
    """Zeros, one value alone, largest values at multiples of 448, tiny and huge ones, ties."""
    random = np.random.default_rng(0)
    ramp = np.linspace(-1, 1, width, dtype=np.float32)
    kinds = [
        np.zeros(width),
        -np.zeros(width),
        np.eye(1, width)[0],
        *(ramp * 448 * factor for factor in (1, 2, 3, 7, 0.5, 2**-20, 2**40)),
        ramp * 1e-4,
        ramp * 9.99e-5,
        ramp * 3e38,
        ramp * TINY * 500,
        np.where(np.arange(width) % 2, 17.0, 448.0),  # 17 lies between two values
        *(random.standard_normal((20, width)) * np.exp2(random.integers(-30, 30, (20, 1)))),
    ]
    return np.asarray(kinds, np.float32)


def random_rows(width: int, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 1, width)).astype(np.float32)


def pool_of(row_format: RowFormat, width: int, fill: int = 0) -> jax.Array:
    shape = PoolShape(PAGES - 1, LAYERS, 1, PAGE, width, FP8, row_format=row_format)
    return jnp.full(shape.array_shape(1), fill, shape.storage_dtype)


def places(count: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    slots = np.random.default_rng(seed).permutation(PAGES * PAGE)[:count]
    pages, offsets = np.divmod(slots, PAGE)
    return jnp.asarray(pages, jnp.int32), jnp.asarray(offsets, jnp.int32)


# Bytes


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("latent, rope", [(512, 64), (128, 0), (256, 6)])
def test_a_latent_has_the_bytes_of_its_description(latent, rope, jitted):
    row_format, values = Fp8LatentRows(latent, rope), edge_rows(latent + rope)
    values[:, latent:] = np.random.default_rng(1).standard_normal((len(values), rope))
    pack = jax.jit(row_format.pack) if jitted else row_format.pack
    packed = np.asarray(pack(values if jitted else jnp.asarray(values)))
    assert packed.shape == (len(values), row_format.row_bytes)
    for row, found in zip(values, packed, strict=True):
        assert found.tobytes() == latent_by_numpy(row, latent)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("width", [128, 16])
def test_a_key_page_has_the_bytes_of_its_description(width, jitted):
    row_format, values = Fp8KeyPages(width), edge_rows(width)
    page_size = len(values)
    write = jax.jit(row_format.write, static_argnums=1) if jitted else row_format.write
    pool = jnp.zeros((2, 1, 1, *row_format.page_extent(page_size, width)), jnp.uint8)
    order = np.random.default_rng(0).permutation(page_size)
    pages = jnp.ones(page_size, jnp.int32)
    filled = write(pool, 0, pages, jnp.asarray(order), jnp.asarray(values[order][:, None]))
    assert np.asarray(filled)[1].tobytes() == key_page_by_numpy(values)
    assert not np.asarray(filled)[0].any()


def test_sizes_are_those_of_other_engines():
    assert LATENT.row_bytes == 656
    assert KEYS.page_extent(64, 128) == (1, 64 * 132)
    latents = PoolShape(9, 78, 1, 64, 576, FP8, row_format=LATENT)
    keys = PoolShape(9, 21, 1, 64, 128, FP8, row_format=KEYS)
    assert latents.page_bytes(1) == 78 * 64 * 656
    assert keys.page_bytes(1) == 21 * 64 * 132
    assert keys.rank_bytes(1) == 10 * keys.page_bytes(1)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dcp", [1, 3])
def test_a_pool_takes_the_bytes_that_it_says(name, dcp):
    row_format, width = FORMATS[name]
    shape = PoolShape(5, LAYERS, 1, PAGE, width, FP8, row_format=row_format)
    pool = allocate_pool(shape, decode_mesh(jax.devices()[:dcp], dcp))
    assert pool.dtype == jnp.uint8
    assert {one.data.nbytes for one in pool.addressable_shards} == {shape.rank_bytes(1)}


# Values


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_read_is_near_what_was_written(name, dtype):
    """Half a unit in the last of four bits, or half of the least value that its scale allows."""
    row_format, width = FORMATS[name]
    values = edge_rows(width)[:, None]
    values = values[np.abs(values).max(axis=(1, 2)) < 1e38][: PAGES * PAGE]
    pages, offsets = places(len(values))
    pool = rows.write_rows(
        pool_of(row_format, width), 1, pages, offsets, jnp.asarray(values), row_format
    )
    found = rows.read_rows(pool, 1, pages, offsets, dtype, row_format)
    assert found.dtype == dtype and found.shape == values.shape
    error = np.abs(np.asarray(found, np.float32) - values)
    largest = np.abs(values).max(axis=2, keepdims=True)
    least = np.maximum(largest, 1e-4) / 448 * 2**-10
    assert (error <= np.abs(values) * (2**-4 + 2**-8) + least).all()


@pytest.mark.parametrize("name", FORMATS)
def test_rows_and_pages_are_the_same_values(name):
    row_format, width = FORMATS[name]
    slots = np.arange(PAGES * PAGE)
    pages, offsets = (jnp.asarray(x, jnp.int32) for x in np.divmod(slots, PAGE))
    values = jnp.asarray(random_rows(width, len(slots)))
    pool = rows.write_rows(pool_of(row_format, width), 1, pages, offsets, values, row_format)
    one_by_one = rows.read_rows(pool, 1, pages, offsets, jnp.float32, row_format)
    ids = jnp.asarray([4, 0, 4, 5], jnp.int32)
    found = rows.read_pages(pool, 1, ids, jnp.float32, row_format)
    expected = np.asarray(one_by_one).reshape(PAGES, PAGE, width)[ids].reshape(1, -1, width)
    np.testing.assert_array_equal(found, expected)
    none = rows.read_pages(pool, 1, ids[:0], jnp.float32, row_format)
    assert none.shape == (1, 0, width)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [0, 1, PAGE + 1])
def test_a_write_changes_nothing_but_its_rows(name, count):
    """The pages hold NaN, as values and as scales; the neighbours of what is written still do."""
    row_format, width = FORMATS[name]
    before = pool_of(row_format, width, fill=0xFF)
    pages, offsets = places(count)
    values = jnp.asarray(random_rows(width, count))
    after = rows.write_rows(before, 0, pages, offsets, values, row_format)
    ids = jnp.arange(PAGES, dtype=jnp.int32)
    for layer in range(LAYERS):
        found = np.asarray(rows.read_pages(after, layer, ids, jnp.float32, row_format))[0]
        is_written = np.zeros(PAGES * PAGE, bool)
        if layer == 0:
            is_written[np.asarray(pages) * PAGE + np.asarray(offsets)] = True
        assert np.isfinite(found[is_written]).all()
        assert np.isnan(found[~is_written]).all()
    rewritten = rows.write_rows(before, 0, pages, offsets, values * 0, row_format)
    changed = np.asarray(after != rewritten).any(axis=(2, 3, 4))
    assert not changed[:, 1].any(), "the other layer"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_stays_alone(name, bad):
    row_format, width = FORMATS[name]
    values = random_rows(width, PAGE)
    values[1] = bad
    pages, offsets = jnp.full(PAGE, 2, jnp.int32), jnp.arange(PAGE, dtype=jnp.int32)
    pool = rows.write_rows(
        pool_of(row_format, width), 0, pages, offsets, jnp.asarray(values), row_format
    )
    found = rows.read_pages(pool, 0, pages[:1], jnp.float32, row_format)[0]
    is_finite = np.isfinite(np.asarray(found)).all(axis=1)
    assert is_finite.tolist() == [True, False, True, True]


def test_tokens_of_a_key_page_cannot_be_copied_as_rows():
    """132 bytes per token, but not one after the other: a slice of them is something else."""
    values = jnp.asarray(random_rows(128, PAGE))
    pages, offsets = jnp.full(PAGE, 2, jnp.int32), jnp.arange(PAGE, dtype=jnp.int32)
    source = rows.write_rows(pool_of(KEYS, 128), 0, pages, offsets, values, KEYS)
    target = np.array(pool_of(KEYS, 128))
    expected = rows.read_pages(source, 0, pages[:1], jnp.float32, KEYS)[0]

    def read(pool: np.ndarray) -> jax.Array:
        return rows.read_pages(jnp.asarray(pool), 0, pages[:1], jnp.float32, KEYS)[0]

    half = PAGE // 2 * 132
    target[2, 0, 0, 0, :half] = np.asarray(source)[2, 0, 0, 0, :half]
    assert not np.asarray(read(target))[: PAGE // 2].any(), "their scales have not come along"
    target[2] = np.asarray(source)[2]
    np.testing.assert_array_equal(read(target), expected)
    copied = rows.write_rows(
        pool_of(KEYS, 128), 0, pages[:2], offsets[:2], expected[:2, None], KEYS
    )
    again = rows.read_pages(copied, 0, pages[:1], jnp.float32, KEYS)[0]
    np.testing.assert_allclose(again[:2], expected[:2], rtol=1e-6)


# In place


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_writes_and_reads_in_loops_leave_the_pool_in_place(name, tokens):
    """Each layer: write, then read rows and pages in a loop whose length is not known before."""
    row_format, width = FORMATS[name]

    def step(pool, pages, offsets, values, trips):
        total = jnp.zeros((1, width))
        for layer in range(LAYERS):
            pool = rows.write_rows(pool, layer, pages, offsets, values + total[None], row_format)

            def read(index, total, pool=pool, layer=layer):
                here = rows.read_pages(pool, layer, pages, jnp.float32, row_format)
                places = pages, (offsets + index) % PAGE
                chosen = rows.read_rows(pool, layer, *places, jnp.float32, row_format)
                return total + jnp.sum(here, axis=1) + jnp.sum(chosen, axis=0)

            total = lax.fori_loop(0, trips, read, total)
        return pool, total

    audits = []
    for num_pages in (PAGES, 2 * PAGES):
        shape = PoolShape(num_pages, LAYERS, 1, PAGE, width, FP8, row_format=row_format)
        pool = jnp.zeros(shape.array_shape(1), shape.storage_dtype)
        arguments = (pool, *places(tokens), jnp.asarray(random_rows(width, tokens)), jnp.int32(2))
        compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
        audits.append(audit_step(compiled, "rows", pool_shapes=[pool.shape]))
        assert audits[-1].aliased_bytes == pool.nbytes
    assert audits[0].temporary_bytes == audits[1].temporary_bytes


# What is refused


@pytest.mark.parametrize("latent", [0, 64, 127, 129, 576])
def test_latents_that_do_not_come_in_tiles_are_refused(latent):
    with pytest.raises(ConfigError, match="multiple of 128") as caught:
        Fp8LatentRows(latent, 64)
    assert caught.value.values == {"kv_lora_rank": latent, "qk_rope_head_dim": 64}


@pytest.mark.parametrize("row_format", [LATENT, KEYS], ids=["latent", "keys"])
def test_rows_of_another_width_or_type_are_refused(row_format):
    with pytest.raises(ConfigError, match="values of its format"):
        row_format.page_extent(16, 100)
    with pytest.raises(ConfigError, match="hold float8_e4m3fn"):
        row_format.storage_dtype(jnp.dtype(jnp.bfloat16), native=False)
