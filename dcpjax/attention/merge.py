"""The algebra of partial attention results.

A partial result is (out, lse): attention over some of the keys, and the natural logarithm of the
sum of its exponentiated scores. Merging is associative and commutative; the result over no keys,
(0, −inf), is its identity. Always float32: a bfloat16 lse costs accuracy that shows in the tokens.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float


def merge_lses(lses: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """The lse of all partials together; −inf where all are empty.

    A NaN or +inf, which foreign kernels return for empty shards, counts as empty.
    """
    lses = _finite_or_empty(lses)
    highest = jnp.max(lses, axis=axis, keepdims=True)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)  # −inf − −inf is NaN
    total = jnp.sum(jnp.exp(lses - highest), axis=axis, keepdims=True)
    return jnp.squeeze(highest + jnp.log(total), axis)


def weigh(
    out: Float[Array, "... D"], lse: Float[Array, "..."], merged: Float[Array, "..."]
) -> Float[Array, "... D"]:
    """``exp(lse − merged) · out``: the share of one partial; 0 for an empty one, even of NaN."""
    lse = _finite_or_empty(lse)
    weight = jnp.where(lse > -jnp.inf, jnp.exp(lse - merged), 0.0)[..., None]
    return jnp.where(weight > 0, out.astype(jnp.float32), 0.0) * weight


def _finite_or_empty(lses: Array) -> Array:
    return jnp.where(jnp.isfinite(lses), lses.astype(jnp.float32), -jnp.inf)


def merge_partials(
    outs: Float[Array, "..."], lses: Float[Array, "..."], axis: int = 0
) -> tuple[Array, Array]:
    """Merge partials that are stacked along ``axis`` of both arrays.

    ``out = Σ_r exp(lse_r − logsumexp lse) · out_r``; outs has one axis more than lses, the last.

    Returns:
        out, lse: float32, without ``axis``.
    """
    axis = axis % lses.ndim
    lse = merge_lses(lses, axis)
    return jnp.sum(weigh(outs, lses, jnp.expand_dims(lse, axis)), axis=axis), lse


def merge_scattered(
    out: Float[Array, "... D"], lse: Float[Array, "..."], axis_name: str, *, scatter: int
) -> Float[Array, "... D"]:
    """Merge over the ranks of a mesh axis and keep this rank's share along axis ``scatter``.

    Two collectives: all-gather of lse, reduce-scatter of the weighted outputs (``ag_rs``).
    """
    merged = merge_lses(lax.all_gather(lse, axis_name), 0)
    share = weigh(out, lse, merged)
    return lax.psum_scatter(share, axis_name, scatter_dimension=scatter, tiled=True)


def merge_exchanged(
    out: Float[Array, "... D"], lse: Float[Array, "..."], axis_name: str, *, scatter: int
) -> Float[Array, "... D"]:
    """As :func:`merge_scattered`, by one all-to-all of outputs and lse together (``a2a``)."""
    ranks = lax.axis_size(axis_name)
    packed = jnp.concatenate([out.astype(jnp.float32), lse[..., None]], axis=-1)
    shape = packed.shape
    share = (*shape[:scatter], ranks, shape[scatter] // ranks, *shape[scatter + 1 :])
    exchanged = lax.all_to_all(
        packed.reshape(share), axis_name, split_axis=scatter, concat_axis=0, tiled=False
    )
    return merge_partials(exchanged[..., :-1], exchanged[..., -1])[0]


def merge_summed(
    out: Float[Array, "... D"],
    lse: Float[Array, "..."],
    axes: tuple[str, ...],
    *,
    scattered: str,
    scatter: int,
) -> Float[Array, "... D"]:
    """As :func:`merge_scattered` over several mesh axes, of which one keeps shares.

    The ranks along the others all get the same. All-gather of lse, then a reduce-scatter over the
    one axis and a sum over the others.
    """
    merged = merge_lses(lax.all_gather(lse, axes), 0)
    share = weigh(out, lse, merged)
    if lax.axis_size(scattered) > 1:
        share = lax.psum_scatter(share, scattered, scatter_dimension=scatter, tiled=True)
    return lax.psum(share, tuple(axis for axis in axes if axis != scattered))


MERGES = {"ag_rs": merge_scattered, "a2a": merge_exchanged}
