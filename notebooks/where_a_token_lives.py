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
# # Where a token lives
#
# With decode context parallelism the keys and values (KV) of one sequence are spread over several
# ranks, so that a long context costs each rank only its share of memory. This raises one question
# again and again: *given a token, which rank holds it, and where?* The compiled step asks it to
# write new KV, attention asks it to mask what it reads, a transfer asks it to address pages.
#
# `dcpjax.layout` is the only place that answers. It is integer arithmetic: the same functions take
# Python ints, NumPy arrays and traced JAX arrays. This notebook draws the answers. Each claim ends
# in an `assert`.

# %%
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch, Rectangle

from dcpjax import layout

COLOURS = ["#77aadd", "#ee8866", "#eedd88", "#44bb99"]
EMPTY, SCRATCH = "#f0f0f0", "#bbbbbb"


def draw_cells(axes, labels, colours):
    """One row of cells per row of `labels`."""
    for row, (texts, fills) in enumerate(zip(labels, colours, strict=True)):
        for column, (text, fill) in enumerate(zip(texts, fills, strict=True)):
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=fill, edgecolor="white"))
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=7)
    axes.set_xlim(0, len(labels[0]))
    axes.set_ylim(len(labels), 0)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def rank_legend(figure, ranks):
    handles = [Patch(color=COLOURS[rank], label=f"rank {rank}") for rank in range(ranks)]
    figure.legend(handles=handles, loc="outside lower center", ncols=ranks, frameon=False)


# %% [markdown]
# ## Owners: tokens are dealt like cards
#
# `interleave` consecutive tokens stay on one rank, then the next rank follows. An interleave of 1
# is round robin; an interleave as large as a page gives whole pages to the ranks in turn.

# %%
RANKS, NUM_TOKENS = 4, 32
positions = np.arange(NUM_TOKENS)

figure, all_axes = plt.subplots(3, 1, figsize=(10, 2.6), layout="constrained")
for axes, interleave in zip(all_axes, (1, 2, 4), strict=True):
    owners = layout.owner(positions, ranks=RANKS, interleave=interleave)
    draw_cells(axes, [positions], [[COLOURS[rank] for rank in owners]])
    axes.set_title(f"interleave {interleave}", fontsize=9, loc="left")
rank_legend(figure, RANKS)

# %% [markdown]
# The owner and the *local index* (how many tokens of the same rank come before) name each token
# exactly once, and `global_position` leads back.

# %%
split = {"ranks": RANKS, "interleave": 2}
owners = layout.owner(positions, **split)
indices = layout.local_index(positions, **split)

assert len(set(zip(owners.tolist(), indices.tolist(), strict=True))) == NUM_TOKENS
assert (layout.global_position(indices, owners, **split) == positions).all()

# %% [markdown]
# ## Slots: a page id stands for a page on every rank
#
# A rank stores its tokens in pages of `page_size` tokens. The allocator hands out one page id for
# `ranks * page_size` consecutive tokens (a *virtual page*): each rank uses the page of that id in
# its own pool. A slot is the place of a token in a pool, `page id * page_size + offset`.
#
# Below, a sequence of 13 tokens has the page ids 3 and 1. Each cell is a slot and shows the
# position of the token in it. The last page of each pool is the *scratch page*: tokens of other
# ranks and padding are written there, so that the compiled step writes every token somewhere and
# never branches.

# %%
RANKS, PAGE_SIZE, NUM_PAGES, SCRATCH_PAGE = 2, 4, 6, 5
sizes = {"ranks": RANKS, "interleave": 2, "page_size": PAGE_SIZE}
page_table, positions = [3, 1], np.arange(13)

figure, all_axes = plt.subplots(RANKS, 1, figsize=(10, 2.4), layout="constrained")
for rank, axes in enumerate(all_axes):
    pool = np.full(NUM_PAGES * PAGE_SIZE, -1)
    slots = layout.slot_mapping(page_table, positions, rank, **sizes)
    pool[slots[slots >= 0]] = positions[slots >= 0]
    fills = [COLOURS[rank] if position >= 0 else EMPTY for position in pool]
    fills[SCRATCH_PAGE * PAGE_SIZE :] = [SCRATCH] * PAGE_SIZE
    draw_cells(axes, [[position if position >= 0 else "" for position in pool]], [fills])
    for page in range(NUM_PAGES):
        name = "scratch" if page == SCRATCH_PAGE else f"page {page}"
        axes.text((page + 0.5) * PAGE_SIZE, -0.3, name, ha="center", fontsize=8)
        axes.axvline(page * PAGE_SIZE, color="black", linewidth=1)
    axes.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center")

# %% [markdown]
# Every token has a slot on exactly one rank, and no two tokens share one. `write_slots` is what
# the compiled step uses: the same slots, with the scratch page in place of "not mine".

# %%
slots = np.stack(
    [layout.slot_mapping(page_table, positions, rank, **sizes) for rank in range(RANKS)]
)
assert ((slots >= 0).sum(axis=0) == 1).all()
assert all(len(set(mine[mine >= 0])) == (mine >= 0).sum() for mine in slots)

valid = positions < 12  # the last token is padding
for rank in range(RANKS):
    pages, offsets = layout.write_slots(
        page_table, positions, valid, rank, **sizes, scratch_page=SCRATCH_PAGE
    )
    kept = valid & (slots[rank] >= 0)
    assert (pages[~kept] == SCRATCH_PAGE).all()
    assert (pages * PAGE_SIZE + offsets)[kept].tolist() == slots[rank][kept].tolist()

# %% [markdown]
# ## Lengths: how far each rank has filled
#
# `local_filled(length, rank)` counts a rank's tokens of a sequence. It grows in steps of the
# interleave, rank after rank. While a sequence is shorter than a cycle, some ranks have nothing.

