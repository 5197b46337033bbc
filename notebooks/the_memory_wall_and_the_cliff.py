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
# # The memory wall and the cliff
#
# A long-context model runs out of memory for its KV cache before it runs out of compute. This
# notebook works out where that happens for GLM-5.2, what sharding the sequence over N ranks (decode
# context parallelism, DCP) changes, and why the end of the memory is a cliff and not a slope.
#
# Nothing here needs a device: `dcpjax.planner` is arithmetic on configs and data sheets, and a
# simulation of events. Each claim ends in an `assert`.

# %%
from IPython.display import SVG

from dcpjax import planner
from dcpjax.planner import plots
from dcpjax.planner.page import svg

GIB = 1 << 30
MILLION = 1 << 20

# %% [markdown]
# ## What a token costs
#
# Latent attention keeps one compressed row a token and layer, for all heads. In 8 bits with scales
# it takes 656 bytes. 21 of the 78 layers also keep an indexer key (132 bytes) that decides which
# 2,048 tokens a query reads, and the draft layer (MTP) has both.

# %%
parts = planner.kv_parts("glm-5.2")
for part in parts:
    print(f"{part.name:12} {part.layers:3} layers × {part.bytes_per_token:3} B = {part.total:6,} B")

per_token = planner.kv_bytes_per_token("glm-5.2")
print(f"{per_token:,} bytes a token, {per_token * MILLION / GIB:.1f} GiB for a million")
assert per_token == 78 * 656 + 21 * 132 + (656 + 132) == 54_728

# %% [markdown]
# ## The wall
#
# On an H200 most of the memory holds weights. What is left for KV on each of eight GPUs depends on
# how the attention weights are spread, and what a sequence takes depends on how its tokens are.

# %%
engines = {
    "data parallel": planner.Deployment(dp=8, draft_tokens=3),
    "tensor parallel": planner.Deployment(tp=8, draft_tokens=3),
    "tensor parallel, DCP": planner.Deployment(tp=8, dcp=8, draft_tokens=3),
}
rooms = {name: planner.capacity("glm-5.2", "h200", engine) for name, engine in engines.items()}
for room in rooms.values():
    print(room.explain(MILLION))

assert rooms["data parallel"].missing_bytes(MILLION) > 0
assert rooms["tensor parallel"].missing_bytes(MILLION) > 0
assert rooms["tensor parallel, DCP"].missing_bytes(MILLION) == 0

# %% [markdown]
# Latents have one head, so tensor parallelism alone keeps a whole copy of every sequence on every
# rank. DCP deals the pages of a sequence out to the ranks instead. It nearly multiplies the
# capacity by the number of ranks: *nearly*, because the draft layer wants to see whole sequences,
# so its part of the cache stays whole on every rank.

# %%
model, h200 = planner.find_model("glm-5.2"), planner.find_device("h200")
tokens = {
    dcp: planner.capacity(model, h200, planner.Deployment(tp=8, dcp=dcp, draft_tokens=3)).tokens
    for dcp in (1, 2, 4, 8)
}
for dcp, count in tokens.items():
    print(f"DCP{dcp}: {count / 1e6:.2f} M tokens, {count / tokens[1]:.2f} ×")

without_draft = [
    planner.capacity(model, h200, planner.Deployment(tp=8, dcp=dcp)).tokens for dcp in (1, 8)
]
assert 7 < tokens[8] / tokens[1] < 8
assert round(without_draft[1] / without_draft[0], 2) == 8

# %%
SVG(svg(plots.plot_capacity(model, h200, engines["tensor parallel"])))

# %% [markdown]
# ## The price
#
# In each layer the DCP ranks gather queries and merge partial results by their log-sum-exp; where a
# layer chooses tokens, they exchange the scores of their best. What moves is queries, outputs,
# log-sum-exps and scores, never KV: the bytes do not depend on the context. For one sequence the
# messages are so small that only their number counts.

