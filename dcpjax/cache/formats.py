"""How values are stored in a pool.

XLA:CPU up to JAX 0.10 copies pools of bfloat16 in every step (two to four times the pool's size),
so values narrower than 32 bits are stored as unsigned integers of the same width.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from dcpjax.errors import ConfigError

_STORED_AS = {
    jnp.dtype(jnp.float32): jnp.dtype(jnp.float32),
    jnp.dtype(jnp.bfloat16): jnp.dtype(jnp.uint16),
}
_VALUE_OF = {stored: value for value, stored in _STORED_AS.items()}


def storage_dtype(value_dtype: DTypeLike) -> jnp.dtype:
    """The type of a pool that holds values of ``value_dtype``.

    Raises:
        ConfigError: no format for this type.
    """
    dtype = jnp.dtype(value_dtype)
    if dtype not in _STORED_AS:
        known = " or ".join(known.name for known in _STORED_AS)
        raise ConfigError(f"cached values are {known}", dtype=dtype.name)
    return _STORED_AS[dtype]


def encode(values: Array, stored: DTypeLike) -> Array:
    """Values as a pool of type ``stored`` keeps them."""
    value_dtype = _VALUE_OF[jnp.dtype(stored)]
    return lax.bitcast_convert_type(values.astype(value_dtype), stored)


def decode(rows: Array, dtype: DTypeLike) -> Array:
    """Stored rows as values of ``dtype``."""
    return lax.bitcast_convert_type(rows, _VALUE_OF[rows.dtype]).astype(dtype)
