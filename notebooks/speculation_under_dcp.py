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
# # Speculation under DCP
#
# A decode step reads the whole cache of a sequence to make one token. *Speculation* makes several:
# somebody cheap **drafts** a few tokens, one step of the model **verifies** all of them, and those
# that are right are **accepted**. GLM-5 and DeepSeek-V3 bring their own drafter, one more decoder
# layer with a cache of its own.
#
# With decode context parallelism (DCP) the cache of a sequence is spread over several ranks. This
# notebook looks at what that means for each of the three acts:
#
# 1. the draft layer runs with **DCP off**: its cache is whole on every rank, and what that costs;
# 2. the verification of D drafts is **one segment** under DCP, as exact as D + 1 single steps;
# 3. **acceptance** is a comparison that all ranks make alike, and no token changes.
#
# Each claim ends in an `assert`.

# %%
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

import dcpjax
from dcpjax import LLM, SamplingParams, layout, planner
from dcpjax.attention import attention_reference, merge_partials, segment_attention
from dcpjax.speculation import num_accepted

RANKS, PAGE = 4, 4
COLOURS = ["#77aadd", "#ee8866", "#eedd88", "#44bb99"]
EMPTY = "#f0f0f0"
random = np.random.default_rng(0)

# %% [markdown]
# ## Draft with DCP off
#
# The draft layer sees the whole sequence, for every draft. If its cache were spread over the ranks
# as the model's is, each draft would exchange queries, partial outputs and log-sum-exps, one draft
# after the other, for a single layer. So every rank keeps the draft layer's cache of *all* tokens
# and attends alone.
#
# One table of page ids serves all parts of the cache. A page id stands for `ranks × page size`
# tokens: of the model's cache, `page size` on each rank; of the draft layer's, all of them on
# every rank. So a page of the draft pool is `ranks` times as long.

# %%
TOKENS = 2 * RANKS * PAGE
size = {"layers": 1, "kv_heads": 1, "page_size": PAGE, "interleave": 2}
placements = {
    "model": layout.place_part(RANKS, RANKS, **size),
    "draft layer": layout.place_part(RANKS, RANKS, **size, is_whole=True),
}
tokens, ranks = np.arange(TOKENS), np.arange(RANKS)
held = {
    name: np.array([placement.holds(rank, 0, 0, tokens) for rank in ranks])
    for name, placement in placements.items()
}

figure, all_axes = plt.subplots(2, 1, figsize=(9, 3), layout="constrained", sharex=True)
for axes, (name, cells) in zip(all_axes, held.items(), strict=True):
    shown = np.where(cells, ranks[:, None] + 1, 0)
    axes.imshow(shown, cmap=ListedColormap([EMPTY, *COLOURS]), vmin=0, vmax=RANKS, aspect="auto")
    for border in range(0, TOKENS, RANKS * PAGE):
        axes.axvline(border - 0.5, color="black")
    axes.set(title=f"{name}: which rank keeps a token", yticks=ranks, ylabel="rank")
all_axes[-1].set_xlabel("token (black: a page id)")
plt.show()

assert (held["model"].sum(axis=0) == 1).all() and held["draft layer"].all()
page_tokens = {name: cells[0, : RANKS * PAGE].sum() for name, cells in held.items()}
assert page_tokens["draft layer"] == RANKS * page_tokens["model"], "the factor"

# %% [markdown]
# A draft pool with the model's page size would have room for one `ranks`-th of each sequence: the
# trap behind this factor is a draft cache that overwrites itself.
#
# What does it cost? For a token of GLM-5.2, bytes on each rank: the model's part shrinks with the
# ranks, the draft layer's does not.