# %%
sharded = engines["tensor parallel, DCP"]
short, long = (
    planner.traffic(model, sharded, 4, context=context) for context in (100_000, MILLION)
)
assert short == long
print(f"{short.num_messages} messages of {short.num_bytes / short.num_messages:,.0f} bytes a step")

steps = {
    name: planner.decode_step(model, h200, engines[name], 1, 32_768)
    for name in ("tensor parallel", "tensor parallel, DCP")
}
for name, step in steps.items():
    print(f"{name:22} {step.seconds * 1e3:5.1f} ms a step, longest part: {step.bottleneck()}")
price = steps["tensor parallel, DCP"].seconds / steps["tensor parallel"].seconds - 1
print(f"DCP costs {price:.0%} of a step here")
assert 0 < price < 0.2

# %% [markdown]
# At long contexts the sign changes. Tensor parallelism does not divide the indexer, which scores
# every earlier token on every rank; DCP does.

# %%
crossover = planner.dcp_crossover(model, h200, sharded, batch=32)
print(f"with 32 sequences DCP8 is faster from {crossover:,} tokens on")
assert crossover is not None and crossover < MILLION

# %%
SVG(svg(plots.plot_tpot(model, h200, engines["tensor parallel"], batch=32)))

# %% [markdown]
# ## The cliff
#
# What happens when the memory ends? Users keep sessions of 40,000 tokens open, and each asks again
# as soon as it has its answer. A request that does not fit waits until another one *ends*.

# %%
CONTEXT, ANSWER = 40_000, 500


def run(dcp: int, users: int) -> object:
    """A closed loop of users on one engine whose prompts come from elsewhere, with their KV."""
    engine = planner.Deployment(tp=8, dcp=dcp, draft_tokens=3)
    room = planner.capacity(model, h200, engine)
    decode = planner.EngineSpec(
        steps=planner.EstimatedSteps(model, h200, engine),
        num_pages=room.num_pages,
        page_tokens=engine.virtual_page,
        acceptance=2.99,
    )
    prefill = planner.EngineSpec(planner.ConstantSteps(0.0, 0.02), 10**6, chunk=65_536)
    work = planner.Workload(
        num_requests=5 * users, num_input=CONTEXT, num_output=ANSWER, spread=0.1, rate=1e6
    )
    cluster = planner.Cluster((decode,), (prefill,), num_devices=8, transfer_base=0.01)
    return planner.simulate(planner.generate_trace(work), cluster, concurrency=users)


USERS = [4, 8, 12, 16, 20, 24, 32, 48]
reports = {f"DCP{dcp}": [run(dcp, users) for users in USERS] for dcp in (1, 4)}
for name, results in reports.items():
    print(name, [f"{report.ttft.p50:.2f} s" for report in results])

# %%
SVG(svg(plots.plot_cliff(USERS, reports)))

# %% [markdown]
# With DCP1 the time to the first token is flat and then jumps by an order of magnitude, while the
# engine computes no more than before: its batch is as large as memory allows. With DCP4 the same
# devices serve all of these users.

# %%
fit = tokens[1] // (CONTEXT + ANSWER)
print(f"{fit} sessions fit with DCP1, {tokens[4] // (CONTEXT + ANSWER)} with DCP4")
few, many = reports["DCP1"][USERS.index(12)], reports["DCP1"][USERS.index(32)]
assert many.ttft.p50 > 10 * few.ttft.p50
assert reports["DCP4"][USERS.index(32)].ttft.p50 < 2 * reports["DCP4"][0].ttft.p50
assert reports["DCP4"][-1].output_throughput > 1.5 * reports["DCP1"][-1].output_throughput

# %% [markdown]
# Little's law says the same without a simulation: the requests present, on average, are the arrival
# rate times the time of a request. It holds to the last digit.

# %%
for report in reports["DCP1"]:
    present = report.request_throughput * report.latency.mean
    assert abs(report.mean_present - present) < 1e-6 * present

# %% [markdown]
# How near these estimates are to published measurements, and where they are not, is on
# `dcpjax/planner/VALIDATION.md`.
