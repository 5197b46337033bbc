# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Attention in pieces
#
# With decode context parallelism no rank holds all keys of a sequence. Each attends to those that
# it holds, and what the ranks exchange is small: queries, partial outputs, and one number per
# query and head, the *log-sum-exp*. This notebook takes attention apart on one device, puts it
# together again on a mesh of four (virtual CPU devices), and ends with prompts that are computed
# chunk by chunk. Each claim ends in an `assert`.

# %%
import functools

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from dcpjax import layout
from dcpjax.attention import (
    attention_reference,
    merge_partials,
    segment_attention,
    segmented_attention_cp,
)

COLOURS = ["#77aadd", "#ee8866", "#eedd88", "#44bb99"]
EMPTY = "#f0f0f0"
RANKS = 4
random = np.random.default_rng(4)


def normal(*shape):
    return random.standard_normal(shape).astype(np.float32)


def rank_legend(figure, ranks=RANKS):
    handles = [Patch(color=COLOURS[rank], label=f"rank {rank}") for rank in range(ranks)]
    figure.legend(handles=handles, loc="outside lower center", ncols=ranks, frameon=False)


# %% [markdown]
# ## A partial result is an output and a log-sum-exp
#
# One query, 24 keys, dealt to four ranks two at a time. `attention_reference` is dense attention
# in float32; called with the keys of one rank it gives that rank's *partial*: `out`, the average
# of the rank's values under its own softmax, and `lse`, the logarithm of its softmax's
# denominator. Values have two dimensions here, so that we can draw them.

# %%
NUM_KEYS, SCALE = 24, 0.7
q, k, v = normal(1, 1, 4), normal(NUM_KEYS, 1, 4), normal(NUM_KEYS, 1, 2)
keys = np.arange(NUM_KEYS)
owners = layout.owner(keys, ranks=RANKS, interleave=2)
corners = np.array([[-2, -1], [-2, 1], [2, 1], [2, -1]], np.float32)
v += corners[owners][:, None]  # far apart for the drawing


def attend(mine):
    """Partial attention of the query, which comes last, to some of the keys."""
    return attention_reference(
        jnp.asarray(q),
        jnp.asarray(k[mine]),
        jnp.asarray(v[mine]),
        jnp.array([NUM_KEYS - 1]),
        jnp.asarray(keys[mine]),
        scale=SCALE,
    )


dense_out, dense_lse = attend(keys)
partials = [attend(keys[owners == rank]) for rank in range(RANKS)]
outs, lses = (jnp.stack(parts) for parts in zip(*partials, strict=True))

# %% [markdown]
# The merge weighs each output by `exp(lse - logsumexp(all lse))`, the rank's share of the whole
# denominator. That is exact, not an approximation. The plain mean of the outputs is something
# else.

# %%
out, lse = merge_partials(outs, lses)
shares = np.exp(lses - lse)[:, 0, 0]
weights = np.exp(SCALE * k[:, 0] @ q[0, 0] - float(dense_lse[0, 0]))

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
left.bar(keys, weights, color=[COLOURS[rank] for rank in owners])
left.set_xlabel("key")
left.set_ylabel("softmax weight over all keys")
right.scatter(*v[:, 0].T, s=400 * weights + 2, c=[COLOURS[r] for r in owners], alpha=0.5)
for rank in range(RANKS):
    right.scatter(*outs[rank, 0, 0], s=90, color=COLOURS[rank], edgecolor="black")
    label = f"{shares[rank]:.0%}"
    right.annotate(label, outs[rank, 0, 0], xytext=(6, 6), textcoords="offset points")
right.scatter(*out[0, 0], s=160, marker="*", color="black", label="merged")
right.scatter(*outs.mean(axis=0)[0, 0], marker="x", color="black", label="plain mean")
right.legend(frameon=False)
right.set_title("values, partial outputs and the ranks' shares", fontsize=9)
rank_legend(figure)

np.testing.assert_allclose(out, dense_out, atol=1e-6)
np.testing.assert_allclose(lse, dense_lse, atol=1e-6)
np.testing.assert_allclose(
    shares, [weights[owners == rank].sum() for rank in range(RANKS)], atol=1e-6
)
assert np.abs(outs.mean(axis=0) - dense_out).max() > 1e-2, "the mean is not the merge"

# %% [markdown]
# Merging is associative and commutative, so it does not matter who merges whom first, and its
# identity is the partial over no keys: `out = 0, lse = -inf`. A rank that holds no token of a
# short sequence returns it. With `lse = 0` instead, the rank would claim a denominator of 1.

# %%
pair = merge_partials(outs[:2], lses[:2])
other = merge_partials(outs[2:], lses[2:])
tree = merge_partials(*(jnp.stack(parts) for parts in zip(other, pair, strict=True)))
np.testing.assert_allclose(tree[0], out, atol=1e-6)

