"""The merge of partial results by an NKI kernel."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from neuron.nki.load import launch


def merge_partials(
    outs: Float[Array, "..."], lses: Float[Array, "..."], axis: int = 0, *, lnc: int = 1
) -> tuple[Array, Array]:
    """As ``dcpjax.attention.merge_partials``, its reference.

    Args:
        lnc: physical cores per logical one, the runtime's NEURON_LOGICAL_NC_CONFIG.

    Raises:
        NkiMissingError: the nki package is not there.
    """
    axis = axis % lses.ndim
    lses = jnp.moveaxis(lses, axis, -1)
    outs = jnp.moveaxis(outs, axis, 0)
    rest, width = lses.shape[:-1], outs.shape[-1]
    finite = jnp.where(jnp.isfinite(lses), lses.astype(jnp.float32), -jnp.inf)
    kernel = launch("merge", "merge_kernel", lnc)
    out, lse = kernel(
        outs.reshape(outs.shape[0], -1, width), finite.reshape(-1, lses.shape[-1]), lnc
    )
    return out.reshape(*rest, width), lse.reshape(rest)
