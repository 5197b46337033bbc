"""Worker processes for benchmarks: each holds an engine or a reference model and measures it.

Two sides that are compared live in processes of their own and take turns, so that both see the same
machine. A worker reads one JSON request per line from stdin and answers with one JSON line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MODEL = "smollm2-135m"


class Worker:
    """A worker process, seen from the benchmark."""

    def __init__(self, role: str, **settings: Any) -> None:
        self.name = " ".join([role, *(f"{k}={v}" for k, v in settings.items())])
        environment = dict(os.environ)
        ranks = settings.get("tensor_parallel_size", 1)
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={ranks}"
        self._process = subprocess.Popen(
            [sys.executable, __file__, role, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.ready = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker {self.name!r} ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate(timeout=60)


def take_turns(rounds: int, **sides: Callable[[], float]) -> dict[str, list[float]]:
    """Measure all sides once per round, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, measure in sides.items():
            times[name].append(measure())
    return times


def ratio(times: dict[str, list[float]], over: str, under: str) -> float:
    """Median over the rounds of the ratio within a round."""
    pairs = zip(times[over], times[under], strict=True)
    return statistics.median(a / b for a, b in pairs)


@dataclass
class StreamTimes:
    """When one answer of ``num_tokens`` tokens was asked for, began and ended, in seconds."""

    asked: float
    first: float
    last: float
    num_tokens: int

    @property
    def inter_token_seconds(self) -> float:
        return (self.last - self.first) / max(self.num_tokens - 1, 1)


def summarize_streams(streams: Sequence[StreamTimes]) -> dict[str, float]:
    """Medians over concurrent streams, and the tokens of all per second of the whole time."""
    seconds = max(one.last for one in streams) - min(one.asked for one in streams)
    return {
        "ttft_s": statistics.median(one.first - one.asked for one in streams),
        "itl_ms": 1e3 * statistics.median(one.inter_token_seconds for one in streams),
        "tokens_per_s": sum(one.num_tokens for one in streams) / seconds,
    }


def serve_requests(
    answer: Callable[[dict[str, Any]], dict[str, Any]], ready: dict[str, Any]
) -> None:
    """The worker's side of the conversation."""
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def engine_worker(settings: dict[str, Any]) -> None:
    """Decode and prefill in an engine; the bandwidth of a matrix-vector product."""
    from dcpjax.config import EngineConfig
    from dcpjax.engine.engine import Engine
    from dcpjax.models.checkpoint import open_checkpoint

    start = time.perf_counter()
    checkpoint = open_checkpoint(settings.pop("model", MODEL))
    engine = Engine(EngineConfig.from_settings(MODEL, settings), checkpoint)
    operations = {
        "decode": lambda **request: _time_decode(engine, **request),
        "prefill": lambda **request: _time_prefill(engine, **request),
        "streams": lambda **request: _time_streams(engine, **request),
        "bare_steps": lambda **request: _time_bare_steps(engine, **request),
        "bandwidth": lambda **request: _measure_bandwidth(),
    }
    serve_requests(
        lambda request: operations[request.pop("op")](**request),
        {"ready_seconds": time.perf_counter() - start, "weight_bytes": engine.runner.weight_bytes},
    )


def make_prompt(length: int, salt: int) -> tuple[int, ...]:
    """Tokens without a pattern, the same for the same arguments."""
    return tuple(
        (salt * 7919 + index * 104729 + index * index * 31) % 40000 + 100 for index in range(length)
    )


def _add(engine: Any, name: str, prompt: tuple[int, ...], max_tokens: int) -> None:
    from dcpjax.engine.request import Request, SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    engine.add(Request(name, prompt, params))


