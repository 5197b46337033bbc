"""Prompt attention with the tokens of a chunk split over the DCP ranks and the queries gathered.

Each rank projects only the tokens that it owns, so the attention weights are whole on every DCP
rank. Three collectives: all-gather of the queries, all-gather of lse, reduce-scatter of the
outputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jaxtyping import Float, Integer, Shaped

from dcpjax.attention.block import Block, take_tokens, window_offsets
from dcpjax.attention.decode import attend_block
from dcpjax.attention.merge import MERGES, merge_scattered
from dcpjax.attention.segment import segment_attention
from dcpjax.errors import LayoutError
from dcpjax.form import DYNAMIC, StepForm
from dcpjax.layout import global_position, window_order
from dcpjax.mesh import DCP


def prefill_attention(
    own_q: Float[Array, "B S H D"],
    own_k: Float[Array, "B S k D"],
    own_v: Float[Array, "B S k Dv"],
    pool: Shaped[Array, "pages L k P W"],
    layer: int | Array,
    block: Block,
    *,
    scale: float,
    comm_backend: str,
    form: StepForm = DYNAMIC,
) -> Float[Array, "B S H Dv"]:
    """Attend with all queries, and return the merged outputs of this rank's own tokens (float32).

    The chunk may start anywhere: which of its tokens a rank owns follows from their positions.
    """
    q = gather_tokens(own_q, block)
    out, lse = attend_block(
        q.reshape(-1, *q.shape[2:]), own_k, own_v, pool, layer, block, scale=scale, form=form
    )
    out, lse = (x.reshape(block.rows, block.width, *x.shape[1:]) for x in (out, lse))
    order = _rank_major_order(block)
    out, lse = take_tokens(out, order), take_tokens(lse, order)
    return MERGES[comm_backend](out, lse, DCP, scatter=1)


def gather_tokens(own: Float[Array, "B S ..."], block: Block) -> Float[Array, "B width ..."]:
    """All tokens of the block, in position order, from each rank's own ones."""
    by_rank = lax.all_gather(own, DCP, axis=1, tiled=True)
    sharding = block.sharding
    order = jax.vmap(
        lambda start: window_order(
            start, block.width, ranks=sharding.ranks, interleave=sharding.interleave
        )
    )(block.prior_lengths)
    return take_tokens(by_rank, order)


def _rank_major_order(block: Block) -> Integer[Array, "B width"]:
    """Token offsets of rank 0, then those of rank 1, …: how a reduce-scatter deals them out."""
    rows = [
        window_offsets(block.width, block.prior_lengths, rank, block.sharding)
        for rank in range(block.sharding.ranks)
    ]
    return jnp.concatenate(rows, axis=1)


def segmented_attention_cp(
    q: Float[Array, "H _ _"],
    k_local: Float[Array, "K s D"],
    v_local: Float[Array, "K s Dv"],
    k_cache: Float[Array, "pages K P D"],
    v_cache: Float[Array, "pages K P Dv"],
    block_tables: Integer[Array, "1 M"],
    prior_tokens: Integer[Array, "1 1"],
    block_size: int,
    cp_rank: Any,
    cp_world_size: int,
    cp_kv_cache_interleave_size: int,
    cp_group: str | None,
    scale: float,
    tp_q: bool = False,
    tp_out: bool = False,
) -> Array:
    """AWS Neuron's call of the same name, heads first, on top of :func:`segment_attention`.

    Needs alignment: the prior and the chunk are multiples of world size · interleave, so local
    counts determine global ones (a traced prior cannot be checked). Inside ``shard_map`` over the
    mesh axis ``cp_group`` (None without ranks).

    Args:
        q: all queries of the chunk in position order [H, S, D]; [H, D, S] with ``tp_q``.
        k_local, v_local: this rank's own tokens of the chunk.
        k_cache, v_cache: this rank's pages; ``block_tables`` names those of the sequence.
        prior_tokens: number of prior tokens that this rank holds.
        tp_out: return [H, Dv, S / world size].

    Returns:
        this rank's slice of the merged outputs in position order [H, S / world size, Dv].

    Raises:
        LayoutError: sizes that do not fit together, or a misaligned chunk or prior.
    """
    ranks, interleave = cp_world_size, cp_kv_cache_interleave_size
    queries = (q.swapaxes(1, 2) if tp_q else q).swapaxes(0, 1)
    keys, values = k_local.swapaxes(0, 1), v_local.swapaxes(0, 1)
    _check_chunk(queries.shape[0], keys.shape[0], ranks, interleave, cp_group)
    _check_prior(prior_tokens, interleave, block_size, k_cache.shape[2])
    prior = prior_tokens.reshape(()) * ranks
    rank = jnp.asarray(cp_rank, prior.dtype).reshape(())
    offsets = jnp.arange(keys.shape[0], dtype=prior.dtype)
    out, lse = segment_attention(
        queries,
        jnp.concatenate([k_cache, v_cache], axis=-1),
        block_tables[0],
        prior,
        keys,
        values,
        prior + global_position(offsets, rank, ranks=ranks, interleave=interleave),
        rank,
        ranks=ranks,
        interleave=interleave,
        scale=scale,
    )
    if cp_group is not None:
        out = merge_scattered(out, lse, cp_group, scatter=0)
    out = out.swapaxes(0, 1).astype(q.dtype)
    return out.swapaxes(1, 2) if tp_out else out


def _check_chunk(
    num_tokens: int, num_local: int, ranks: int, interleave: int, group: str | None
) -> None:
    if group is None and ranks > 1:
        raise LayoutError("several ranks merge over a mesh axis, cp_group", cp_world_size=ranks)
    if num_local * ranks != num_tokens:
        raise LayoutError(
            "a chunk is cp_world_size times the tokens of each rank",
            chunk=num_tokens,
            local_tokens=num_local,
            cp_world_size=ranks,
        )
    if num_local % interleave:
        raise LayoutError(
            "a chunk is a multiple of cp_world_size * cp_kv_cache_interleave_size",
            chunk=num_tokens,
            cp_world_size=ranks,
            cp_kv_cache_interleave_size=interleave,
        )


def _check_prior(prior_tokens: Array, interleave: int, block_size: int, page_size: int) -> None:
    if page_size != block_size:
        raise LayoutError(
            "pages hold block_size tokens", block_size=block_size, page_size=page_size
        )
    if block_size % interleave:
        raise LayoutError(
            "block_size is a multiple of cp_kv_cache_interleave_size",
            block_size=block_size,
            cp_kv_cache_interleave_size=interleave,
        )
    if isinstance(prior_tokens, Tracer):
        return
    if (prior := int(np.asarray(prior_tokens).item())) % interleave:
        raise LayoutError(
            "the prior tokens of a rank are a multiple of cp_kv_cache_interleave_size",
            prior_tokens=prior,
            cp_kv_cache_interleave_size=interleave,
        )