# %%
RANKS = 4
split = {"ranks": RANKS, "interleave": 4}
lengths = np.arange(41)
filled = np.stack([layout.local_filled(lengths, rank, **split) for rank in range(RANKS)])

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for rank in range(RANKS):
    axes.plot(lengths, filled[rank], color=COLOURS[rank], label=f"rank {rank}", linewidth=2)
axes.set_xlabel("length of the sequence")
axes.set_ylabel("tokens on the rank")
axes.legend(frameon=False)

assert (filled.sum(axis=0) == lengths).all()
assert (filled.max(axis=0) == layout.max_local_filled(lengths, **split)).all()
assert filled[:, 3].tolist() == [3, 0, 0, 0], "three tokens leave three ranks empty"

# %% [markdown]
# ## Masks: every key is seen once
#
# A *segment* is the tokens of a sequence that one step computes. Each rank attends with all of its
# queries to the keys that the rank holds: those in its pages (*prior*, masked by `local_filled`),
# and those of the segment itself (*current*, masked by `active_mask`, and causal by global
# position). Below: 5 current tokens after 9 prior ones on 2 ranks. A filled cell is a query that
# sees a key.

# %%
RANKS, PRIOR, WIDTH = 2, 9, 5
split = {"ranks": RANKS, "interleave": 2}
queries = keys = PRIOR + np.arange(WIDTH)


def visible_keys(rank):
    """[queries, all keys by global position] of one rank."""
    visible = np.zeros((WIDTH, PRIOR + WIDTH), bool)
    in_pages = np.arange(layout.local_filled(PRIOR, rank, **split))
    visible[:, layout.global_position(in_pages, rank, **split)] = True
    is_mine = layout.active_mask(keys, rank, **split)
    visible[:, PRIOR:] = is_mine & (keys <= queries[:, None])
    return visible


figure, all_axes = plt.subplots(1, RANKS, figsize=(10, 2.4), layout="constrained")
for rank, axes in enumerate(all_axes):
    fills = [[COLOURS[rank] if seen else EMPTY for seen in row] for row in visible_keys(rank)]
    draw_cells(axes, [list(range(PRIOR + WIDTH))] * WIDTH, fills)
    axes.axvline(PRIOR, color="black", linewidth=1)
    axes.set_title(f"rank {rank}: prior keys | current keys", fontsize=9)
    axes.set_ylabel("query")

causal = np.arange(PRIOR + WIDTH) <= queries[:, None]
assert (sum(visible_keys(rank).astype(int) for rank in range(RANKS)) == causal).all()

# %% [markdown]
# Without `active_mask` every rank would count the current tokens, and the merged result would
# weigh them as often as there are ranks.
#
# ## Windows: a chunk may start anywhere
#
# When the ranks share the tokens of a prompt chunk, each computes the rows that it owns. A chunk
# of a whole number of cycles holds equally many rows of each rank *wherever it starts*, so the
# shapes of a compiled step stay the same. `window_rows` lists the rows, `window_order` puts them
# back in order.

# %%
RANKS, WIDTH = 4, 16
split = {"ranks": RANKS, "interleave": 2}
starts = (0, 3, 5)

figure, all_axes = plt.subplots(len(starts), 1, figsize=(8, 2.6), layout="constrained")
for axes, start in zip(all_axes, starts, strict=True):
    rows = [layout.window_rows(start, WIDTH, rank, **split) for rank in range(RANKS)]
    fills = np.empty(WIDTH, object)
    for rank in range(RANKS):
        fills[rows[rank]] = COLOURS[rank]
    draw_cells(axes, [start + np.arange(WIDTH)], [fills])
    axes.set_title(f"chunk of {WIDTH} tokens from {start}", fontsize=9, loc="left")

    assert all(len(mine) == WIDTH // RANKS for mine in rows)
    order = layout.window_order(start, WIDTH, **split)
    assert np.concatenate(rows)[order].tolist() == list(range(WIDTH))
rank_legend(figure, RANKS)

# %% [markdown]
# ## Placements: two engines, one vocabulary
#
# Two engines may hold the same cache differently. A prefill engine with layer split gives each
# rank its own layers; a decode engine gives each rank its own tokens of all layers. A
# `KVPlacement` says which rank holds which layer, head and token. The transfer from one to the
# other is then a matter of intersecting placements.

# %%
cache = {"layers": 10, "kv_heads": 1, "page_size": 4}
placements = {
    "prefill, layer split": layout.KVPlacement.layer_split(4, **cache),
    "decode, dcp 4": layout.KVPlacement.decode(4, 4, **cache, interleave=4),
}
layers, tokens = np.arange(10)[:, None], np.arange(32)

figure, all_axes = plt.subplots(1, 2, figsize=(10, 2.6), layout="constrained")
for axes, (name, placement) in zip(all_axes, placements.items(), strict=True):
    held = np.stack([placement.holds(r, layers, 0, tokens) for r in range(placement.num_ranks)])
    assert (held.sum(axis=0) == 1).all(), "each (layer, token) is on one rank"
    fills = [[COLOURS[rank] for rank in row] for row in held.argmax(axis=0)]
    draw_cells(axes, [[""] * 32] * 10, fills)
    axes.set_title(name, fontsize=9)
    axes.set_xlabel("token")
    axes.set_ylabel("layer")
rank_legend(figure, 4)

prefill, decode = placements.values()
assert [share.num_layers for share in prefill.shares] == [3, 3, 2, 2]
assert all(share.num_layers == 10 and share.num_tokens(32) == 8 for share in decode.shares)
