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
# # Prefill meets decode
#
# Reading a long prompt (*prefill*) and writing an answer token by token (*decode*) want different
# machines, so large services run them as two engines. The first computes the keys and values (KV)
# of the prompt, the second attends to them for every new token. In between the KV has to move, and
# the two engines rarely cut it alike: prefill may give each rank some *layers*, decode may give
# each rank some *tokens*. Moving KV is therefore **resharding** it on the way.
#
# `dcpjax.transfer` does this in three steps, and the first two are arithmetic that needs no
# accelerator:
#
# 1. **plan**: which rank sends which layers × heads × tokens to which rank;
# 2. **bind**: page ids and memory addresses make a list of copies, the *descriptors*: source
#    address, target address, number of bytes;
# 3. **execute**: a backend makes the copies.
#
# This notebook draws plans, counts their bytes and descriptors, and moves real bytes between NumPy
# arrays. Each claim ends in an `assert`.

# %%
from dataclasses import dataclass, replace

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

from dcpjax import layout
from dcpjax.layout import KVPlacement
from dcpjax.transfer import (
    RankMemory,
    SequenceMemory,
    StagingMemory,
    bind,
    num_staging_pages,
    plan_transfer,
)
from dcpjax.transfer.backend import InProcessBackend, InProcessFabric, TransferState, wait

SOURCE_COLOURS = plt.colormaps["Purples"](np.linspace(0.3, 1, 8))
TARGET_COLOURS = ["#77aadd", "#ee8866", "#eedd88", "#44bb99"]
EMPTY = "#f0f0f0"
random = np.random.default_rng(7)

# %% [markdown]
# ## Who holds what
#
# The model has 78 layers, as GLM-5.2 has, and keeps 576 bytes per token and layer (one latent
# vector that all attention heads share). The cache is stored in *pages* of 64 tokens.
#
# * **Prefill**: 8 ranks, *layer split*. Each rank holds all tokens of its own layers.
# * **Decode**: 4 ranks, *decode context parallelism* (DCP). Each rank holds all layers of its own
#   pages, dealt like cards: page 0 to rank 0, page 1 to rank 1, and so on.
#
# A `KVPlacement` says this in one line each. It knows no addresses: only who holds what.

# %%
LAYERS, PAGE_SIZE, TOKEN_BYTES, PROMPT = 78, 64, 576, 32 * 1024
cache = {"layers": LAYERS, "kv_heads": 1, "page_size": PAGE_SIZE}
prefill = KVPlacement.layer_split(8, **cache)
decode = KVPlacement.decode(4, 4, interleave=PAGE_SIZE, **cache)

SHOWN = 8  # pages in the drawings, of 512


def holders(placement):
    """The rank of each (layer, page), [layers, shown pages]."""
    layers, tokens = np.arange(LAYERS)[:, None], np.arange(SHOWN) * PAGE_SIZE
    held = [placement.holds(rank, layers, 0, tokens) for rank in range(placement.num_ranks)]
    assert (np.sum(held, axis=0) == 1).all(), "each layer of each page is on one rank"
    return np.argmax(held, axis=0)


def draw_pieces(axes):
    """A tile for each piece that moves as one: left its source rank, right its target rank."""
    for rank, share in enumerate(prefill.shares):
        for page in range(SHOWN):
            to = TARGET_COLOURS[layout.page_owner(page, ranks=4)]
            for left, colour in ((page - 0.42, SOURCE_COLOURS[rank]), (page, to)):
                corner, height = (left, share.layer_start), share.num_layers - 1
                axes.add_patch(Rectangle(corner, 0.42, height, facecolor=colour))
    axes.set_xlim(-0.5, SHOWN - 0.5)
    axes.set_ylim(LAYERS - 0.5, -0.5)


figure, (left, middle, right) = plt.subplots(
    1, 3, figsize=(11, 4.6), sharey=True, layout="constrained"
)
for axes, placement, colours in ((left, prefill, SOURCE_COLOURS), (middle, decode, TARGET_COLOURS)):
    axes.imshow(holders(placement), cmap=ListedColormap(colours), aspect="auto")
for rank, share in enumerate(prefill.shares):
    text = f"rank {rank}: {share.num_layers} layers"
    middle_of_layers = (share.layer_start + share.layer_stop - 1) / 2
    colour = "white" if rank > 2 else "black"
    left.text(
        (SHOWN - 1) / 2, middle_of_layers, text, ha="center", va="center", fontsize=9, color=colour
    )
