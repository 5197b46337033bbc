"""Decode and prefill of SmolLM2-135M: against transformers, the floor, and DCP against one.

The floor of a decode step is the time to read the weights once, at the bandwidth of a matrix-vector
product measured in the same run. All sides of a comparison take turns in the same run; ratios are
medians over rounds of the ratio within a round. The last line of stdout is JSON.
"""

import argparse
import json
import statistics
import sys

from bench_workers import Worker, ratio, take_turns

GOALS = {
    "stream_over_transformers": (2.0, "at least"),
    "streams16_over_transformers": (7.0, "at least"),
    "prefill2k_over_transformers": (0.95, "at least"),
    "step_over_floor": (1.8, "at most"),
    "batch8_over_batch1": (3.0, "at least"),
    "prefill2k_over_unchunked": (2.0, "at least"),
    "dcp3_over_one_1k": (1.4, "at most"),
    "dcp3_over_one_batch8": (1.4, "at most"),
    "dcp3_over_one_8k": (1.05, "at most"),
    "host_overhead_batch8": (0.15, "at most"),
}
POOL_TOKENS = 24576
BLOCK_SIZE = 16


def engine(dcp: int = 1, **settings: object) -> Worker:
    """An engine with room for the same number of tokens on every mesh."""
    return Worker(
        "engine",
        tensor_parallel_size=dcp,
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_pages=POOL_TOKENS // BLOCK_SIZE // dcp,
        **settings,
    )


def compare_with_transformers(one: Worker, rounds: int) -> dict[str, float]:
    reference = Worker("transformers")
    decode = {"op": "decode", "context": 256, "steps": 24}
    times = take_turns(
        rounds,
        one=lambda: one.ask(batch=1, **decode)["ms"],
        streams16=lambda: one.ask(batch=16, **decode)["ms"] / 16,
        transformers=lambda: reference.ask(**decode)["ms"],
    )
    salts = iter(range(10**6))
    prefill = take_turns(
        rounds,
        one=lambda: one.ask(op="prefill", tokens=2048, salt=next(salts))["s"],
        transformers=lambda: reference.ask(op="prefill", tokens=2048, salt=next(salts))["s"],
    )
    reference.close()
    return {
        "transformers_tokens_per_s": 1e3 / statistics.median(times["transformers"]),
        "stream_tokens_per_s": 1e3 / statistics.median(times["one"]),
        "streams16_tokens_per_s": 1e3 / statistics.median(times["streams16"]),
        "stream_over_transformers": ratio(times, "transformers", "one"),
        "streams16_over_transformers": ratio(times, "transformers", "streams16"),
        "prefill2k_tokens_per_s": 2048 / statistics.median(prefill["one"]),
        "prefill2k_transformers_tokens_per_s": 2048 / statistics.median(prefill["transformers"]),
        "prefill2k_over_transformers": ratio(prefill, "transformers", "one"),
    }


def compare_with_floor(one: Worker, rounds: int) -> dict[str, float]:
    weight_bytes = one.ready["weight_bytes"]
    decode = {"op": "decode", "context": 256, "steps": 24}
    times = take_turns(
        rounds,
        floor=lambda: weight_bytes / one.ask(op="bandwidth")["bytes_per_s"] * 1e3,
        batch1=lambda: one.ask(batch=1, **decode)["ms"],
        batch8=lambda: one.ask(batch=8, **decode)["ms"],
        bare8=lambda: one.ask(op="bare_steps", batch=8, context=256, steps=24)["ms"],
    )
    return {
        "floor_ms": statistics.median(times["floor"]),
        "bandwidth_gb_per_s": weight_bytes / statistics.median(times["floor"]) / 1e6,
        "batch1_ms": statistics.median(times["batch1"]),
        "batch8_ms": statistics.median(times["batch8"]),
        "step_over_floor": ratio(times, "batch1", "floor"),
        "batch8_over_batch1": 8 * ratio(times, "batch1", "batch8"),
        "host_overhead_batch8": ratio(times, "batch8", "bare8") - 1,
    }


def compare_with_unchunked(one: Worker, rounds: int) -> dict[str, float]:
    whole = engine(max_num_batched_tokens=2048, max_num_seqs=1)
    salts = iter(range(10**6, 2 * 10**6))
    times = take_turns(
        rounds,
        chunked=lambda: one.ask(op="prefill", tokens=2048, salt=next(salts))["s"],
        unchunked=lambda: whole.ask(op="prefill", tokens=2048, salt=next(salts))["s"],
    )
    whole.close()
    return {"prefill2k_over_unchunked": ratio(times, "unchunked", "chunked")}


def compare_dcp(one: Worker, rounds: int) -> dict[str, float]:
    three = engine(dcp=3, max_num_seqs=16)
    result: dict[str, float] = {}
    for name, batch, context in (("1k", 1, 1024), ("batch8", 8, 1024), ("8k", 1, 8000)):
        decode = {"op": "decode", "batch": batch, "context": context, "steps": 16}
        for side in (one, three):
            side.ask(**decode)  # computes the prompts, which are cached from now on
        times = take_turns(
            rounds,
            one=lambda d=decode: one.ask(**d)["ms"],
            dcp3=lambda d=decode: three.ask(**d)["ms"],
        )
        result |= {
            f"one_{name}_ms": statistics.median(times["one"]),
            f"dcp3_{name}_ms": statistics.median(times["dcp3"]),
            f"dcp3_over_one_{name}": ratio(times, "dcp3", "one"),
            f"dcp3_over_one_{name}_by_least": min(times["dcp3"]) / min(times["one"]),
        }
    three.close()
    return result


PARTS = {
    "floor": compare_with_floor,
    "transformers": compare_with_transformers,
    "unchunked": compare_with_unchunked,
    "dcp": compare_dcp,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    one = engine(max_num_seqs=16)
    result: dict[str, float] = {"ready_seconds": one.ready["ready_seconds"]}
    for part in arguments.parts:
        result |= PARTS[part](one, arguments.rounds)
    one.close()
    for name, (goal, sense) in GOALS.items():
        if name in result:
            print(f"{name:32} {result[name]:8.3f}   goal {sense} {goal}", file=sys.stderr)
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
