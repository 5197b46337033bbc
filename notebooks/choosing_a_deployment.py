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
# # Choosing a deployment
#
# Sixteen H200, GLM-5.2, agents whose contexts grow to a million tokens. How many devices compute
# prompts, how many generate, and how does each side shard its KV cache? This notebook asks
# `dcpjax.planner`, looks at *why* it answers what it answers, and replays real traces against it.
#
# Each claim ends in an `assert`; the numbers rest on data sheets and published kernel measurements
# (`dcpjax/planner/VALIDATION.md` says how far they can be trusted).

# %%
from pathlib import Path

from IPython.display import SVG

from dcpjax import planner
from dcpjax.planner import plots
from dcpjax.planner.page import svg

MILLION = 1 << 20
TRACES = Path("tests/assets/traces")

# %% [markdown]
# ## The question
#
# A usual request has 128K tokens in, of which 90 % are a prefix seen in the turn before, and 512
# out. The longest has a million.

# %%
demand = planner.Demand(
    context=MILLION, num_input=128 * 1024, num_output=512, hit_rate=0.9, concurrency=16
)
result = planner.search("glm-5.2", "h200", 16, demand)

for point in result.points[:6]:
    print(
        f"{point.candidate.label():38} {point.device_throughput:7,.0f} tokens/s/device "
        f"{point.interactivity:5.1f} tokens/s/user   {point.bottleneck}"
    )

# %% [markdown]
# ## What is impossible, and by how much
#
# Eight data-parallel prefill ranks would each hold whole prompts. One prompt of a million tokens
# takes 53.4 GiB; beside the weights 14.5 are free.

# %%
reasons = {item.deployment: item.reason for item in result.rejected if item.role == "prefill"}
dp8 = planner.Deployment(dp=8, draft_tokens=3)
print(reasons[dp8])
assert "53.4 GiB" in reasons[dp8] and "short" in reasons[dp8]

# %% [markdown]
# ## Why prompts are split by tokens
#
# Under tensor parallelism a rank reads each chosen row of the cache for 8 of 64 heads, and repeats
# the whole indexer. Split by tokens (prefill context parallelism, PCP), each rank does an eighth of
# the queries with all heads: more work for each byte, and nothing is repeated.

# %%
model, h200 = planner.find_model("glm-5.2"), planner.find_device("h200")
by_heads, by_tokens = planner.model_intensity(model, 8), planner.model_intensity(model, 64)
print(f"{by_heads:.0f} FLOP per byte by heads, {by_tokens:.0f} by tokens, ridge {h200.ridge:.0f}")
assert (round(by_heads), round(by_tokens), round(h200.ridge)) == (26, 191, 206)

tp8 = planner.indexer_crossover(model, heads=8)
pcp8 = planner.indexer_crossover(model, heads=64, ranks=8)
print(f"the indexer overtakes attention at {tp8:,.0f} tokens (TP8), {pcp8:,.0f} (PCP8)")
assert pcp8 > 7.9 * tp8

for engine in (planner.Deployment(tp=8), planner.Deployment(pcp=8)):
    step = planner.prefill_step(model, h200, engine, 8192, 100_000)
    print(f"{engine.label()}: 8K tokens after 100K in {step.seconds * 1e3:.0f} ms")

# %% [markdown]
# But PCP alone keeps a copy of the cache on every rank. Sharding it as well (PCP8 × DCP8) makes a
# million tokens fit, for the price of gathering each layer's cache again for every chunk. With four
# PCP ranks of two devices each (PCP4 TP2 DCP8), the weights of attention are split as well, and
# what they leave is room for prefixes: of those that 90 % of the prompts begin with, PCP8 × DCP8
# has to throw some away.

# %%
winner = result.winner
assert winner is not None and winner.candidate.prefill is not None
assert winner.candidate.prefill.pcp > 1 and winner.candidate.prefill.dcp == 8

published = next(point for point in result.points if "PCP8 DCP8" in point.candidate.label())
for point in (winner, published):
    print(f"{point.candidate.label()}: {point.hit_rate:.0%} of prompt tokens are found again")
assert published.hit_rate < winner.hit_rate
SVG(svg(plots.plot_frontier(result.points, result.frontier)))

# %% [markdown]
# ## What the hand-over costs
#
# The two sides store different tokens on different ranks. The transfer planner cuts every sequence
# both ways, and each byte moves once to each rank that wants it. Sending everything everywhere and
# throwing most of it away would move several times as much.

