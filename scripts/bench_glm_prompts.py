"""Time of a prompt chunk of latent attention, from expanded latents and from latents as they are.

Of a model without an indexer, and of one that chooses among more tokens than there are, so that
both forms attend to the same. The floor of each form is its products, of the weights and of pairs
of a query and a token that it sees, over the rate of a large product that is measured in the same
run. Both forms are measured in turn, in rounds, and the least time counts: other programs only add
to it. The last line of stdout is JSON.

python -m scripts.bench_glm_prompts
"""

import argparse
import dataclasses
import json
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dcpjax.config import ExpertsConfig, GlmConfig, IndexerConfig
from dcpjax.engine.step import StepShape
from scripts.bench_glm import SPARSE, Bench, make_bench

LONGEST = 2048
SIDE = 2048
"""Of the matrices whose product is measured."""
LAYERS = 2
MODEL = dataclasses.replace(
    SPARSE,
    num_layers=LAYERS,
    experts=ExpertsConfig((1,), 2, 2, 256),
    indexer=IndexerConfig(16, 128, LONGEST, (0,)),
)
MODELS = {"dense": dataclasses.replace(MODEL, indexer=None), "sparse": MODEL}
FORMS = {"absorbed": 0, "expanded": LONGEST}


@dataclass(frozen=True)
class Chunk:
    """So many tokens of a prompt, behind so many others."""

    tokens: int
    prior: int

    @property
    def pairs(self) -> int:
        """Of a query and a token that it sees."""
        return self.tokens * self.prior + self.tokens * (self.tokens + 1) // 2


def products(model: GlmConfig, chunk: Chunk, form: str, weight_bytes: int) -> float:
    """Multiplications of one step. The head's are of one row, and left out."""
    heads, latent = model.num_heads, model.kv_lora_rank
    per_head = model.qk_nope_head_dim + model.v_head_dim
    if form == "expanded":
        width = per_head + model.qk_rope_head_dim
        attention = chunk.pairs * heads * width + chunk.prior * heads * latent * per_head
    else:
        attention = chunk.pairs * heads * (2 * latent + model.qk_rope_head_dim)
    weights = weight_bytes // 4 - model.vocab_size * model.hidden_size
    found = chunk.tokens * weights + model.num_layers * attention
    if model.indexer is not None and form == "absorbed":
        per_pair = model.indexer.num_heads * model.indexer.head_dim
        found += len(model.indexer.full_layers) * chunk.pairs * per_pair
    return found


def measure_products() -> float:
    """Multiplications per second of one large product."""
    square = jnp.ones((SIDE, SIDE), jnp.float32)
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST))
    return SIDE**3 / min(seconds(lambda: multiply(square, square).block_until_ready(), 5))


def seconds(run: Any, repeats: int) -> list[float]:
    """Of each of some runs, after one that is not counted."""
    run()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found


def measure(benches: dict[str, Bench], prior: int, rounds: int) -> dict[str, float]:
    """Least seconds of a step of each form, in turn."""
    best = dict.fromkeys(benches, float("inf"))
    for _ in range(rounds):
        for form, bench in benches.items():
            best[form] = min(best[form], *seconds(partial(bench.run, prior), 1))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--chunks", type=int, nargs="*", default=[64, 512, 1024])
    parser.add_argument("--priors", type=int, nargs="*", default=[0, 1024])
    options = parser.parse_args()
    rate = measure_products()
    report: dict[str, Any] = {"products_per_second": rate, "rows": []}
    for name, model in MODELS.items():
        for tokens in options.chunks:
            benches = {
                form: make_bench(
                    model,
                    options.block_size,
                    StepShape(0, 1, tokens, 0, expanded_context=context),
                    LONGEST,
                )
                for form, context in FORMS.items()
            }
            for prior in options.priors:
                found = measure(benches, prior, options.rounds)
                report["rows"].append(
                    row_of(name, model, Chunk(tokens, prior), found, benches, rate)
                )
                print(json.dumps(report["rows"][-1]))
    print(json.dumps(report))


def row_of(
    name: str,
    model: GlmConfig,
    chunk: Chunk,
    found: dict[str, float],
    benches: dict[str, Bench],
    rate: float,
) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, **dataclasses.asdict(chunk)}
    for form, time_of_form in found.items():
        floor = products(model, chunk, form, benches[form].weight_bytes) / rate
        row[f"{form}_ms"] = round(time_of_form * 1e3, 1)
        row[f"{form}_over_floor"] = round(time_of_form / floor, 2)
    row["expanded_over_absorbed"] = round(found["expanded"] / found["absorbed"], 3)
    return row


if __name__ == "__main__":
    main()
