"""Values in storage: what goes in comes out, in as many bits as the values have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.cache import formats
from dcpjax.errors import ConfigError

DTYPES = [jnp.float32, jnp.bfloat16]
SPECIAL = [0.0, -0.0, 1.0, -1.5, 3e38, 1e-38, np.inf, -np.inf]


@pytest.mark.parametrize("dtype", DTYPES)
def test_storage_is_as_wide_as_the_values(dtype):
    stored = formats.storage_dtype(dtype)
    assert stored.itemsize == jnp.dtype(dtype).itemsize
    assert formats.storage_dtype(jnp.dtype(dtype)) == stored


def test_narrow_values_are_stored_as_unsigned_integers():
    assert formats.storage_dtype(jnp.float32) == jnp.float32
    assert formats.storage_dtype(jnp.bfloat16) == jnp.uint16


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_gives_back_what_was_encoded(dtype, jitted):
    random = np.random.default_rng(0).standard_normal(100).tolist()
    values = jnp.asarray([*SPECIAL, *random], jnp.float32).astype(dtype)

    def there_and_back(values):
        return formats.decode(formats.encode(values, formats.storage_dtype(dtype)), dtype)

    back = (jax.jit(there_and_back) if jitted else there_and_back)(values)
    assert back.dtype == dtype
    np.testing.assert_array_equal(np.asarray(back), np.asarray(values))
    assert (np.signbit(np.asarray(back)) == np.signbit(np.asarray(values))).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan(dtype):
    stored = formats.encode(jnp.full(3, jnp.nan, dtype), formats.storage_dtype(dtype))
    assert jnp.isnan(formats.decode(stored, jnp.float32)).all()


@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_values_of_other_types_are_rounded_once(given, kept, wanted):
    values = jnp.asarray([1 / 3, 1.0], jnp.float32).astype(given)
    back = formats.decode(formats.encode(values, formats.storage_dtype(kept)), wanted)
    np.testing.assert_array_equal(back, values.astype(kept).astype(wanted))


def test_bits_are_those_of_bfloat16():
    stored = formats.encode(jnp.asarray([1.0, -2.0]), jnp.uint16)
    assert [hex(bits) for bits in stored.tolist()] == ["0x3f80", "0xc000"]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int32])
def test_types_without_a_format_are_refused(dtype):
    with pytest.raises(ConfigError, match="cached values are float32 or bfloat16") as caught:
        formats.storage_dtype(dtype)
    assert caught.value.values == {"dtype": jnp.dtype(dtype).name}