# %%
source, target = winner.candidate.prefill, winner.candidate.decode
cost = planner.transfer_cost(model, source, target, MILLION)
naive = planner.naive_bytes(cost, target.dcp)
print(f"{cost.num_bytes / 1e9:.0f} GB instead of {naive / 1e9:.0f}, {cost.seconds(h200):.2f} s")
print(f"{cost.num_descriptors:,} descriptors from a plan of {cost.num_runs} runs")
assert naive == target.dcp * cost.num_bytes
assert cost.num_runs < 1000 < cost.num_descriptors

# %%
layer_split = planner.Deployment(pcp=8, prefill_kv="layer_split")
dcp4 = planner.Deployment(tp=4, dcp=4)
latent = planner.kv_parts("glm-5.2", mtp=False)[0]
sides = [engine.part_placement(latent, model) for engine in (layer_split, dcp4)]
SVG(svg(plots.plot_reshard(*sides, num_pages=16)))

# %% [markdown]
# The picture is the other popular pair: prefill ranks own layers, decode ranks own pages. All 32
# paths carry something.

# %%
split_cost = planner.transfer_cost(model, layer_split, dcp4, 32_768)
assert (split_cost.bytes_by_path > 0).sum() == 32

# %% [markdown]
# ## What would make it better
#
# Ten percent more of one thing at a time:

# %%
for item in result.sensitivity:
    print(f"{item.what:22} throughput {item.throughput - 1:+.1%}")
assert all(item.throughput > 0.999 for item in result.sensitivity)

# %% [markdown]
# ## A trace instead of means
#
# Means hide bursts. The simulation replays recorded chat traffic (200 requests) and four
# conversations of coding agents against the winner: chunked prompts, continuous batches, admission
# by pages, a prefix cache with the traces' own block hashes.

# %%
chat = planner.load_trace(TRACES / "mooncake_conversation.jsonl")
agents = planner.load_trace(TRACES / "agentic").limited(MILLION)
for trace in (chat, agents):
    cluster = planner.build_cluster(
        model, h200, winner.candidate, context=MILLION, routing="prefix"
    )
    report = planner.simulate(trace, cluster)
    print(
        f"{trace.name:22} {report.num_requests} requests, TTFT p50 {report.ttft.p50:.2f} s, "
        f"p90 {report.ttft.p90:.2f} s, {report.interactivity:.0f} tokens/s/user, "
        f"{report.hit_rate:.0%} of prompt tokens cached"
    )
    ideal = planner.hit_tokens(trace, winner.candidate.prefill.virtual_page)
    inputs = sum(turn.num_input for turn in trace.turns)
    assert report.hit_rate <= ideal / inputs + 1e-9

assert report.hit_rate > 0.7  # agents send their whole past again, and find it

# %% [markdown]
# A coarser grain of the prefix cache is a price of DCP that planners forget: a page id stands for
# `page_size × N` tokens, and only whole ones are reused.

# %%
grains = {grain: planner.hit_tokens(agents, grain) for grain in (64, 512, 2048)}
inputs = sum(turn.num_input for turn in agents.turns)
print({grain: f"{hits / inputs:.1%}" for grain, hits in grains.items()})
assert grains[64] > grains[512] > grains[2048]

# %% [markdown]
# ## Failures
#
# What if the only decode engine is gone for half a minute? Nobody is lost; everybody there begins
# again.

# %%
broken = planner.build_cluster(
    model,
    h200,
    winner.candidate,
    context=MILLION,
    failures=[planner.Failure(time=20, seconds=30, role="decode")],
)
calm = planner.simulate(chat, planner.build_cluster(model, h200, winner.candidate, context=MILLION))
shaken = planner.simulate(chat, broken)
print(f"{shaken.restarts} restarts, TTFT p90 {calm.ttft.p90:.1f} s → {shaken.ttft.p90:.1f} s")
assert shaken.num_requests == calm.num_requests == chat.num_requests
assert shaken.restarts > 0 and shaken.ttft.p90 > calm.ttft.p90

# %% [markdown]
# ## And now?
#
# The plan ends with commands. Where this version of dcpjax does not serve the winner, it says so
# and gives the best cluster that it does serve.

# %%
assert result.servable is not None
point, commands = result.servable
print(point.candidate.label(), *commands.notes, *commands.commands, sep="\n")
assert all(command.startswith("dcpjax ") for command in commands.commands)