nothing_out, nothing_lse = attend(keys[:0])
assert (nothing_out == 0).all() and (nothing_lse == -np.inf).all()

with_nothing = jnp.concatenate([outs, nothing_out[None]])
merged, _ = merge_partials(with_nothing, jnp.concatenate([lses, nothing_lse[None]]))
np.testing.assert_allclose(merged, out, atol=1e-6)
wrong, _ = merge_partials(with_nothing, jnp.concatenate([lses, 0 * lses[:1]]))
assert (np.abs(wrong) < 0.99 * np.abs(out)).all(), "an empty rank with lse 0 adds zeros"

# %% [markdown]
# ## Decode on a mesh
#
# Now a sequence of 100 tokens in pages, 8 query heads and 2 KV heads, on a mesh of four devices.
# Each rank's pool has its own page for every page id of the table; `layout.slot_mapping` says
# which token goes where. Everything else in the pools is NaN: whoever reads it will show it.

# %%
HEADS, KV_HEADS, WIDTH, PAGE_SIZE = 8, 2, 16, 4
LENGTH, NUM_PAGES = 100, 16
SPLIT = {"ranks": RANKS, "interleave": 2}
scale = WIDTH**-0.5
q, k, v = (
    normal(LENGTH, HEADS, WIDTH),
    normal(LENGTH, KV_HEADS, WIDTH),
    normal(LENGTH, KV_HEADS, WIDTH),
)
page_table = random.permutation(NUM_PAGES - 1)[:8].astype(np.int32)


def fill_pools(num_tokens, k=k, v=v):
    """[ranks, pages, KV heads, page size, keys and values] with the first tokens."""
    pools = np.full((RANKS, NUM_PAGES, KV_HEADS, PAGE_SIZE, 2 * WIDTH), np.nan, np.float32)
    positions = np.arange(num_tokens)
    for rank in range(RANKS):
        slots = layout.slot_mapping(page_table, positions, rank, **SPLIT, page_size=PAGE_SIZE)
        mine = slots >= 0
        page, offset = np.divmod(slots[mine], PAGE_SIZE)
        rows = np.concatenate([k[:num_tokens][mine], v[:num_tokens][mine]], axis=-1)
        pools[rank][page, :, offset] = rows
    return pools


mesh = Mesh(np.array(jax.devices()), ("dcp",))
by_rank, by_head, whole = PartitionSpec("dcp"), PartitionSpec(None, "dcp"), PartitionSpec()

# %% [markdown]
# One decode step. Each rank has computed the queries of its own 2 heads, and key and value of the
# new token. Three collectives do the rest:
#
# 1. **all-gather the queries**, so that each rank asks for all heads;
# 2. attend to what the rank holds (`segment_attention`) and **all-gather the lse**;
# 3. weigh the outputs and **reduce-scatter** them: sum over ranks, and each keeps its own heads.


# %%
@jax.jit
@functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(by_head, by_rank, whole, whole, whole, by_rank),
    out_specs=by_head,
)
def decode(q, pool, k, v, position, rank):
    q = lax.all_gather(q, "dcp", axis=1, tiled=True)
    out, lse = segment_attention(
        q, pool[0], page_table, position[0], k, v, position, rank[0], **SPLIT, scale=scale
    )
    whole_lse = jax.nn.logsumexp(lax.all_gather(lse, "dcp"), axis=0)
    share = jnp.exp(lse - whole_lse)[..., None] * out
    return lax.psum_scatter(share, "dcp", scatter_dimension=1, tiled=True)


def dense(q, k, v, first, last):
    """Dense attention of the tokens [first, last) to everything before them."""
    positions = np.arange(last)
    everything = (q[first:last], k[:last], v[:last], positions[first:last], positions)
    return attention_reference(*map(jnp.asarray, everything), scale=scale)[0]


ranks = np.arange(RANKS, dtype=np.int32)
for position in (0, 1, 7, 8, 31, LENGTH - 1):
    new = slice(position, position + 1)
    out = decode(q[new], fill_pools(position), k[new], v[new], np.array([position]), ranks)
    np.testing.assert_allclose(out, dense(q, k, v, position, position + 1), atol=1e-5)
assert decode._cache_size() == 1, "one program for all lengths: they are traced values"

# %% [markdown]
# Position 0 is the hard one: three ranks hold nothing at all, and the result is still right.
#
# What does a step move? The queries, outputs and lse of one token: the same at any length of the
# context. What a rank reads is its share of the keys and values.

