"""The server over HTTP against its own engine alone: what the way through the API costs.

Both sides have the same settings, get the same prompts of token ids and generate the same number of
tokens (``ignore_eos``). They are processes of their own and take turns within a round; ratios are
medians over rounds of the ratio within a round. The floor is the engine's step for so many rows
without any host work in between: no server can have a shorter inter-token latency. The clients live
in this process and share the machine with the server, so their work counts as the server's. The
last line of stdout is JSON.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator

import httpx
from bench_workers import MODEL, StreamTimes, Worker, make_prompt, ratio, summarize_streams
from server_process import running_server

CONCURRENCY = (1, 8, 16)
BLOCK_SIZE = 16


def engine_settings(dcp: int, max_num_seqs: int) -> dict[str, int]:
    return {
        "tensor_parallel_size": dcp,
        "decode_context_parallel_size": dcp,
        "cp_kv_cache_interleave_size": BLOCK_SIZE,
        "block_size": BLOCK_SIZE,
        "num_pages": 24576 // BLOCK_SIZE // dcp,
        "max_num_seqs": max_num_seqs,
    }


def server_options(settings: dict[str, int]) -> list[str]:
    """The same settings on the command line."""
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in settings.items())
    return [word for pair in pairs for word in pair]


async def stream_once(
    http: httpx.AsyncClient, prompt: tuple[int, ...], num_tokens: int
) -> StreamTimes:
    """One stream; only events with text count, so a first token without any comes a little late."""
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    arrived: list[float] = []
    usage = None
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            arrived.append(time.perf_counter())
            usage = json.loads(line.removeprefix("data: ")).get("usage")
    if usage is None or usage["completion_tokens"] != num_tokens:
        raise RuntimeError(f"a stream of {num_tokens} tokens ended with usage {usage}")
    return StreamTimes(started, arrived[0], arrived[-2], num_tokens)  # the last one has the usage


async def measure_server(
    url: str, prompts: list[tuple[int, ...]], num_tokens: int
) -> dict[str, float]:
    """All prompts at the same time."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None) as http:
        streams = [stream_once(http, prompt, num_tokens) for prompt in prompts]
        return summarize_streams(await asyncio.gather(*streams))


def measure(
    url: str, engine: Worker, concurrency: int, salts: Iterator[int], options: argparse.Namespace
) -> dict[str, float]:
    """One concurrency: both sides, some rounds, prompts that no side has seen."""
    length, num_tokens = options.prompt_tokens, options.output_tokens
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        own_salts = list(itertools.islice(salts, concurrency))
        prompts = [make_prompt(length, salt) for salt in own_salts]
        round_of = {
            "server": asyncio.run(measure_server(url, prompts, num_tokens)),
            "engine": engine.ask(op="streams", context=length, salts=own_salts, tokens=num_tokens),
        }
        for side, measured in round_of.items():
            for name, value in measured.items():
                times[f"{side}_{name}"].append(value)
        bare = engine.ask(op="bare_steps", batch=concurrency, context=length, steps=num_tokens)
        times["floor_ms"].append(bare["ms"])
    return {
        **{name: statistics.median(values) for name, values in times.items()},
        "ttft_over_engine": ratio(times, "server_ttft_s", "engine_ttft_s"),
        "itl_over_engine": ratio(times, "server_itl_ms", "engine_itl_ms"),
        "itl_over_floor": ratio(times, "server_itl_ms", "floor_ms"),
        "tokens_per_s_over_engine": ratio(times, "server_tokens_per_s", "engine_tokens_per_s"),
    }


def show(concurrency: int, result: dict[str, float]) -> None:
    for side in ("server", "engine"):
        print(
            f"{concurrency:3} streams, {side}: first token after {result[f'{side}_ttft_s']:.3f} s, "
            f"then {result[f'{side}_itl_ms']:.1f} ms each, "
            f"{result[f'{side}_tokens_per_s']:.1f} tokens/s",
            file=sys.stderr,
        )
    print(
        f"    floor {result['floor_ms']:.1f} ms; time between the server's tokens: "
        f"{result['itl_over_floor']:.3f} of it, {result['itl_over_engine']:.3f} of the engine's",
        file=sys.stderr,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY))
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--dcp", type=int, default=1, help="ranks on both sides")
    options = parser.parse_args()
    settings = engine_settings(options.dcp, max(options.concurrency))
    engine = Worker("engine", **settings)
    salts = itertools.count(1000)
    with running_server(MODEL, server_options(settings)) as (_, url):
        results: dict[str, dict[str, float]] = {}
        for concurrency in options.concurrency:
            results[str(concurrency)] = measure(url, engine, concurrency, salts, options)
            show(concurrency, results[str(concurrency)])
    engine.close()
    rounded = {
        streams: {name: round(value, 4) for name, value in result.items()}
        for streams, result in results.items()
    }
    print(json.dumps({**vars(options), "streams": rounded}))


if __name__ == "__main__":
    main()
