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
# # One prompt on eight devices
#
# A prompt of a million tokens is too much work for one device, and its keys and values (KV) are too
# much memory. *Prefill context parallelism* (PCP) divides both, and they are two questions:
#
# 1. who **computes** which tokens,
# 2. who **keeps** what of the cache,
#
# and what a rank needs but does not keep is
#
# 3. **gathered**, layer by layer.
#
# This notebook draws the three for eight ranks and then runs a small model both ways: on one device
# and on eight. Each claim ends in an `assert`.

# %%
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

from dcpjax import LLM, SamplingParams
from dcpjax.layout import KVPlacement, layer_range, zigzag_chunks

RANKS = 8
COLOURS = ListedColormap(["#f0f0f0", *plt.colormaps["Dark2"].colors[:RANKS]])


def draw(axes, owners, title, y="", x="token"):
    """Owners by rank + 1; 0 is nobody."""
    axes.imshow(owners, cmap=COLOURS, vmin=0, vmax=RANKS, aspect="auto", interpolation="nearest")
    axes.set(title=title, xlabel=x, ylabel=y)


# %% [markdown]
# ## Who computes what
#
# A token sees all tokens before it, so late tokens are dearer than early ones. If each rank took
# one eighth of the prompt, the last one would work fifteen times as much as the first. So the
# prompt is cut into *sixteen* chunks, and each rank takes one from the front and its mirror image
# from the back.

# %%
TOKENS = 64


def owners_of(chunks_of):
    row = np.zeros(TOKENS, int)
    for rank in range(RANKS):
        for start, stop in chunks_of(rank):
            row[start:stop] = rank + 1
    return row


