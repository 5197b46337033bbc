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
# # From JAX to a Neuron program
#
# AWS Trainium runs programs that were compiled long before: its compiler, neuronx-cc, reads HLO,
# the language below JAX, and writes a NEFF. It takes a while, and it takes no loop of unknown
# length, no sort, no index that may lie outside, and a few things more. So the engine can write
# its steps in a second, *static* form, and `neuron` turns that into what the compiler reads.
#
# All of this happens before there is a device, and this notebook does it on a CPU: one small
# model, eight ranks, one decode step. It looks at the program, lets the lint look at it, plants
# violations, and runs the very bytes that the compiler would get. **Nothing here ran on Trainium
# or through the real compiler**; `neuron/README.md` says what follows from that. Each claim ends
# in an `assert`.

# %%
import json
import linecache
import tempfile
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from matplotlib.patches import Rectangle

from dcpjax import layout
from dcpjax.config import EngineConfig
from dcpjax.engine.blueprint import Blueprint
from dcpjax.mesh import decode_mesh
from dcpjax.models.checkpoint import open_checkpoint
from neuron.cpu import CpuProgram
from neuron.lint import lint
from neuron.program import IndexRange
from neuron.programs import Call, Deployment, find_calls
from neuron.report import report
from neuron.targets import find_target

TP, DCP = 8, 4

# %% [markdown]
# ## A deployment: settings, a chip, and no devices
#
# A `config.json` is enough, since weights are inputs of the programs. The shape of the mesh is
# that of an example in AWS's documentation: 8 ranks, of which 4 share the tokens of each
# sequence.

# %%
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
folder = Path(tempfile.mkdtemp())


def deploy(**settings):
    """A deployment of the model, some of whose numbers and settings may be others."""
    of_model = {name: settings.pop(name) for name in set(settings) & set(MODEL)}
    path = folder / f"{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(MODEL | of_model))
    config = EngineConfig(
        str(path),
        device="neuron",
        tensor_parallel_size=TP,
        decode_context_parallel_size=DCP,
        cp_kv_cache_interleave_size=16,
        max_num_seqs=4,
        num_pages=128,
    )
    return Deployment(replace(config, **settings), find_target("trn2"), lnc=2)


def decode_call(deployment):
    """The largest decode step, before it is lowered."""
    return next(c for c in find_calls(deployment, all_buckets=False) if c.kind == "decode")


deployment = deploy()
kinds = [call.kind for call in find_calls(deployment, all_buckets=False)]
assert kinds == ["decode", "segment", "prefill", "page_gather", "page_scatter"]

# %% [markdown]
# An engine compiles each kind in several sizes. Neuron reads all of a step's page table, however
# short the sequences are, so there are several lengths of it: each twice the one before.

# %%
every = [call.name for call in find_calls(deployment)]
assert deployment.blueprint.table_widths == (32, 64), "pages of 64 tokens: 2048 and 4096"
assert [name for name in every if name.startswith("decode")] == [
    "decode_1x1+0x0_2048",
    "decode_2x1+0x0_2048",
    "decode_4x1+0x0_2048",
    "decode_1x1+0x0_4096",
    "decode_2x1+0x0_4096",
    "decode_4x1+0x0_4096",
]

# %% [markdown]
# ## One program for all ranks
#
# A step is one `shard_map`, and its body already is what one rank does, collectives included.
# `lower` takes that body out of what JAX has traced. So there is nothing to partition and
# nothing to compile, the ranks need not exist, and they cannot get different programs. Which
# rank it is a program learns from its input `rank_ids`.

# %%
call = decode_call(deployment)
program = call.lower()
inputs = {tensor.name: tensor for tensor in program.inputs}
outputs = {tensor.name: tensor for tensor in program.outputs}

assert inputs["rank_ids"].shape == (1,)
assert outputs["tokens"].dtype == "int32"
assert call.name == "decode_4x1+0x0_4096"

