"""How values are stored in a pool.

XLA:CPU up to JAX 0.10 copies pools of bfloat16 in every step (two to four times the pool's size),
so values narrower than 32 bits are stored as integers of the same width, another one for each type:
the type of a pool tells what is in it. Neuron stores values as what they are.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from dcpjax.errors import ConfigError

_STORED_AS = {
    "float32": jnp.dtype(jnp.float32),
    "bfloat16": jnp.dtype(jnp.uint16),
    "float8_e4m3fn": jnp.dtype(jnp.uint8),
    "float8_e4m3": jnp.dtype(jnp.int8),
}
_VALUE_OF = {stored: jnp.dtype(value) for value, stored in _STORED_AS.items()}


def storage_dtype(value_dtype: DTypeLike, *, native: bool = False) -> jnp.dtype:
    """The type of a pool that holds values of ``value_dtype``.

    Args:
        native: the values' own type.

    Raises:
        ConfigError: no format for this type.
    """
    dtype = jnp.dtype(value_dtype)
    if dtype.name not in _STORED_AS:
        raise ConfigError(f"cached values are {' or '.join(_STORED_AS)}", dtype=dtype.name)
    return dtype if native else _STORED_AS[dtype.name]


def encode(values: Array, stored: DTypeLike) -> Array:
    """Values as a pool of type ``stored`` keeps them.

    8-bit values are bounded by the largest finite one of their type: beyond it ``float8_e4m3fn``
    has NaN and ``float8_e4m3`` infinity, which would spread through the attention.
    """
    dtype = _value_dtype(stored)
    if dtype.itemsize == 1:
        limit = jnp.asarray(jnp.finfo(dtype).max, values.dtype)
        values = jnp.clip(values, -limit, limit)
    values = values.astype(dtype)
    return values if dtype == stored else lax.bitcast_convert_type(values, stored)


def decode(rows: Array, dtype: DTypeLike) -> Array:
    """Stored rows as values of ``dtype``."""
    value_dtype = _value_dtype(rows.dtype)
    values = rows if rows.dtype == value_dtype else lax.bitcast_convert_type(rows, value_dtype)
    return values.astype(dtype)


def _value_dtype(stored: DTypeLike) -> jnp.dtype:
    return _VALUE_OF.get(jnp.dtype(stored), jnp.dtype(stored))