# %%
parts = planner.kv_parts("glm-5.2")
model_bytes = sum(part.total for part in parts if not part.is_draft)
draft_bytes = sum(part.total for part in parts if part.is_draft)
sizes = np.array([1, 2, 4, 8, 16])

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
names = [str(number) for number in sizes]
axes.bar(names, model_bytes / sizes / 1e3, color=COLOURS[0], label="model: 78 layers, divided")
axes.bar(
    names,
    draft_bytes / 1e3,
    bottom=model_bytes / sizes / 1e3,
    color=COLOURS[1],
    label="draft layer: one, whole",
)
for number, name in zip(sizes, names, strict=True):
    total = model_bytes / number + draft_bytes
    axes.text(name, total / 1e3, f"{draft_bytes / total:.1%}", ha="center", va="bottom")
axes.set(xlabel="DCP ranks", ylabel="KB per token and rank", title="share of the draft layer")
axes.set_ylim(0, 62)
axes.legend(frameon=False)
plt.show()

assert model_bytes + draft_bytes == planner.kv_bytes_per_token("glm-5.2") == 54_728
assert draft_bytes / (model_bytes + draft_bytes) < 0.015
assert draft_bytes / (model_bytes / 8 + draft_bytes) < 0.11, "a tenth with eight ranks"

# %% [markdown]
# ## Verify all drafts as one segment
#
# The last token of a sequence and D drafts behind it are D + 1 queries at consecutive positions: a
# *segment*, as is a prompt chunk or a single token. Each rank attends to the tokens it has, and
# the partial results are merged by their log-sum-exp. A draft sees the drafts before it, not those
# behind it, and the drafts have owners like all tokens.
#
# Below, a row is a query and a column a token that it may see, in the colour of the rank that has
# the token.

# %%
PRIOR, DRAFTS = 21, 3
SPLIT = {"ranks": RANKS, "interleave": 2}
positions = np.arange(PRIOR, PRIOR + DRAFTS + 1)
everything = np.arange(PRIOR + DRAFTS + 1)
sees = everything[None, :] <= positions[:, None]
owners = layout.owner(everything, **SPLIT)

figure, axes = plt.subplots(figsize=(9, 2), layout="constrained")
axes.imshow(
    np.where(sees, owners + 1, 0),
    cmap=ListedColormap([EMPTY, *COLOURS]),
    vmin=0,
    vmax=RANKS,
    aspect="auto",
)
axes.axvline(PRIOR - 0.5, color="black")
axes.set(
    yticks=range(DRAFTS + 1),
    yticklabels=["last token", *(f"draft {number + 1}" for number in range(DRAFTS))],
    xlabel="token (right of the line: the segment itself)",
)
plt.show()

# %% [markdown]
# How many tokens of rank r does query j see? First the length up to that query, then the rank's
# share of it. The other order, the share of the prior length plus j + 1, counts tokens that the
# rank does not have.

# %%
for rank in ranks:
    counts = (sees & (owners == rank)).sum(axis=1)
    assert (layout.local_filled(positions + 1, rank, **SPLIT) == counts).all()
    wrong = layout.local_filled(PRIOR, rank, **SPLIT) + np.arange(1, DRAFTS + 2)
    assert (wrong >= counts).all() and (wrong > counts).any()


# %% [markdown]
# Now in numbers. The prior tokens lie in pages; everything else in the pools is NaN. One segment
# of four queries, four single steps one after the other, and dense attention say the same.

# %%
HEADS, WIDTH = 2, 8
scale = WIDTH**-0.5
q, k, v = random.standard_normal((3, len(everything), HEADS, WIDTH)).astype(np.float32)
page_table = random.permutation(8)[:4].astype(np.int32)


def pool_of(rank, num_tokens):
    """[pages, heads, page size, keys and values]: the rank's share of the first tokens."""
    pool = np.full((8, HEADS, PAGE, 2 * WIDTH), np.nan, np.float32)
    slots = layout.slot_mapping(page_table, np.arange(num_tokens), rank, **SPLIT, page_size=PAGE)
    mine = slots >= 0
    page, offset = np.divmod(slots[mine], PAGE)
    pool[page, :, offset] = np.concatenate([k, v], axis=-1)[:num_tokens][mine]
    return pool