# %% [markdown]
# **Parameters.** Weights are inputs, those of all layers in one array: with more than 128 inputs
# each start of a program was seen to take fifty times as long. A model with more layers has
# larger inputs, not more of them.

# %%
deeper = decode_call(deploy(num_hidden_layers=6)).lower()
assert len(deeper.inputs) == len(program.inputs) < 128
assert deploy(num_hidden_layers=6).weight_bytes > deployment.weight_bytes

instructions = [i for c in program.module.computations for i in c.instructions]
constants = [i.ByteSize() for i in instructions if i.opcode == "constant"]
assert max(constants) < 1024, "no weight is a constant"

# %% [markdown]
# **Memory.** The pool of KV pages goes in and comes out as the same memory. Its last page is the
# scratch page, where everything is written that no sequence is meant to keep.

# %%
pool = inputs["pool"]
assert [call.input_names[number] for number in call.aliases.values()] == ["pool"]
assert (pool.shape, pool.dtype) == (outputs["pool"].shape, outputs["pool"].dtype)
assert pool.shape[0] == 128 + 1 and deployment.pools.scratch_page == 128

# %% [markdown]
# **Ranges.** On Neuron an index outside of an array ends the program, even in a lane that is
# masked afterwards. So each integer input says in which bounds the engine keeps it, field by
# field, and the lint follows these bounds through the program to every gather and scatter.

# %%
for part in inputs["packed"].ranges:
    print(f"packed[{part.start}:{part.stop}] lies in [{part.low}, {part.high}]")

assert inputs["packed"].ranges[-1].stop == inputs["packed"].size
assert any(part.high == deployment.pools.scratch_page for part in inputs["packed"].ranges)

# %% [markdown]
# ## Collectives and their groups
#
# `report` looks at a lowered program. Two collectives are all there is, all-gather and
# reduce-scatter; a sum over ranks is one after the other. They run in few sets of groups: the
# DCP groups, in which queries and partial results are exchanged, and all ranks together.

# %%
found = report(program, deployment.target, lnc=deployment.lnc)
group_sets = list(dict.fromkeys(one.groups for one in found.collectives))

assert {one.kind for one in found.collectives} == {"all-gather", "reduce-scatter"}
dcp_groups = tuple(tuple(map(int, group)) for group in layout.decode_groups(TP, DCP))
assert set(group_sets) == {dcp_groups, (tuple(range(TP)),)}

# %%
COLOURS = ["#77aadd", "#ee8866", "#eedd88", "#44bb99"]
figure, axes = plt.subplots(figsize=(8, 1.8), layout="constrained")
labels = []
for row, one in enumerate(found.collectives):
    for number, group in enumerate(one.groups):
        for rank in group:
            axes.add_patch(
                Rectangle((rank, row), 1, 1, facecolor=COLOURS[number], edgecolor="white")
            )
    labels.append(f"{one.kind}, {one.count} times, {one.num_bytes} bytes")
axes.set(xlim=(0, TP), ylim=(len(labels), 0), xlabel="rank")
axes.set_xticks(np.arange(TP) + 0.5, [str(rank) for rank in range(TP)])
axes.set_yticks(np.arange(len(labels)) + 0.5, labels)
axes.tick_params(length=0)
axes.spines[:].set_visible(False)

# %% [markdown]
# ## The file
#
# neuronx-cc has an older XLA inside than JAX. It wants instruction ids that are dense and small
# and groups in an older field, so these are set. The same settings give the same bytes, so a
# NEFF can be found again by the hash of its program.

# %%
ids = [instruction.id for instruction in instructions]
assert ids == list(range(1, len(ids) + 1))
assert program.to_bytes() == decode_call(deploy(num_hidden_layers=2)).lower().to_bytes()
assert program.to_bytes() != deeper.to_bytes()
print(f"{len(program.to_bytes())} bytes, {len(ids)} instructions")

# %% [markdown]
# ## The lint, and a violation
#
# `lint` holds the rules of the compiler, the runtime and the hardware that can be seen in a
# program. The engine's programs break none. `python -m neuron.check` prints the same for a whole
# engine.

