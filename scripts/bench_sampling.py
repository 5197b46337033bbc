"""Time of choosing tokens from logits, against a sort and against the floor.

The floor is the time to read the logits once at the bandwidth that a matrix-vector product reaches
in the same run. All variants take turns, round by round; reported is the least time of a row in
microseconds, since other programs only add to it. The last line of stdout is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.sampling import SamplingInputs, greedy, init_state, sample

TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.9


def sample_by_sorting(logits: jax.Array, key: jax.Array) -> jax.Array:
    """top_k, top_p and a draw in the usual way: sort, cut, draw among the sorted."""
    order = jnp.argsort(-logits, axis=1)
    ascending = jnp.take_along_axis(logits, order, axis=1) / TEMPERATURE
    place = jnp.arange(logits.shape[1])[None]
    ascending = jnp.where(place < TOP_K, ascending, -jnp.inf)
    before = jnp.cumsum(jax.nn.softmax(ascending, axis=1), axis=1) < TOP_P
    is_kept = (place == 0) | jnp.roll(before, 1, axis=1)
    choice = jax.random.categorical(key, jnp.where(is_kept, ascending, -jnp.inf), axis=1)
    return jnp.take_along_axis(order, choice[:, None], axis=1)[:, 0]


def make_inputs(rows: int, num_biased: int) -> SamplingInputs:
    def column(value: float) -> jax.Array:
        return jnp.full(rows, value, jnp.float32)

    return SamplingInputs(
        temperature=column(TEMPERATURE),
        top_k=jnp.full(rows, TOP_K, jnp.int32),
        top_p=column(TOP_P),
        min_p=column(0.05),
        repetition_penalty=column(1.1),
        presence_penalty=column(0.1),
        frequency_penalty=column(0.1),
        seed=jnp.arange(2 * rows, dtype=jnp.uint32).reshape(rows, 2),
        counter=jnp.arange(rows, dtype=jnp.int32),
        slot=jnp.arange(rows, dtype=jnp.int32),
        bias_ids=jnp.full((rows, num_biased), -1, jnp.int32),
        bias_values=jnp.zeros((rows, num_biased), jnp.float32),
    )


def make_sampler(logits: jax.Array, inputs: SamplingInputs, **flags: bool) -> Callable[[], object]:
    """A call that samples once; the state is donated and goes round."""
    step = jax.jit(partial(sample, **flags), donate_argnums=2)
    state = init_state(logits.shape[0], logits.shape[1])

    def call() -> object:
        nonlocal state
        result, state = step(logits, inputs, state)
        return result

    return call


def make_variants(rows: int, vocab: int, num_biased: int) -> dict[str, Callable[[], object]]:
    logits = jnp.asarray(3 * np.random.default_rng(0).normal(size=(rows, vocab)), jnp.float32)
    inputs = make_inputs(rows, num_biased)
    variants: dict[str, Callable[[], object]] = {
        "greedy": partial(jax.jit(greedy), logits),
        "by sorting": partial(jax.jit(sample_by_sorting), logits, jax.random.key(0)),
    }
    for with_filters in (False, True):
        for with_logprobs in (False, True):
            name = "sample" + ", filters" * with_filters + ", logprobs" * with_logprobs
            flags = {"with_filters": with_filters, "with_logprobs": with_logprobs}
            variants[name] = make_sampler(logits, inputs, **flags)
    return variants


def least_seconds(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(rounds + 1):
        for name, call in variants.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if index:  # the first round compiles
                times[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in times.items()}


def measure_bandwidth(rounds: int) -> float:
    """Bytes per second of a matrix-vector product with 256 MB of weights."""
    matrix, vector = jnp.zeros((8192, 8192), jnp.float32), jnp.zeros(8192, jnp.float32)
    product = partial(jax.jit(jnp.matmul), matrix, vector)
    return matrix.nbytes / least_seconds({"product": product}, rounds)["product"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--num-biased", type=int, default=64, help="biased tokens per row")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()

    bandwidth = measure_bandwidth(options.rounds)
    floor = options.vocab * 4 / bandwidth
    print(f"bandwidth {bandwidth / 1e9:.1f} GB/s, floor {floor * 1e6:.1f} us per row")
    report = {
        "device": jax.devices()[0].device_kind,
        "vocab": options.vocab,
        "bandwidth_gb_per_s": round(bandwidth / 1e9, 2),
        "floor_us_per_row": round(floor * 1e6, 2),
        "us_per_row": {},
    }
    for rows in options.rows:
        seconds = least_seconds(
            make_variants(rows, options.vocab, options.num_biased), options.rounds
        )
        per_row = {name: round(value / rows * 1e6, 1) for name, value in seconds.items()}
        report["us_per_row"][str(rows)] = per_row
        for name, value in per_row.items():
            print(f"{rows:4} rows  {name:28} {value:9.1f} us per row")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