plain = owners_of(lambda rank: [(rank * TOKENS // RANKS, (rank + 1) * TOKENS // RANKS)])
paired = owners_of(lambda rank: zigzag_chunks(TOKENS, RANKS, rank))


def work(owners):
    """Pairs of a token and one that it sees, by rank."""
    seen = np.arange(1, TOKENS + 1)
    return np.array([seen[owners == rank + 1].sum() for rank in range(RANKS)])


figure, axes = plt.subplots(2, 2, figsize=(10, 4), width_ratios=[3, 2], layout="constrained")
for row, (name, owners) in enumerate({"an eighth each": plain, "pairs of chunks": paired}.items()):
    draw(axes[row, 0], owners[None], f"{name}: which rank computes a token")
    axes[row, 0].set_yticks([])
    axes[row, 1].bar(range(RANKS), work(owners), color=COLOURS.colors[1:])
    axes[row, 1].set(title="attention work by rank", xticks=range(RANKS))
plt.show()

assert work(plain).max() > 10 * work(plain).min()
assert work(paired).max() == work(paired).min()

# %% [markdown]
# Prompts are seldom multiples of sixteen. Then the last chunks are shorter, or empty: a prompt of
# three tokens keeps three ranks busy, and the others compute padding that is written nowhere.

# %%
for tokens in (0, 1, 3, 17, 1000):
    chunks = [zigzag_chunks(tokens, RANKS, rank) for rank in range(RANKS)]
    covered = sorted(t for pair in chunks for start, stop in pair for t in range(start, stop))
    assert covered == list(range(tokens)), "every token once"
print(zigzag_chunks(3, RANKS, 0), zigzag_chunks(3, RANKS, 2), zigzag_chunks(3, RANKS, 5))

# %% [markdown]
# ## Who keeps what
#
# There are three answers, the setting `prefill_kv`:
#
# * `replicated`: every rank keeps everything. Nothing has to be gathered but the new rows, and
#   eight ranks hold no more tokens than one.
# * `sharded`: every rank keeps its share of the *tokens* (decode context parallelism over the same
#   ranks).
# * `layer_split`: every rank keeps its share of the *layers*.

# %%
LAYERS, PAGE = 12, 4
size = {"layers": LAYERS, "kv_heads": 1, "page_size": PAGE}
KEPT = {
    "replicated": KVPlacement.pcp(RANKS, **size),
    "sharded": KVPlacement.pcp(RANKS, **size, interleave=PAGE),
    "layer_split": KVPlacement.layer_split(RANKS, **size),
}


def held_by(placement, rank):
    layers, tokens = np.ogrid[:LAYERS, :TOKENS]
    return placement.holds(rank, layers, 0, tokens)


figure, axes = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
for axis, (name, placement) in zip(axes, KEPT.items(), strict=True):
    owners = np.zeros((LAYERS, TOKENS), int)
    for rank in reversed(range(RANKS)):
        owners[held_by(placement, rank)] = rank + 1
    share = held_by(placement, 0).mean()
    draw(axis, owners, f"{name}: rank 0 keeps {share:.0%}", y="layer")
plt.show()

holders = {
    name: sum(held_by(placement, rank).astype(int) for rank in range(RANKS))
    for name, placement in KEPT.items()
}
assert (holders["replicated"] == RANKS).all(), "everybody has everything"
assert (holders["sharded"] == 1).all() and (holders["layer_split"] == 1).all(), "once"
assert [layer_range(LAYERS, RANKS, rank) for rank in (0, 3, 4, 7)] == [
    (0, 2),
    (6, 8),
    (8, 9),
    (11, 12),
]

# %% [markdown]
# ## What is gathered
#
# In each layer a rank computes the keys and values of *its* tokens, and attends with *its* queries
# to all tokens before them. So two things move:
#
# * the **new rows** of the chunk, from each rank to all others. The same for all three;
# * the **prior tokens** of the layer, into a temporary copy: with `sharded` from everybody to
#   everybody, with `layer_split` from the one rank that has the layer. The copy of the next layer
#   is made while this one computes, and only two copies exist at a time.
#
# For GLM-5.2 a token's latent is 576 values, in 8 bits with scales 656 bytes. A chunk of 8,192
# tokens behind 262,144 others, in each of 78 layers:

# %%
ROW, CHUNK, PRIOR, NUM_LAYERS = 656, 8192, 262_144, 78
new_rows = CHUNK * ROW * (RANKS - 1) / RANKS
received = {
    "replicated": new_rows,
    "sharded": new_rows + PRIOR * ROW * (RANKS - 1) / RANKS,
    "layer_split": new_rows + PRIOR * ROW,  # all but the rank that has it
}
kept = {
    "replicated": 1.0,
    "sharded": 1 / RANKS,
    "layer_split": -(-NUM_LAYERS // RANKS) / NUM_LAYERS,
}
for name, count in received.items():
    memory = kept[name] * PRIOR * ROW * NUM_LAYERS
    copies = 0 if name == "replicated" else 2 * (PRIOR + CHUNK) * ROW
    print(
        f"{name:12} receives {count / 1e6:6.1f} MB a layer,"
        f" keeps {memory / 1e9:5.2f} GB, copies {copies / 1e9:.2f} GB"
    )
assert received["sharded"] / received["replicated"] > 25, "memory is bought with traffic"
assert kept["sharded"] < kept["layer_split"] < kept["replicated"]

# %% [markdown]
# ## For real
#
# The small GLM that comes with the project, on eight devices and on one: four PCP ranks of two
# tensor parallel ranks each. Whatever the ranks keep, they say the same. (On a machine without
# accelerators the first engine makes as many virtual devices as it needs, so the large ones come
# first.)

# %%
prompt = "The keys are: red is 41, blue is 17, green is 93, black is 58. " * 6 + "blue is"
small = {
    "max_model_len": 512,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 64,
    "num_pages": 40,
    "block_size": 16,
    "attention_config": {"sparse_mla_force_mqa": True},  # prompts have one program, not two
}
eight = {"tensor_parallel_size": 2, "prefill_context_parallel_size": 4}
ENGINES = {
    "replicated": eight,
    "sharded": {**eight, "decode_context_parallel_size": 8, "num_pages": 5},
    "layer_split": {**eight, "prefill_kv": "layer_split"},
    "one device": {},
}


def answer(settings):
    with LLM("glm-tiny", **{**small, **settings}) as llm:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0))
        return output.outputs[0], llm.stats()


answers = {name: answer(settings) for name, settings in ENGINES.items()}
for name, (output, stats) in answers.items():
    print(f"{name:12} {output.text!r}  {stats['kv_bytes_per_rank']:>8} bytes of cache on a rank")

tokens = {tuple(output.token_ids) for output, _ in answers.values()}
assert len(tokens) == 1, "the same tokens"
bytes_kept = {name: stats["kv_bytes_per_rank"] for name, (_, stats) in answers.items()}
assert bytes_kept["replicated"] == bytes_kept["one device"]
assert bytes_kept["sharded"] < bytes_kept["layer_split"] < bytes_kept["replicated"]
balances = [stats["pcp"]["balance"] for _, stats in answers.values() if stats["pcp"]]
print("work of the busiest rank over the mean:", [round(balance, 3) for balance in balances])
assert max(balances) < 1.1