# %%
for one in find_calls(deployment, all_buckets=False):
    assert lint(one.lower(), deployment.target) == []

# %% [markdown]
# Now one that does: somebody takes the four best tokens by `lax.top_k`. JAX writes that as an
# operation that Neuron's compiler does not have. The finding names the rule, the compiler's
# error that it saves, and the line.


# %%
def best_four(logits):
    values, _ = lax.top_k(logits, 4)
    return values


def best_one(logits):
    return jnp.max(logits, axis=-1, keepdims=True)


def lower_alone(function, inputs, **ranges):
    """A program of this function alone, on all ranks. Inputs are (shape, dtype) by name."""
    everywhere = PartitionSpec()
    on_ranks = jax.shard_map(
        function, mesh=deployment.mesh, in_specs=everywhere, out_specs=everywhere
    )
    arrays = tuple(deployment.array(*like, everywhere) for like in inputs.values())
    return Call("alone", "decode", TP, on_ranks, arrays, tuple(inputs), ("out",), ranges).lower()


logits = {"logits": ((4, 256), jnp.float32)}
(finding,) = lint(lower_alone(best_four, logits), deployment.target)
print(finding)


def line_of(finding):
    """The text of the line that a finding names."""
    path, line = finding.line.rsplit(":", 1)
    return linecache.getline(path, int(line))


assert (finding.rule.name, finding.rule.prevents) == ("no-top-k", "NCC_EVRF001")
assert "lax.top_k" in line_of(finding)
assert lint(lower_alone(best_one, logits), deployment.target) == []

# %% [markdown]
# And one that no list of operations would find. A write that is not wanted gets an index behind
# the end, and JAX is told to drop it. On a CPU that works; on Neuron every lane is accessed
# before anything is dropped, and the program dies. The lint knows it from the declared range
# alone: with a scratch slot instead, the same bytes are fine.

# %%
SLOTS = 16


def write(cache, slots, rows):
    return cache.at[slots].set(rows, mode="drop")


cache = {
    "cache": ((SLOTS, 64), jnp.float32),
    "slots": ((4,), jnp.uint32),
    "rows": ((4, 64), jnp.float32),
}
dropped = lower_alone(write, cache, slots=(IndexRange(0, 4, 0, SLOTS),))
kept = lower_alone(write, cache, slots=(IndexRange(0, 4, 0, SLOTS - 1),))
assert dropped.to_bytes() == kept.to_bytes()

(finding,) = lint(dropped, deployment.target)
print(finding)
assert finding.rule.name == "scatter-index"
assert 'mode="drop"' in line_of(finding)
assert lint(kept, deployment.target) == []

# %% [markdown]
# ## The bytes compute what JAX computes
#
# A NEFF cannot run on a CPU, but what it is made from can. `CpuProgram` gives the file to XLA as
# a program of eight replicas, each on one of eight virtual CPU devices. Beside it runs `jax.jit`
# of the same step, on the same random weights, pages and tables. All outputs agree in every bit:
# pages, tokens and logits.

# %%
mesh = decode_mesh(jax.devices()[:TP], DCP)


def random_array(random, name, like):
    """Random floats, or integers in the bounds of this input, as this step wants them."""
    if name == "rank_ids":
        values = np.arange(TP)
    elif name in call.ranges:
        parts = [random.integers(r.low, r.high + 1, r.stop - r.start) for r in call.ranges[name]]
        values = np.concatenate(parts)
    else:
        values = random.standard_normal(like.shape)
    values = values.reshape(like.shape).astype(like.dtype)
    return jax.device_put(values, NamedSharding(mesh, like.sharding.spec))


def place_inputs():
    """The same arrays at each call; a step takes the memory of its pool."""
    leaves = jax.tree.leaves(call.arguments)
    arrays = zip(call.input_names, leaves, strict=True)
    placed = [random_array(np.random.default_rng(n), *one) for n, one in enumerate(arrays)]
    return jax.tree.unflatten(jax.tree.structure(call.arguments), placed)


