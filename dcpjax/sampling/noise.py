"""Random numbers as a pure function of (seed, counter, token id): no state, no order, no batch."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float32, Int32, UInt32

LANES = 128
"""Tokens that take the same output word of consecutive counters; see :func:`random_bits`."""


def negated_gumbel(
    seed: UInt32[Array, "R 2"], counter: Int32[Array, " R"], size: int
) -> Float32[Array, "R {size}"]:
    """Negated Gumbel variates, that is logarithms of exponential ones, in [−23, 3].

    The least ``distance + variate`` wins, so the lower tail must be fine: ``u`` has the relative
    precision of float32 down to its smallest value, 2^-33.
    """
    bits = random_bits(seed, counter, size)
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return jnp.log(-jnp.log1p(-u))


def random_bits(
    seed: UInt32[Array, "R 2"], counter: Int32[Array, " R"], size: int
) -> UInt32[Array, "R {size}"]:
    """32 random bits per token: a function of (seed, counter, token id) and of nothing else.

    Above all not of ``size``, which is padded differently on different meshes. With L = LANES, the
    tokens of block b take both output words of L counters::

        token  [2bL, (2b+1)L)              [(2b+1)L, (2b+2)L)
        bits   word 0 of [bL, (b+1)L)      word 1 of [bL, (b+1)L)
    """
    key = threefry(seed[:, 0], seed[:, 1], counter.astype(jnp.uint32), jnp.uint32(0))
    rows, blocks = seed.shape[0], -(-size // (2 * LANES))
    counts = lax.iota(jnp.uint32, blocks * LANES).reshape(1, blocks, LANES)
    words = threefry(key[0][:, None, None], key[1][:, None, None], counts, jnp.uint32(0))
    return jnp.concatenate(words, axis=2).reshape(rows, blocks * 2 * LANES)[:, :size]


def threefry(key0: Array, key1: Array, count0: Array, count1: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds, the generator of jax.random, elementwise on uint32.

    Written out because jax.random runs it as a loop over arrays on CPU (2 to 6 times slower in this
    place), as a loop that Neuron refuses, and in an order that a global setting changes.
    """
    schedule = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    a, b = count0 + key0, count1 + key1
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            a = a + b
            b = a ^ ((b << rotation) | (b >> (32 - rotation)))
        a = a + schedule[(group + 1) % 3]
        b = b + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return a, b
