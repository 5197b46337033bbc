"""Decode step time against context, of dense latent attention and of sparse attention.

Sparse attention stops growing at ``top_k`` but for the indexer, which reads a short key of every
token in the layers that choose. Weights are random and few, so that attention is what is measured;
pages hold random rows. The floor is the bytes that a step has to read (weights, cached rows, keys)
over the bandwidth of a large copy, measured in the same run. Contexts are measured in rounds, one
after the other, and the least time counts: other programs only add to it. The last line of stdout
is JSON.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dcpjax.cache.parts import INDEXER, LATENT
from dcpjax.config import EngineConfig, ExpertsConfig, GlmConfig, IndexerConfig
from dcpjax.engine.blueprint import Blueprint
from dcpjax.engine.step import FROM_HOST, StepShape, make_step
from dcpjax.mesh import ALL_RANKS, decode_mesh
from dcpjax.models.checkpoint import Checkpoint, expected_tensors
from dcpjax.models.weights import place_model, random_weights

CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
STEPS = 5
DECODE = StepShape(1, 0, 0, table_width=0)

# Every token has all experts, so that a step reads all weights.
SPARSE = GlmConfig(
    architecture="GlmMoeDsaForCausalLM",
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=1024,
    num_layers=4,
    num_heads=16,
    q_lora_rank=512,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    max_position_embeddings=CONTEXTS[-1] + 1,
    experts=ExpertsConfig((1, 2, 3), 2, 2, 256),
    indexer=IndexerConfig(16, 128, 2048, (0, 1)),
)
MODELS = {"dense": dataclasses.replace(SPARSE, indexer=None), "sparse": SPARSE}


@dataclass(frozen=True)
class Bench:
    """One compiled step of one sequence, its pools full of random rows."""

    run: Callable[[int], None]  # a step behind so many tokens
    weight_bytes: int


def make_bench(
    model: GlmConfig, block_size: int, shape: StepShape = DECODE, longest: int = CONTEXTS[-1] + 1
) -> Bench:
    """Of a step of this shape, its page table apart, for sequences up to ``longest``."""
    settings = {"block_size": block_size, "max_num_seqs": 1, "max_model_len": longest}
    config = EngineConfig.from_settings("random", settings)
    blueprint = Blueprint(config, model, "cpu", "float32")
    mesh = decode_mesh(jax.devices()[:1], 1)
    shapes = expected_tensors(model)
    nothing = Checkpoint(model, shapes, lambda name: np.empty(shapes[name]), "float32", Path())
    placed = place_model(random_weights(nothing, 0), blueprint.sharding, mesh, jnp.float32)
    (table_width,) = blueprint.table_widths
    pool_shapes = blueprint.pool_shapes(table_width)
    shape = dataclasses.replace(shape, table_width=table_width)
    step = make_step(
        placed,
        shape,
        blueprint.token_sharding(pool_shapes),
        mesh,
        vocab_size=model.vocab_size,
        max_rows=1,
        max_outputs=1,
    )
    whole = NamedSharding(mesh, PartitionSpec())
    previous = jax.device_put(np.zeros(1, np.int32), whole)
    ranks = jax.device_put(np.zeros(1, np.uint32), NamedSharding(mesh, PartitionSpec(ALL_RANKS)))
    key = jax.random.key(0)
    pools = {
        name: jax.random.normal(key, pool.array_shape(1), pool.storage_dtype)
        for name, pool in pool_shapes.by_part.items()
    }
    table = np.random.default_rng(0).permutation(table_width).astype(np.int32)
    compiled = jax.jit(step, donate_argnums=1)
    state = {"pools": pools}

    def run(prior: int) -> None:
        packed = np.zeros(shape.packed_size, np.int32)
        views = shape.views(packed)
        views["sources"][:] = FROM_HOST
        views["page_tables"][0] = table
        views["prior_lengths"][0], views["num_tokens"][0] = prior, shape.num_tokens
        result = compiled(placed.parameters, state["pools"], packed, previous, ranks)
        state["pools"] = jax.block_until_ready(result[0])

    embedding = model.vocab_size * model.hidden_size * 4  # of which a step reads one row
    return Bench(run, sum(one.nbytes for one in placed.parameters) - embedding)


def step_bytes(model: GlmConfig, context: int) -> dict[str, int]:
    """What one step reads of the cache, float32."""
    indexer = model.indexer
    rows = context if indexer is None else min(context, indexer.top_k)
    found = {LATENT: model.num_layers * rows * model.latent_width * 4}
    if indexer is not None:
        found[INDEXER] = len(indexer.full_layers) * context * indexer.head_dim * 4
    return found


def measure_bandwidth() -> float:
    """Bytes per second of reading a large array once."""
    array = jnp.ones(64 << 20, jnp.float32)
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        total(array).block_until_ready()
        times.append(time.perf_counter() - start)
    return array.nbytes / min(times)


def measure(bench: Bench, contexts: tuple[int, ...], rounds: int) -> dict[int, float]:
    """Least milliseconds of a step at each context."""
    best = dict.fromkeys(contexts, float("inf"))
    for context in contexts:
        bench.run(context)
    for _ in range(rounds):
        for context in contexts:
            for _ in range(STEPS):
                start = time.perf_counter()
                bench.run(context)
                best[context] = min(best[context], (time.perf_counter() - start) * 1e3)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--longest", type=int, default=CONTEXTS[-1])
    options = parser.parse_args()
    contexts = tuple(context for context in CONTEXTS if context <= options.longest)
    bandwidth = measure_bandwidth()
    report: dict[str, Any] = {"bandwidth_gb_s": bandwidth / 1e9, "rows": []}
    for name, model in MODELS.items():
        bench = make_bench(model, options.block_size)
        for context, milliseconds in measure(bench, contexts, options.rounds).items():
            parts = step_bytes(model, context)
            total = bench.weight_bytes + sum(parts.values())
            floor = total / bandwidth * 1e3
            row = {"model": name, "context": context, "ms": milliseconds, "floor_ms": floor}
            report["rows"].append({**row, "over_floor": milliseconds / floor, **parts})
            print(
                f"{name:>6} {context:>6} tokens {milliseconds:8.2f} ms, floor {floor:7.2f} ms, "
                f"{milliseconds / floor:5.2f} x"
            )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