expected = jax.tree.leaves(jax.jit(call.function)(*place_inputs()))


def run(program):
    """What the file of a program computes."""
    places = [(output.shape, output.sharding.spec) for output in expected]
    return CpuProgram(program.to_bytes(), mesh, places)(*place_inputs())


def is_equal(results):
    """For each output, whether every bit is that of jax.jit."""
    pairs = zip(results, expected, strict=True)
    return [np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs]


assert is_equal(run(program)) == [True, True, True]
assert np.isfinite(np.asarray(expected[2], np.float32)).all()

# %% [markdown]
# Could this fail? One collective of another group is enough: the partial results of the first
# two ranks change places.

# %%
broken = call.lower()
for computation in broken.module.computations:
    for instruction in computation.instructions:
        if instruction.opcode == "reduce-scatter" and len(instruction.replica_groups) == TP // DCP:
            first = instruction.replica_groups[0].replica_ids
            first[0], first[1] = first[1], first[0]
assert is_equal(run(broken))[2] is False

# %% [markdown]
# ## Dynamic and static
#
# On a CPU or GPU the engine writes the same step in another way, with loops that run as long as
# a sequence needs. Lowered like the one for Neuron, it can be compared.


# %%
class OnCpu(Deployment):
    """The same settings as an engine on CPU devices has them."""

    @cached_property
    def blueprint(self):
        model = open_checkpoint(self.config.model, weights=False).config
        return Blueprint(self.config, model, "cpu", "bfloat16")


on_cpu = replace(deployment.config, device="cpu", step_form="dynamic", dtype="bfloat16")
dynamic = decode_call(OnCpu(on_cpu, deployment.target)).lower()
counts = {
    "dynamic": report(dynamic, deployment.target).opcodes,
    "static": found.opcodes,
}
assert lint(program, deployment.target) == []
broken_rules = {finding.rule.name for finding in lint(dynamic, deployment.target)}
print(sorted(broken_rules))
assert {"trip-count", "collective-kind"} <= broken_rules
assert "all-reduce" in counts["dynamic"] and "all-reduce" not in counts["static"]

# %% [markdown]
# The dynamic one has its layers in a row, each with weights of its own; the static one has a
# loop over the layers and in it a loop over the pages, both of known length. So its size does
# not depend on the number of layers. `step_form="unrolled"` writes both out, should the compiler
# make more of that.

# %%
deep = report(deeper, deployment.target).opcodes
assert deep == counts["static"]
unrolled = [decode_call(deploy(num_hidden_layers=n, step_form="unrolled")).lower() for n in (2, 6)]
sizes = [sum(report(one, deployment.target).opcodes.values()) for one in unrolled]
assert sizes[1] > 2 * sizes[0]
assert len(dynamic.inputs) > len(program.inputs)

# %%
differ = [
    name
    for name in dict.fromkeys([*counts["static"], *counts["dynamic"]])
    if abs(counts["static"].get(name, 0) - counts["dynamic"].get(name, 0)) > 3
    or (name in counts["static"]) != (name in counts["dynamic"])
]
figure, axes = plt.subplots(figsize=(8, 0.24 * len(differ) + 1), layout="constrained")
places = np.arange(len(differ))
for form, shift, colour in (("dynamic", -0.2, COLOURS[0]), ("static", 0.2, COLOURS[1])):
    widths = [counts[form].get(name, 0) for name in differ]
    axes.barh(places + shift, widths, 0.4, color=colour, label=form)
axes.set_yticks(places, differ, fontsize=8)
axes.invert_yaxis()
axes.set_xlabel("instructions in a decode step of two layers")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# From here on a compiler is needed: `python -m neuron.compile` writes these files and the NEFFs,
# `python -m neuron.run` times them, and `dcpjax serve --device neuron` serves with the same
# steps. `neuron/README.md` has every command.