# %%
lengths = 2 ** np.arange(10, 21)
token_bytes = 2 * KV_HEADS * WIDTH * 4
# From each other rank: its queries, its part of the rank's outputs, and its lse of all heads.
moved = 4 * (RANKS - 1) * (2 * HEADS // RANKS * WIDTH + HEADS)
read = {ranks: layout.max_local_filled(lengths, ranks, 2) * token_bytes for ranks in (1, 2, RANKS)}

figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
for (num_ranks, sizes), colour in zip(read.items(), COLOURS, strict=False):
    axes.loglog(lengths, sizes, color=colour, label=f"KV read by a rank of {num_ranks}")
axes.loglog(lengths, np.full(len(lengths), moved), "k--", label="received by a rank of 4")
axes.set_xlabel("tokens of context")
axes.set_ylabel("bytes per layer and step")
axes.legend(frameon=False, fontsize=8)

assert (read[RANKS] * RANKS == read[1]).all()
assert moved < read[RANKS][0] / 50, "already at 1K tokens there is little to move"

# %% [markdown]
# ## Prefill: chunks of a prompt
#
# A prompt is computed in chunks. Here the ranks split the tokens of a chunk, too: each computes
# queries, keys and values of the tokens that it owns. The queries are gathered, every rank
# attends with all of them to its own keys, and the merged outputs are scattered back.
#
# Below: the second chunk, 16 queries after 16 prior tokens. A cell is a query that sees a key,
# and its colour the rank that computes it. The ranks have similar work, because each holds tokens
# from everywhere in the sequence; with contiguous quarters the last one would have far less than
# the first.

# %%
CHUNK, PRIOR = 16, 16
queries, keys = PRIOR + np.arange(CHUNK), np.arange(PRIOR + CHUNK)
owners = layout.owner(keys, **SPLIT)
visible = keys <= queries[:, None]
image = np.tile(to_rgb(EMPTY), (CHUNK, len(keys), 1))
for rank in range(RANKS):
    image[visible & (owners == rank)] = to_rgb(COLOURS[rank])

figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
axes.imshow(image, extent=(0, len(keys), PRIOR + CHUNK, PRIOR), aspect="auto")
axes.axvline(PRIOR, color="black", linewidth=1)
axes.set_xlabel("key: prior | of the chunk")
axes.set_ylabel("query")
rank_legend(figure)


def work_of(owners):
    return np.array([(visible & (owners == rank)).sum() for rank in range(RANKS)])


work, quarters = work_of(owners), work_of(keys // (len(keys) // RANKS))
assert work.sum() == visible.sum(), "every visible pair is computed by one rank"
assert work.max() < 1.3 * work.min() and quarters.max() > 3 * quarters.min()

# %% [markdown]
# `segmented_attention_cp` does one chunk, heads first: all queries of the chunk, this rank's keys
# and values of it, and this rank's pages with how many of its tokens they hold. The first chunk
# has no prior tokens: all of them are masked, and the program is the same. It returns the rank's
# slice of the outputs, in the order of positions.

# %%
PROMPT, CHUNK = 96, 32


@jax.jit
@functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(whole, by_rank, by_rank, by_rank, whole, by_rank),
    out_specs=by_head,
)
def prefill(q, own_k, own_v, pool, local_prior, rank):
    cache_k, cache_v = jnp.split(pool[0], 2, axis=-1)
    return segmented_attention_cp(
        q,
        own_k[0],
        own_v[0],
        cache_k,
        cache_v,
        page_table[None],
        local_prior,
        block_size=PAGE_SIZE,
        cp_rank=rank[0],
        cp_world_size=RANKS,
        cp_kv_cache_interleave_size=SPLIT["interleave"],
        cp_group="dcp",
        scale=scale,
    )


chunks = []
for start in range(0, PROMPT, CHUNK):
    rows = [start + layout.window_rows(start, CHUNK, rank, **SPLIT) for rank in range(RANKS)]
    own_k, own_v = (np.stack([x[mine].swapaxes(0, 1) for mine in rows]) for x in (k, v))
    chunk_q = q[start : start + CHUNK].swapaxes(0, 1)
    prior = np.full((1, 1), start // RANKS, np.int32)
    chunks.append(prefill(chunk_q, own_k, own_v, fill_pools(start), prior, ranks))

out = np.concatenate(chunks, axis=1).swapaxes(0, 1)
np.testing.assert_allclose(out, dense(q, k, v, 0, PROMPT), atol=1e-5)
assert prefill._cache_size() == 1, "first and later chunks are one program"

# %% [markdown]
# Prompt and answer meet in the same pages. A prompt prefilled in chunks and continued by a decode
# step gives what dense attention gives to the whole sequence, and no rank ever held more than its
# quarter of the keys.

# %%
pools = fill_pools(PROMPT)
new = slice(PROMPT, PROMPT + 1)
out = decode(q[new], pools, k[new], v[new], np.array([PROMPT]), ranks)
np.testing.assert_allclose(out, dense(q, k, v, PROMPT, PROMPT + 1), atol=1e-5)

held = (~np.isnan(pools[..., 0])).sum(axis=(1, 2, 3)) // KV_HEADS
assert held.tolist() == [PROMPT // RANKS] * RANKS