def verify(first, last):
    """Attention of the tokens [first, last) as one segment, merged over the ranks."""
    segment = slice(first, last)
    partials = [
        segment_attention(
            *map(jnp.asarray, (q[segment], pool_of(rank, first), page_table)),
            first,
            *map(jnp.asarray, (k[segment], v[segment], everything[segment])),
            int(rank),
            **SPLIT,
            scale=scale,
        )
        for rank in ranks
    ]
    outs, lses = (jnp.stack(parts) for parts in zip(*partials, strict=True))
    return merge_partials(outs, lses)[0]


together = verify(PRIOR, PRIOR + DRAFTS + 1)
one_by_one = np.concatenate([verify(position, position + 1) for position in positions])
dense, _ = attention_reference(
    *map(jnp.asarray, (q[positions], k, v, positions, everything)), scale=scale
)
np.testing.assert_allclose(together, one_by_one, atol=1e-6)
np.testing.assert_allclose(together, dense, atol=1e-6)

# %% [markdown]
# The prior tokens were read once instead of four times, and the ranks exchanged one set of
# messages instead of four. That is what speculation gains; it pays as long as drafts are right.
#
# ## Accept what was foretold
#
# The step chooses a token at each of its positions. A draft counts if it is what was chosen before
# it and all drafts before it count; the first choice that no draft foretold counts as well. So the
# tokens are those of single steps whoever drafted, and the worst case is one token per step.

# %%
drafts = np.array([[7, 3, 5], [7, 3, 5], [7, 3, 5], [7, 3, 5]])
chosen = np.array([[7, 3, 5, 9], [7, 3, 8, 1], [2, 3, 5, 9], [7, 1, 5, 9]])
accepted = num_accepted(drafts, chosen, np.full(4, DRAFTS))
for row, count in zip(chosen, accepted, strict=True):
    print(f"chosen {row}: {count} drafts accepted, put out {row[: count + 1]}")
assert accepted.tolist() == [3, 2, 0, 1]

# %% [markdown]
# Every rank has the same logits, so every rank accepts the same. If each draft is right with
# probability p, a verification yields `1 + p + p² + … + p^D` tokens on average: the last drafts
# are worth less and less.

# %%
chances = np.linspace(0, 1, 101)
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for count, colour in zip((1, 3, 5), COLOURS, strict=False):
    lengths = sum(chances**power for power in range(count + 1))
    axes.plot(chances, lengths, color=colour, label=f"D = {count}")
axes.set(xlabel="a draft is right with probability", ylabel="tokens per verification")

VERIFICATIONS = 20_000
for chance in (0.3, 0.6, 0.9):
    is_right = random.random((VERIFICATIONS, DRAFTS)) < chance
    made_up = np.concatenate([np.where(is_right, 5, 4), np.full((VERIFICATIONS, 1), 9)], axis=1)
    accepted = num_accepted(
        np.full((VERIFICATIONS, DRAFTS), 5), made_up, np.full(VERIFICATIONS, DRAFTS)
    )
    axes.plot(chance, 1 + accepted.mean(), "o", color="black")
    expected = sum(chance**power for power in range(DRAFTS + 1))
    assert abs(1 + accepted.mean() - expected) < 0.05
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## For real
#
# The small GLM that comes with the project, on four DCP ranks, without drafts and with three. It
# continues simple stories: once greedily, and once with tokens drawn at a high temperature, which
# are hard to foretell.

