"""The largest logits of a row and their ids, lowest id first among equals; no sort, no top-k."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float32, Int32

NUM_LOGPROBS = 20
"""Alternatives reported per token."""

BLOCK = 256
"""Tokens of a block in the search for the largest logits."""

_LARGEST_FLOAT = float(jnp.finfo(jnp.float32).max)
_TAKEN = int(jnp.iinfo(jnp.int32).min)  # below the key of −inf


def without_nan(logits: Float32[Array, "R V"]) -> Float32[Array, "R V"]:
    """NaN as −inf and +inf as the largest number, so that comparisons and differences are sound."""
    return jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, _LARGEST_FLOAT))


def first_minimum(values: Float32[Array, "R V"]) -> Int32[Array, " R"]:
    """Lowest id of the least value of each row. Two passes, because argmin does not vectorise."""
    ids = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    least = jnp.min(values, axis=1, keepdims=True)
    return jnp.min(jnp.where(values == least, ids, values.shape[1] - 1), axis=1)


def largest(
    logits: Float32[Array, "R V"],
) -> tuple[Float32[Array, "R NUM_LOGPROBS"], Int32[Array, "R NUM_LOGPROBS"]]:
    """Values and ids of the NUM_LOGPROBS largest logits, which hold no NaN, in falling order.

    They lie in the NUM_LOGPROBS blocks with the largest maxima, lowest block first among equals:
    any other block comes after that many blocks which each hold a better token, or an equal one
    with a lower id. So the vocabulary is read once, and the rounds see few values. Places that a
    smaller vocabulary does not fill hold −inf.
    """
    keys = _blocks(_ordered(logits))
    rows, num_blocks, _ = keys.shape
    _, blocks = _take_largest(jnp.max(keys, axis=2), min(NUM_LOGPROBS, num_blocks))
    blocks = _ascending(blocks)[:, :, None]  # so that among equal keys the lowest id comes first
    ids = blocks * BLOCK + lax.broadcasted_iota(jnp.int32, (1, 1, BLOCK), 2)
    candidates = jnp.take_along_axis(keys, blocks, axis=1).reshape(rows, -1)
    best, places = _take_largest(candidates, NUM_LOGPROBS)
    values = jnp.where(best == _TAKEN, -jnp.inf, _from_ordered(best))
    return values, jnp.take_along_axis(ids.reshape(rows, -1), places, axis=1)


def _blocks(keys: Array) -> Array:
    """[R, V] as [R, blocks, BLOCK]; the places after the vocabulary are already taken."""
    rows, size = keys.shape
    num_blocks = -(-size // BLOCK)
    padding = ((0, 0), (0, num_blocks * BLOCK - size))
    return jnp.pad(keys, padding, constant_values=_TAKEN).reshape(rows, num_blocks, BLOCK)


def _take_largest(keys: Array, num: int) -> tuple[Array, Array]:
    """Keys and places of the ``num`` largest keys of each row, lowest place among equals."""
    places = lax.broadcasted_iota(jnp.int32, keys.shape, 1)

    def take(left: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        best = jnp.max(left, axis=1)
        place = jnp.min(jnp.where(left == best[:, None], places, keys.shape[1] - 1), axis=1)
        return jnp.where(places == place[:, None], _TAKEN, left), (best, place)

    _, (best, place) = lax.scan(take, keys, length=num)
    return best.T, place.T


def _ascending(values: Array) -> Array:
    """The few, distinct values of each row in ascending order: by counting the smaller ones."""
    places = jnp.sum((values[:, :, None] > values[:, None, :]).astype(jnp.int32), axis=2)
    is_at = places[:, :, None] == lax.broadcasted_iota(jnp.int32, (1, 1, values.shape[1]), 2)
    return jnp.sum(jnp.where(is_at, values[:, :, None], 0), axis=1)


def _ordered(values: Array) -> Array:
    """Integers in the order of float32 values (no NaN); −0 and 0 are equal."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _from_ordered(keys: Array) -> Array:
    return lax.bitcast_convert_type(keys ^ ((keys >> 31) & 0x7FFFFFFF), jnp.float32)
