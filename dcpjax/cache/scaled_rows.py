"""Rows of 8-bit floats with a float32 scale for some values each, byte for byte as vLLM has them.

``Fp8LatentRows`` is what ``kv_cache_dtype="fp8_ds_mla"`` means for a latent, ``Fp8KeyPages`` what
it means for the keys of an indexer. Both store ``float8_e4m3fn``: a value is the stored one times
its scale. Numbers below the least normal float32 count as zero where the device flushes them. A row
with a NaN or an infinity is NaN where it is read, at least there; it touches no other row.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, UInt8

from dcpjax.cache import formats
from dcpjax.cache.parts import DRAFT_INDEXER, INDEXER, CachePart
from dcpjax.cache.rows import RowFormat, heads_first, store_rows, stored_pages, stored_rows
from dcpjax.config import GlmConfig, ModelConfig
from dcpjax.errors import ConfigError, UnsupportedCombination

FP8_DS_MLA = "fp8_ds_mla"
"""The setting of ``kv_cache_dtype`` that means these formats."""

BYTE = jnp.dtype(jnp.uint8)
VALUES = jnp.dtype(jnp.float8_e4m3fn)
LARGEST = 448.0
"""The largest finite value of the type."""
SCALE_BYTES = 4

TILE = 128
"""Values of a latent that share a scale."""
LEAST_LATENT_SCALE = float(np.finfo(np.float32).tiny)
LEAST_KEY = 1e-4
"""A key's scale is at least that of a key with this largest value."""


@dataclass(frozen=True)
class Fp8LatentRows:
    """A latent and a rotated key: 656 bytes for 512 and 64 values.

    A row has ``latent`` 8-bit values, then a float32 scale for each 128 of them, then ``rope``
    values of bfloat16, which have no scale.

    Raises:
        ConfigError: the latent is no multiple of 128 values.
    """

    latent: int
    rope: int

    def __post_init__(self) -> None:
        if self.latent < 1 or self.latent % TILE or self.rope < 0:
            raise ConfigError(
                f"fp8_ds_mla stores latents of a multiple of {TILE} values",
                kv_lora_rank=self.latent,
                qk_rope_head_dim=self.rope,
            )

    @property
    def tiles(self) -> int:
        return self.latent // TILE

    @property
    def row_bytes(self) -> int:
        return self.latent + self.tiles * SCALE_BYTES + self.rope * 2

    @property
    def field_bytes(self) -> tuple[int, ...]:
        return ()

    def page_extent(self, page_size: int, width: int) -> tuple[int, int]:
        _check_width(width, self.latent + self.rope)
        return page_size, self.row_bytes

    def storage_dtype(self, values: jnp.dtype, *, native: bool) -> jnp.dtype:
        return _bytes_of(values)

    def write(
        self, pool: Array, layer: int | Array, pages: Array, offsets: Array, rows: Array
    ) -> Array:
        return store_rows(pool, layer, pages, offsets, self.pack(rows))

    def read(
        self, pool: Array, layer: int | Array, pages: Array, offsets: Array, dtype: DTypeLike
    ) -> Array:
        return self.unpack(stored_rows(pool, layer, pages, offsets), dtype)

    def read_pages(
        self, pool: Array, layer: int | Array, page_ids: Array, dtype: DTypeLike
    ) -> Array:
        stored = heads_first(stored_pages(pool, layer, page_ids, 0, self.row_bytes))
        return self.unpack(stored, dtype)

    def pack(self, rows: Float[Array, "... W"]) -> UInt8[Array, "... B"]:
        """Rows as bytes."""
        leading = rows.shape[:-1]
        tiles = rows[..., : self.latent].reshape(*leading, self.tiles, TILE).astype(jnp.float32)
        scales = jnp.maximum(_over_largest(_largest_of(tiles)), LEAST_LATENT_SCALE)
        values = formats.encode(tiles / scales, BYTE).reshape(*leading, self.latent)
        rope = rows[..., self.latent :].astype(jnp.bfloat16)
        return jnp.concatenate([values, _to_bytes(scales[..., 0]), _to_bytes(rope)], axis=-1)

    def unpack(self, stored: UInt8[Array, "... B"], dtype: DTypeLike) -> Float[Array, "... W"]:
        """Bytes as rows of ``dtype``."""
        ends = (self.latent, self.row_bytes - self.rope * 2)
        values, scales, rope = jnp.split(stored, ends, axis=-1)
        tiles = values.reshape(*stored.shape[:-1], self.tiles, TILE)
        scales = _from_bytes(scales, jnp.float32)[..., None]
        latent = (formats.decode(tiles, jnp.float32) * scales).reshape(values.shape).astype(dtype)
        return jnp.concatenate([latent, _from_bytes(rope, jnp.bfloat16).astype(dtype)], axis=-1)