# %%
STORIES = [
    "The day was rainy and Hugo was at the tower. Hugo bought the dark door in the barn.",
    "The morning was rainy and Clara went to the harbour with Olga. Iris wanted the quiet boat",
    "The day was sunny and Leo was at the kitchen. Greta bought the strange letter",
    "The evening was cloudy so Karin and Leo were at home. David smiled and came home.",
]
NUM_TOKENS = 32
length = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
KINDS = {
    "greedy": SamplingParams(temperature=0, **length),
    "temperature 3": SamplingParams(temperature=3, seed=1, **length),
}
small = {
    "max_model_len": 256,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 64,
    "num_pages": 16,
    "block_size": 16,
    "tensor_parallel_size": RANKS,
    "decode_context_parallel_size": RANKS,
    "attention_config": {"sparse_mla_force_mqa": True},  # prompts have one program, not two
}
drafting = {"speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTS}}
COUNTERS = ("num_verifications", "num_accepted_tokens_per_pos")


def run(**settings):
    """Tokens, steps and counters of drafts by kind, and the statistics of the engine."""
    found, before = {}, {"steps": 0, "speculation": None}
    with LLM("glm-tiny", **small, **settings) as llm:
        for kind, params in KINDS.items():
            made = [tuple(one.outputs[0].token_ids) for one in llm.generate(STORIES, params)]
            stats = llm.stats()
            counts = [
                np.array((one["speculation"] or {}).get(name, 0))
                for one in (before, stats)
                for name in COUNTERS
            ]
            found[kind] = {
                "tokens": made,
                "steps": stats["steps"] - before["steps"],
                "verifications": counts[2] - counts[0],
                "accepted": counts[3] - counts[1],
            }
            before = stats
    return found, stats


plain, plain_stats = run()

# %%
drafted, drafted_stats = run(**drafting)

# %% [markdown]
# The tokens are the same with and without drafts, the greedy and the drawn ones. The number of
# steps is not.

# %%
for kind, one in drafted.items():
    assert one["tokens"] == plain[kind]["tokens"]
    counts = f"{one['steps']} steps with drafts, {plain[kind]['steps']} without"
    print(f"{kind:16} {len(one['tokens'])} x {NUM_TOKENS} tokens: {counts}")
assert drafted["greedy"]["steps"] < plain["greedy"]["steps"] / 1.5

# %% [markdown]
# How often is draft 1, 2, 3 accepted? Each only if those before it were, so the bars fall; their
# sum plus one is the acceptance length.

# %%
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
lengths = {}
for offset, colour, (kind, one) in zip((-0.2, 0.2), COLOURS[:2], drafted.items(), strict=True):
    rates = one["accepted"] / one["verifications"]
    lengths[kind] = 1 + rates.sum()
    label = f"{kind}: {lengths[kind]:.2f} tokens per verification"
    axes.bar(np.arange(1, DRAFTS + 1) + offset, rates, width=0.4, color=colour, label=label)
    assert (np.diff(rates) <= 0).all()
axes.set(xticks=range(1, DRAFTS + 1), xlabel="draft", ylabel="accepted", ylim=(0, 1))
axes.legend(frameon=False)
plt.show()

assert lengths["greedy"] > 2 > lengths["temperature 3"]

# %% [markdown]
# And the memory: what the pools of a rank take is what the first section says, with the numbers of
# this model: for a page id, `page size` tokens of the model's cache and `ranks × page size` of the
# draft layer's. Each pool has one page more, to which padding is written.

# %%
glm_tiny = str(Path(dcpjax.__file__).parent / "assets" / "glm-tiny" / "config.json")
parts = planner.kv_parts(glm_tiny, cache_dtype="float32")
page_bytes = {
    is_draft: small["block_size"] * sum(part.total for part in parts if part.is_draft == is_draft)
    for is_draft in (False, True)
}
for name, factor, stats in (("plain", 0, plain_stats), ("drafting", RANKS, drafted_stats)):
    found, capacity = stats["kv_bytes_per_rank"], stats["kv_tokens_capacity"]
    print(f"{name:9} {found:>8} bytes on a rank for {capacity} tokens")
    assert found == (small["num_pages"] + 1) * (page_bytes[False] + factor * page_bytes[True])
    assert capacity == small["num_pages"] * RANKS * small["block_size"]