draw_pieces(right)
left.set_title("prefill holds layers", fontsize=10)
middle.set_title("decode holds pages", fontsize=10)
right.set_title("what moves: one tile, one piece", fontsize=10)
left.set_ylabel("layer")
for axes in (left, middle, right):
    axes.set_xlabel(f"page (the first {SHOWN} of {PROMPT // PAGE_SIZE})")
handles = [Patch(color=SOURCE_COLOURS[5], label="prefill ranks 0 (light) to 7 (dark)")]
handles += [Patch(color=TARGET_COLOURS[rank], label=f"decode rank {rank}") for rank in range(4)]
figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)

assert [share.num_layers for share in prefill.shares] == [10] * 6 + [9] * 2
assert [share.num_tokens(PROMPT) for share in decode.shares] == [PROMPT // 4] * 4

# %% [markdown]
# ## The reshard matrix
#
# A plan is the intersection of the two pictures. Every prefill rank has something for every decode
# rank, so there are 8 × 4 paths, and each carries the layers of its source and a quarter of the
# pages.

# %%
plan = plan_transfer(prefill, decode, num_tokens=PROMPT)
table = plan.bytes_by_path(TOKEN_BYTES)  # [source rank, target rank]

assert len(plan.paths) == 32
layers = np.array([share.num_layers for share in prefill.shares])
assert (table == layers[:, None] * TOKEN_BYTES * PROMPT // 4).all()
assert table.sum() == LAYERS * TOKEN_BYTES * PROMPT and round(table.sum() / 1e9, 2) == 1.47
assert [round(total / 1e6) for total in table.sum(axis=0)] == [368] * 4

# %% [markdown]
# A plan is a few strided patterns ("every fourth page of these layers"), not a list of pages. It
# does not grow with the prompt:

# %%
assert plan.num_runs == plan_transfer(prefill, decode, num_tokens=32 * PROMPT).num_runs == 32

# %% [markdown]
# To count descriptors, the plan is bound to memory. An engine gives each sequence page ids, and a
# page id stands for a page in the pool of every rank. Binding computes with addresses and never
# follows them, so invented ones will do here.
#
# In these pools a page holds all layers of the rank, one after the other. So a piece is ten (or
# nine) layers of a page, and takes one descriptor.


# %%
def pages_needed(placement, num_tokens):
    """Page ids of a sequence. One stands for a page on each of the ranks that share the tokens."""
    return -(-num_tokens // (placement.shares[0].ranks * placement.page_size))


def regions(placement, addresses, num_pages, token_bytes):
    """The pools of an engine's ranks: [pages, layers, heads, page_size] tokens, without gaps."""
    return tuple(
        RankMemory.dense(
            address,
            num_pages=num_pages,
            num_layers=share.num_layers,
            num_heads=share.num_heads,
            page_size=placement.page_size,
            token_bytes=token_bytes,
        )
        for share, address in zip(placement.shares, addresses, strict=True)
    )


def invented_memory(placement, num_tokens):
    """Page ids in any order, in pools at addresses that nobody will read."""
    num_pages = pages_needed(placement, num_tokens)
    addresses = (np.arange(placement.num_ranks) + 1) << 40
    pools = regions(placement, addresses.tolist(), num_pages, TOKEN_BYTES)
    return SequenceMemory(placement, pools, random.permutation(num_pages))


source, target = invented_memory(prefill, PROMPT), invented_memory(decode, PROMPT)
bound = bind(plan, source, target)
descriptors = np.zeros_like(table)
for path in bound.paths:
    _, _, num_bytes = bound.addresses(path)
    descriptors[path.source_rank, path.target_rank] = len(num_bytes)

assert (descriptors == PROMPT // PAGE_SIZE // 4).all()
assert (table // descriptors == layers[:, None] * PAGE_SIZE * TOKEN_BYTES).all()
assert bound.num_bytes == table.sum(), "what moves is what is wanted, and no byte more"

# %%
figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
axes.imshow(table, cmap="Purples", vmin=0.8 * table.min(), vmax=1.6 * table.max(), aspect="auto")
received = [f"rank {rank}\n{total / 1e6:.0f} MB" for rank, total in enumerate(table.sum(axis=0))]
sent = [f"rank {rank}, {count} layers" for rank, count in enumerate(layers)]
axes.set_xticks(range(4), received)
axes.set_yticks(range(8), sent)
axes.set_xlabel("decode (target)")
axes.set_ylabel("prefill (source)")
axes.set_title(f"{table.sum() / 1e9:.2f} GB in {descriptors.sum()} descriptors", fontsize=10)
for (source_rank, target_rank), num_bytes in np.ndenumerate(table):
    text = f"{num_bytes / 1e6:.1f} MB\n{descriptors[source_rank, target_rank]} descriptors"
    axes.text(target_rank, source_rank, text, ha="center", va="center", fontsize=9)

# %% [markdown]
# Were there a gap between the layers of a page, each layer would take a descriptor of its own:

# %%
apart = tuple(
    replace(pool, layer_stride=2 * pool.layer_stride, page_stride=2 * pool.page_stride)
    for pool in source.ranks
)
by_layer = bind(plan, replace(source, ranks=apart), target)
assert by_layer.num_blocks == LAYERS * PROMPT // PAGE_SIZE and bound.num_blocks == 4096

# %% [markdown]
# Which page of a path goes where is the layout's rule for pages: page `g` of the sequence belongs
# to rank `g % 4`, where it is page `g // 4`. (The page ids are permutations, so `argsort` says
# which page of the sequence has an id.)

# %%
for path in bound.paths:
    (blocks,) = path.blocks
    page = np.argsort(source.page_ids)[blocks.source_pages]
    local_page = np.argsort(target.page_ids)[blocks.target_pages]
    assert (layout.page_owner(page, ranks=4) == path.target_rank).all()
    assert (layout.local_page(page, ranks=4) == local_page).all()

# %% [markdown]
# ## Naive against planned
#
# It is simpler to send everything to every decode rank and let each keep its quarter. That is also
# a plan, for a target on which every rank holds all tokens. It moves four times as much, and each
# rank needs room for all of it until it has picked its part.

# %%
everywhere = KVPlacement.pcp(4, **cache)
naive = plan_transfer(prefill, everywhere, num_tokens=PROMPT).bytes_by_path(TOKEN_BYTES)

figure, all_axes = plt.subplots(1, 2, figsize=(9, 2.6), sharey=True, layout="constrained")
cases = (("naive", naive), ("planned", table))
for axes, (name, moved) in zip(all_axes, cases, strict=True):
    wanted, total = table.sum(axis=0) / 1e9, moved.sum(axis=0) / 1e9
    axes.bar(range(4), wanted, color=TARGET_COLOURS)
    axes.bar(range(4), total - wanted, bottom=wanted, color="#cccccc")
    axes.set_title(f"{name}: {total.sum():.2f} GB", fontsize=10)
    axes.set_xticks(range(4), [f"rank {rank}" for rank in range(4)])
all_axes[0].set_ylabel("GB received")
handles = [Patch(color="#cccccc", label="received and thrown away")]
all_axes[1].legend(handles=handles, frameon=False)

assert naive.sum() == 4 * table.sum()
assert (naive.sum(axis=0) == table.sum()).all(), "every rank receives the whole cache"

# %% [markdown]
# ## Moving bytes
#
# Now a cache small enough to look at, with real memory: 10 layers, pages of 4 tokens, a prompt of
# 50 tokens; 4 layer-split ranks to 3 DCP ranks. One 8-byte number stands for the KV of a token in
# a layer and head, a different number for each.
#
# `slots` asks the layout where an engine keeps its tokens: the same question that the compiled
# decode step asks before it reads. Everything else in the target's pools holds a pattern, so that
# we notice whatever is written beside the mark.

# %%
UNTOUCHED = -1
ITEM = np.dtype(np.int64)


@dataclass
class Engine:
    """The pools of all ranks, [pages, layers, heads, page_size] each, and the pages of a prompt."""

    memory: SequenceMemory
    pools: list

    @property
    def placement(self):
        return self.memory.placement

    def slots(self, rank, tokens):
        """Which of the tokens the rank holds, and the page and offset of each of these."""
        share = self.placement.shares[rank]
        slots = layout.slot_mapping(
            self.memory.page_ids,
            tokens,
            share.residue,
            ranks=share.ranks,
            interleave=share.interleave,
            page_size=self.placement.page_size,
        )
        return tokens[slots >= 0], *np.divmod(slots[slots >= 0], self.placement.page_size)

    def filled(self, tokens):
        """What the pools should hold once exactly these tokens were written to empty ones."""
        pools = [np.full_like(pool, UNTOUCHED) for pool in self.pools]
        for rank, (pool, share) in enumerate(zip(pools, self.placement.shares, strict=True)):
            mine, pages, offsets = self.slots(rank, tokens)
            layers = np.arange(share.layer_start, share.layer_stop)[:, None]
            heads = np.arange(share.head_start, share.head_stop)
            pool[pages, :, :, offsets] = kv_of(layers, heads, mine[:, None, None])
        return pools


def kv_of(layer, head, token):
    return (layer * 100 + head) * 10_000 + token


def empty_pools(placement, num_pages, page_size):
    shapes = [(num_pages, s.num_layers, s.num_heads, page_size) for s in placement.shares]
    return [np.full(shape, UNTOUCHED, ITEM) for shape in shapes]


def empty_engine(placement, num_tokens):
    """Two pages more than the prompt takes, and page ids in any order."""
    num_ids = pages_needed(placement, num_tokens)
    pools = empty_pools(placement, num_ids + 2, placement.page_size)
    addresses = [pool.ctypes.data for pool in pools]
    ranks = regions(placement, addresses, num_ids + 2, ITEM.itemsize)
    page_ids = random.permutation(num_ids + 2)[:num_ids]
    return Engine(SequenceMemory(placement, ranks, page_ids), pools)


def prefilled_engine(placement, num_tokens):
    """An engine that has computed the prompt."""
    engine = empty_engine(placement, num_tokens)
    for pool, content in zip(engine.pools, engine.filled(np.arange(num_tokens)), strict=True):
        pool[:] = content
    return engine


def has_landed(engine, tokens):
    """Whether these tokens are where the engine looks for them, and nothing else was written."""
    return all(map(np.array_equal, engine.pools, engine.filled(tokens)))


# %% [markdown]
# A backend moves what `bind` lists. `InProcessBackend` copies between engines of one process; the
# backends for NIXL and Mooncake have the same methods and move the same list between machines.
# Here the decode engine reads (it *pulls*).


# %%
def move(bound):
    """Let the target read what was bound."""
    fabric = InProcessFabric()
    source, target = InProcessBackend(fabric, "prefill"), InProcessBackend(fabric, "decode")
    source.register(bound.source_ranks)
    target.register(bound.target_ranks)
    target.connect("prefill", source.agent)
    handle = target.submit(bound, "prefill")
    assert wait(handle, timeout=10) is TransferState.DONE
    handle.release()
    target.close()
    source.close()


NUM_TOKENS = 50
small = {"layers": 10, "kv_heads": 1, "page_size": 4}
source = prefilled_engine(KVPlacement.layer_split(4, **small), NUM_TOKENS)
target = empty_engine(KVPlacement.decode(3, 3, interleave=4, **small), NUM_TOKENS)
assert has_landed(target, np.arange(0)), "nothing is there yet"

small_plan = plan_transfer(source.placement, target.placement, num_tokens=NUM_TOKENS)
small_bound = bind(small_plan, source.memory, target.memory)
move(small_bound)

# %% [markdown]
# All tokens are where decode looks for them and everything else still holds the pattern. As many
# bytes moved as there are in all wanted items, and all of these arrived: so each came once.

# %%
assert has_landed(target, np.arange(NUM_TOKENS))
assert small_bound.num_bytes == 10 * NUM_TOKENS * ITEM.itemsize

page = target.memory.page_ids[0]
target.pools[0][page, 0, 0, 0] += 1
assert not has_landed(target, np.arange(NUM_TOKENS)), "the check sees a single wrong number"
target.pools[0][page, 0, 0, 0] -= 1

# %% [markdown]
# The decode pools after the transfer. A cell is a slot of layer 0 and shows the token that landed
# in it; grey cells were not written. A page id is the same page on all ranks, and its three pages
# hold twelve consecutive tokens.

# %%
figure, all_axes = plt.subplots(3, 1, figsize=(10, 2.7), layout="constrained")
for rank, axes in enumerate(all_axes):
    tokens = target.pools[rank][:, 0, 0].ravel()
    for slot, token in enumerate(tokens):
        colour = EMPTY if token == UNTOUCHED else TARGET_COLOURS[rank]
        axes.add_patch(Rectangle((slot, 0), 1, 1, facecolor=colour, edgecolor="white"))
        if token != UNTOUCHED:
            axes.text(slot + 0.5, 0.5, str(token), ha="center", va="center", fontsize=9)
    for start in range(0, len(tokens) + 1, 4):
        axes.axvline(start, color="black", linewidth=1)
    axes.set_xlim(0, len(tokens))
    if rank == 0:
        for page in range(len(tokens) // 4):
            axes.text(4 * page + 2, 1.15, f"page {page}", ha="center", fontsize=9)
    axes.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center")
    axes.set_xticks([])
    axes.set_yticks([])

# %% [markdown]
# ## Other pairs, the same three steps
#
# Nothing above was special to layers and pages. A plan intersects two placements, whatever they
# are: heads split or merged (tensor parallelism, TP), tokens dealt in another way, pages of
# another size. `transfer` moves bytes from one to the other, and checks as before.


# %%
def transfer(source_placement, target_placement, num_tokens, first_token=0):
    """Plan, bind, move and check; returns the plan."""
    source = prefilled_engine(source_placement, num_tokens)
    target = empty_engine(target_placement, num_tokens)
    plan = plan_transfer(
        source_placement, target_placement, num_tokens=num_tokens, first_token=first_token
    )
    bound = bind(plan, source.memory, target.memory)
    move(bound)
    assert has_landed(target, np.arange(first_token, num_tokens))
    assert bound.num_bytes == plan.bytes_by_path(ITEM.itemsize).sum()
    return plan


def head_ranges(plan, target_rank):
    return [
        (path.source_rank, path.head_start, path.head_stop)
        for path in plan.paths
        if path.target_rank == target_rank
    ]


HEADS, ROUND = 4, 64  # a round number of tokens, for round shares
model = {"layers": 3, "kv_heads": HEADS, "page_size": 4}
tp_4 = KVPlacement.tensor_parallel(4, **model)  # a head on each rank, all tokens
tp_2 = KVPlacement.tensor_parallel(2, **model)
dcp_2 = KVPlacement.decode(4, 2, interleave=4, **model)  # two heads and half of the tokens

merged = transfer(tp_4, dcp_2, ROUND)
assert head_ranges(merged, 0) == [(0, 0, 1), (1, 1, 2)], "heads of two ranks come together"

split = transfer(tp_2, tp_4, ROUND)
assert head_ranges(split, 1) == [(0, 1, 2)], "the second head of a rank that has two"

# %% [markdown]
# **Replicas share the work.** In prefill context parallelism without sharding (PCP) every rank has
# the whole cache. Any of them could serve; the plan gives each an equal part.

# %%
pcp_4 = KVPlacement.pcp(4, **model)
shared = transfer(pcp_4, dcp_2, ROUND)
sent = shared.bytes_by_path(1).sum(axis=1)
assert (sent == sent.mean()).all()

# %% [markdown]
# **Another DCP size, another page size**: 4 ranks with pages of 4 to 2 ranks with pages of 8.

# %%
dcp_4 = KVPlacement.decode(4, 4, interleave=4, **model)
large_pages = {**model, "page_size": 8}
regrouped = transfer(dcp_4, KVPlacement.decode(2, 2, interleave=8, **large_pages), ROUND)
assert len(regrouped.paths) == 4, "two source ranks hold the halves of a target's pages"

# %%
pairs = {
    "TP 4 to DCP 2\nheads merge": merged,
    "TP 2 to TP 4\nheads split": split,
    "PCP 4 to DCP 2\nreplicas share": shared,
    "DCP 4 to DCP 2\nlarger pages": regrouped,
}
figure, all_axes = plt.subplots(1, 4, figsize=(10, 3.1), layout="constrained")
figure.suptitle("percent of all bytes on each path", fontsize=10)
all_axes[0].set_ylabel("source rank")
for axes, (name, pair) in zip(all_axes, pairs.items(), strict=True):
    percent = pair.bytes_by_path(1) / pair.bytes_by_path(1).sum() * 100
    axes.imshow(percent, cmap="Purples", vmin=0, vmax=2 * percent.max(), aspect="auto")
    for (source_rank, target_rank), part in np.ndenumerate(percent):
        text = f"{part:.3g}" if part else ""
        axes.text(target_rank, source_rank, text, ha="center", va="center", fontsize=9)
    axes.set_xticks(range(percent.shape[1]))
    axes.set_yticks(range(percent.shape[0]))
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("target rank")

# %% [markdown]
# **What the target has is not sent.** The decode engine may have the beginning of a prompt from an
# earlier request. The plan then starts at the first token that it lacks. `transfer` has checked
# that the slots of the others were not touched.

# %%
PREFIX = 24
rest = transfer(tp_4, dcp_2, NUM_TOKENS, first_token=PREFIX)
assert rest.bytes_by_path(1).sum() == (NUM_TOKENS - PREFIX) * HEADS * model["layers"]
nothing = plan_transfer(tp_4, dcp_2, num_tokens=NUM_TOKENS, first_token=NUM_TOKENS)
assert nothing.paths == ()

# %% [markdown]
# ## When the pieces get too small
#
# A decode engine with *interleave* 1 deals single tokens, not pages: token 0 to rank 0, token 1 to
# rank 1. Between such an engine with 8 ranks and one that keeps whole pages, no two neighbours in
# the memory of one side are neighbours on the other: each token of each layer is a piece of its
# own, of 576 bytes.
#
# `bind` can do better if it gets *staging* pages on the target: whole source pages move, all
# layers in one piece, and a scatter on the target puts the tokens in order. It chooses by what is
# faster. For a million tokens:

# %%
MILLION = 1 << 20
round_robin = KVPlacement.decode(8, 8, interleave=1, **cache)
whole_pages = KVPlacement.tensor_parallel(1, **cache)
plan = plan_transfer(round_robin, whole_pages, num_tokens=MILLION)
sides = invented_memory(round_robin, MILLION), invented_memory(whole_pages, MILLION)

num_pages = num_staging_pages(plan)
staging = StagingMemory(
    regions(whole_pages, [1 << 50], num_pages, TOKEN_BYTES), np.arange(num_pages)
)
direct, staged = bind(plan, *sides), bind(plan, *sides, staging=staging)

assert direct.num_blocks == MILLION * LAYERS == 81_788_928
assert staged.num_blocks == MILLION // PAGE_SIZE == 16_384
assert staged.num_bytes == direct.num_bytes, "all of each page is wanted"
assert staged.landings and not direct.landings

# %% [markdown]
# Where whole pages fit, `bind` leaves the staging pages alone: DCP 8 with an interleave of a page
# goes directly.

# %%
by_page = KVPlacement.decode(8, 8, interleave=PAGE_SIZE, **cache)
plan = plan_transfer(by_page, whole_pages, num_tokens=MILLION)
sides = invented_memory(by_page, MILLION), invented_memory(whole_pages, MILLION)
bound = bind(plan, *sides, staging=staging)
assert bound.num_blocks == MILLION // PAGE_SIZE and not bound.landings

# %% [markdown]
# The staged form with real bytes: 2 ranks that deal single tokens, to 2 ranks that deal pages. The
# backend fills the staging pages only; each *landing* is one indexed copy.

# %%
source = prefilled_engine(KVPlacement.decode(2, 2, interleave=1, **small), ROUND)
target = empty_engine(KVPlacement.decode(2, 2, interleave=4, **small), ROUND)
plan = plan_transfer(source.placement, target.placement, num_tokens=ROUND)

num_pages = num_staging_pages(plan)
staging_pools = empty_pools(target.placement, num_pages, small["page_size"])
addresses = [pool.ctypes.data for pool in staging_pools]
staging = StagingMemory(
    regions(target.placement, addresses, num_pages, ITEM.itemsize), random.permutation(num_pages)
)
bound = bind(plan, source.memory, target.memory, staging=staging)
move(bound)
assert has_landed(target, np.arange(0)), "so far everything is in staging"

for landing in bound.landings:
    pool, staged_pool = target.pools[landing.target_rank], staging_pools[landing.target_rank]
    pool[landing.target_pages, :, :, landing.target_offsets] = staged_pool[
        landing.staging_pages, :, :, landing.staging_offsets
    ]
assert has_landed(target, np.arange(ROUND))

# %% [markdown]
# The price is visible too: both target ranks receive every source page and keep half of it. With
# pieces this small that is still cheaper than one descriptor per token and layer.

# %%
direct = bind(plan, source.memory, target.memory)
assert direct.num_blocks == 10 * ROUND and bound.num_blocks == 2 * ROUND // 4
assert bound.num_bytes == 2 * direct.num_bytes