@dataclass(frozen=True)
class Fp8KeyPages:
    """Keys of an indexer: 132 bytes for 128 values.

    A page has the 8-bit values of all its rows, and after them the float32 scales of all of them.
    So the bytes of a token do not lie together, and a copy of some of a page's tokens is two.
    """

    width: int

    @property
    def field_bytes(self) -> tuple[int, ...]:
        return self.width, SCALE_BYTES

    def page_extent(self, page_size: int, width: int) -> tuple[int, int]:
        _check_width(width, self.width)
        return 1, page_size * (self.width + SCALE_BYTES)

    def storage_dtype(self, values: jnp.dtype, *, native: bool) -> jnp.dtype:
        return _bytes_of(values)

    def write(
        self, pool: Array, layer: int | Array, pages: Array, offsets: Array, rows: Array
    ) -> Array:
        wide = rows.astype(jnp.float32)
        scales = _over_largest(jnp.maximum(_largest_of(wide), LEAST_KEY))
        values = formats.encode(wide / scales, BYTE)
        for part, column in (
            (values, offsets * self.width),
            (_to_bytes(scales), self._scale_column(pool, offsets)),
        ):
            pool = _store_columns(pool, layer, pages, column, part)
        return pool

    def read(
        self, pool: Array, layer: int | Array, pages: Array, offsets: Array, dtype: DTypeLike
    ) -> Array:
        values = _stored_columns(pool, layer, pages, offsets * self.width, self.width)
        column = self._scale_column(pool, offsets)
        return _scaled(values, _stored_columns(pool, layer, pages, column, SCALE_BYTES), dtype)

    def read_pages(
        self, pool: Array, layer: int | Array, page_ids: Array, dtype: DTypeLike
    ) -> Array:
        page_size = self._page_size(pool)
        after = page_size * self.width
        values = stored_pages(pool, layer, page_ids, 0, after)
        scales = stored_pages(pool, layer, page_ids, after, page_size * SCALE_BYTES)
        of_rows = (*values.shape[:2], page_size)
        values, scales = values.reshape(*of_rows, self.width), scales.reshape(*of_rows, SCALE_BYTES)
        return heads_first(_scaled(values, scales, dtype))

    def _page_size(self, pool: Array) -> int:
        return pool.shape[-1] // (self.width + SCALE_BYTES)

    def _scale_column(self, pool: Array, offsets: Array) -> Array:
        return offsets * SCALE_BYTES + self._page_size(pool) * self.width


def scaled_format(part: CachePart, model: ModelConfig, device_fp8: str) -> RowFormat:
    """The format of a part of the model's cache.

    Args:
        device_fp8: the 8-bit float that the device has.

    Raises:
        UnsupportedCombination: the model caches no latents, or the device has another 8-bit float.
        ConfigError: the latent is no multiple of 128 values.
    """
    if not isinstance(model, GlmConfig):
        raise UnsupportedCombination(
            "kv_cache_dtype fp8_ds_mla is for latents, and the model caches keys and values",
            kv_cache_dtype=FP8_DS_MLA,
            architecture=model.architecture,
        )
    if device_fp8 != VALUES.name:
        raise UnsupportedCombination(
            f"kv_cache_dtype fp8_ds_mla stores {VALUES.name}, which the device does not have",
            kv_cache_dtype=FP8_DS_MLA,
            device_fp8=device_fp8,
        )
    if part.name in (INDEXER, DRAFT_INDEXER):
        return Fp8KeyPages(part.width)
    return Fp8LatentRows(model.kv_lora_rank, model.qk_rope_head_dim)


def _check_width(width: int, expected: int) -> None:
    if width != expected:
        raise ConfigError("a row has the values of its format", width=width, of_format=expected)


def _bytes_of(values: jnp.dtype) -> jnp.dtype:
    if values != VALUES:
        raise ConfigError(f"scaled rows hold {VALUES.name}", dtype=values.name)
    return BYTE


def _largest_of(values: Float[Array, "... n"]) -> Float[Array, "... 1"]:
    return jnp.max(jnp.abs(values), axis=-1, keepdims=True)


def _over_largest(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """``values / 448``, rounded once.

    XLA multiplies by the reciprocal where it divides by a constant, which rounds twice: half of the
    scales would not be those of others. It does not see that this is one.
    """
    return values / (values * 0 + LARGEST)


def _scaled(values: UInt8[Array, "... n"], scales: UInt8[Array, "... 4"], dtype: DTypeLike):
    """Stored values times their scales."""
    wide = formats.decode(values, jnp.float32) * _from_bytes(scales, jnp.float32)
    return wide.astype(dtype)


def _to_bytes(values: Float[Array, "... n"]) -> UInt8[Array, "... b"]:
    stored = lax.bitcast_convert_type(values, BYTE)
    return stored.reshape(*values.shape[:-1], values.shape[-1] * values.dtype.itemsize)


def _from_bytes(stored: UInt8[Array, "... b"], dtype: DTypeLike) -> Float[Array, "... n"]:
    size = jnp.dtype(dtype).itemsize
    grouped = stored.reshape(*stored.shape[:-1], stored.shape[-1] // size, size)
    return lax.bitcast_convert_type(grouped, dtype)


def _places(layer: int | Array, pages: Array, columns: Array) -> Array:
    return jnp.stack([pages, jnp.full_like(pages, layer), columns.astype(pages.dtype)], axis=-1)


def _store_columns(
    pool: Array, layer: int | Array, pages: Array, columns: Array, stored: UInt8[Array, "T h n"]
) -> Array:
    """The pool with n bytes for each token and head, from its column of its page on."""
    return lax.scatter(
        pool,
        _places(layer, pages, columns),
        stored,
        lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2),
            inserted_window_dims=(0, 1, 3),
            scatter_dims_to_operand_dims=(0, 1, 4),
        ),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def _stored_columns(
    pool: Array, layer: int | Array, pages: Array, columns: Array, count: int
) -> UInt8[Array, "R h count"]:
    """What :func:`_store_columns` has stored."""
    return lax.gather(
        pool,
        _places(layer, pages, columns),
        lax.GatherDimensionNumbers(
            offset_dims=(1, 2), collapsed_slice_dims=(0, 1, 3), start_index_map=(0, 1, 4)
        ),
        slice_sizes=(1, 1, pool.shape[2], 1, count),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