def _time_decode(engine: Any, *, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Milliseconds per step, once all prompts are computed (or found in the prefix cache)."""
    for row in range(batch):
        _add(engine, f"row {row}", make_prompt(context, row), steps + 4 * batch + 8)
    while sum(len(o.token_ids) for o in engine.step()) < batch:
        pass
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    elapsed = time.perf_counter() - start
    for row in range(batch):
        engine.abort(f"row {row}")
    while engine.has_work:
        engine.step()
    return {"ms": elapsed / steps * 1e3}


def _time_prefill(engine: Any, *, tokens: int, salt: int) -> dict[str, Any]:
    """Seconds from a prompt that nobody has seen to its first token."""
    engine.reset_prefix_cache()
    _add(engine, "prompt", make_prompt(tokens, salt), 1)
    start = time.perf_counter()
    while not engine.step():
        pass
    return {"s": time.perf_counter() - start}


def _time_streams(
    engine: Any, *, context: int, salts: Sequence[int], tokens: int
) -> dict[str, Any]:
    """Concurrent answers to prompts that nobody has seen, from the first step to the last."""
    engine.reset_prefix_cache()
    now = time.perf_counter()
    streams = {f"row {salt}": StreamTimes(now, 0.0, 0.0, 0) for salt in salts}
    for salt in salts:
        _add(engine, f"row {salt}", make_prompt(context, salt), tokens)
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            stream = streams[output.request_id]
            stream.first, stream.last = stream.first or now, now
            stream.num_tokens += len(output.token_ids)
    return summarize_streams(list(streams.values()))


def _time_bare_steps(engine: Any, *, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Milliseconds per step without any host work in between: the same plan again and again."""
    for row in range(batch):
        _add(engine, f"row {row}", make_prompt(context, row), 64)
    while sum(len(o.token_ids) for o in engine.step()) < batch:
        pass
    engine.drain()
    plan = engine.scheduler.schedule()
    start = time.perf_counter()
    for _ in range(steps):
        dispatched = engine.runner.dispatch(plan)
    tokens = dispatched.wait()
    elapsed = time.perf_counter() - start
    engine.scheduler.commit(plan, *tokens)
    for row in range(batch):
        engine.abort(f"row {row}")
    while engine.has_work:
        engine.step()
    return {"ms": elapsed / steps * 1e3}


def _measure_bandwidth() -> dict[str, Any]:
    """Bytes per second of the best of several matrix-vector products over 512 MiB of float32."""
    import jax
    import jax.numpy as jnp

    matrices = [jnp.ones((4096, 8192), jnp.float32) for _ in range(4)]
    multiply = jax.jit(lambda x, weights: [x @ weight for weight in weights])
    x = jnp.ones((1, 4096), jnp.float32)
    jax.block_until_ready(multiply(x, matrices))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(multiply(x, matrices))
        times.append(time.perf_counter() - start)
    return {"bytes_per_s": sum(m.nbytes for m in matrices) / min(times)}


def transformers_worker(settings: dict[str, Any]) -> None:
    """The same weights in float32 in transformers: one stream, eager, all cores."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    from dcpjax.models.checkpoint import open_checkpoint

    path = open_checkpoint(MODEL).path
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()

    @torch.inference_mode()
    def decode(*, context: int, steps: int) -> dict[str, Any]:
        ids = torch.tensor([make_prompt(context, 0)])
        output = model(ids, use_cache=True, logits_to_keep=1)
        start = time.perf_counter()
        for _ in range(steps):
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
        return {"ms": (time.perf_counter() - start) / steps * 1e3}

    @torch.inference_mode()
    def prefill(*, tokens: int, salt: int) -> dict[str, Any]:
        ids = torch.tensor([make_prompt(tokens, salt)])
        start = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        return {"s": time.perf_counter() - start}

    operations = {"decode": decode, "prefill": prefill}
    serve_requests(lambda request: operations[request.pop("op")](**request), {})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["engine", "transformers"])
    parser.add_argument("settings", type=json.loads)
    arguments = parser.parse_args()
    roles = {"engine": engine_worker, "transformers": transformers_worker}
    roles[arguments.role](arguments.settings)
