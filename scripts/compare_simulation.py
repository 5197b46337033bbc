"""The simulator against the real server: SmolLM2 here, requests at random times.

    python scripts/compare_simulation.py [--record FILE]

Each round measures the server's steps with requests on purpose (``step_probes.py``), sends the
trace to the server, measures the steps again, and simulates the trace with what was measured before
and after. Ratios are medians over rounds of simulated over measured, so that a machine that slows
down does so for both sides. The simulation knows nothing else of the server but how it chooses the
shapes of its steps. The rate is a share of what the first table says the server can do; above about
0.7 a queue decides the time to the first token, and multiplies every error. ``--record`` keeps the
most usual round, as a table that ``dcpjax simulate --steps`` reads. The last line of stdout is
JSON; the aim is both ratios between 0.8 and 1.2.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from bench_serve import server_options, stream_once
from bench_workers import MODEL, StreamTimes, make_prompt
from server_process import running_server
from step_probes import DECODE_ROWS, LONG, StepTable, measure_steps

from dcpjax.config import EngineConfig
from dcpjax.engine.buckets import decode_buckets, prefill_buckets
from dcpjax.engine.plan import StepShapes
from dcpjax.planner import Cluster, EngineSpec, Workload, fit_shapes, generate_trace, simulate
from dcpjax.planner.sim_report import Report
from dcpjax.planner.trace_files import Session, Turn
from dcpjax.planner.traces import Trace

SETTINGS = {
    "block_size": 16,
    "num_pages": 1024,
    "max_num_seqs": max(DECODE_ROWS),
    "max_num_batched_tokens": LONG,
}
LONGEST_PROMPT = 1024


@dataclass(frozen=True)
class Round:
    """What was measured and what the simulator says, medians over requests.

    Attributes:
        busy: processes that wanted a CPU at the end, the server's and the client's included.
    """

    table: StepTable
    trace: Trace
    streams: list[StreamTimes]
    report: Report
    busy: float

    @property
    def measured(self) -> dict[str, float]:
        return {
            "ttft": statistics.median(one.first - one.asked for one in self.streams),
            "tpot": statistics.median(one.inter_token_seconds for one in self.streams),
        }

    @property
    def simulated(self) -> dict[str, float]:
        return {"ttft": self.report.ttft.p50, "tpot": self.report.tpot.p50}

    @property
    def ratios(self) -> dict[str, float]:
        measured = self.measured
        return {name: value / measured[name] for name, value in self.simulated.items()}


def step_shapes() -> StepShapes:
    """The shapes that a server with SETTINGS compiles."""
    prompts = prefill_buckets(EngineConfig.from_settings(MODEL, dict(SETTINGS)))
    return StepShapes(decode_buckets(1, SETTINGS["max_num_seqs"]), prompts)


def cluster_of(table: StepTable) -> Cluster:
    """The server with these step times."""
    spec = EngineSpec(
        fit_shapes(table.decode, table.prompts),
        num_pages=SETTINGS["num_pages"],
        page_tokens=SETTINGS["block_size"],
        max_batch=SETTINGS["max_num_seqs"],
        prompt_shape=step_shapes().best_prefill,
        looks_ahead=True,
    )
    return Cluster((spec,), latency=table.latency)


def requests_of(options: argparse.Namespace, table: StepTable) -> Trace:
    """The trace, at a share of the rate that the server could just keep up with."""
    work = Workload(num_requests=options.requests, num_input=300, num_output=24, spread=0.6)
    sessions = generate_trace(work, seed=options.seed).sessions
    trace = Trace("requests", tuple(replace(one, turns=(_within(one),)) for one in sessions))
    at_once = replace(trace, sessions=tuple(replace(one, start=0.0) for one in trace.sessions))
    seconds = simulate(at_once, cluster_of(table)).duration
    return trace.at_rate(options.load * options.requests / seconds)


def _within(session: Session) -> Turn:
    """A prompt and an answer that the server takes, and that has a time per token."""
    (turn,) = session.turns
    return Turn(min(LONGEST_PROMPT, max(8, turn.num_input)), max(2, turn.num_output))


async def replay(url: str, trace: Trace, salts: Iterator[int]) -> list[StreamTimes]:
    """Every request at its time."""
    async with httpx.AsyncClient(base_url=url, timeout=None) as http:

        async def send(session: Session) -> StreamTimes:
            await asyncio.sleep(session.start)
            turn = session.turns[0]
            prompt = make_prompt(turn.num_input, next(salts))
            return await stream_once(http, prompt, turn.num_output)

        return await asyncio.gather(*(send(session) for session in trace.sessions))


def as_sent(trace: Trace, streams: Sequence[StreamTimes]) -> Trace:
    """The trace with the times at which the requests were really sent."""
    begin = min(stream.asked for stream in streams)
    sent = (stream.asked - begin for stream in streams)
    sessions = (Session(s, one.turns) for s, one in zip(sent, trace.sessions, strict=True))
    return Trace(trace.name, tuple(sorted(sessions, key=lambda session: session.start)))


def run_round(url: str, trace: Trace, salts: Iterator[int]) -> Round:
    before = measure_steps(url, salts)
    streams = asyncio.run(replay(url, trace, salts))
    table = before + measure_steps(url, salts)
    sent = as_sent(trace, streams)
    return Round(table, sent, streams, simulate(sent, cluster_of(table)), os.getloadavg()[0])


def show(one: Round) -> None:
    """A round for people."""
    shown = {"measured": one.measured, "simulated": one.simulated, "ratios": one.ratios}
    steps = asdict(fit_shapes(one.table.decode, one.table.prompts))
    print(json.dumps({**shown, "latency": one.table.latency, **steps}), file=sys.stderr)


def record(rounds: Sequence[Round]) -> dict[str, Any]:
    """The round whose time to the first token was predicted as in most."""
    chosen = sorted(rounds, key=lambda one: one.ratios["ttft"])[len(rounds) // 2]
    shapes, sessions = step_shapes(), chosen.trace.sessions
    return {
        "provenance": {
            "what": "scripts/compare_simulation.py --record",
            "model": MODEL,
            "settings": SETTINGS,
            "recorded": datetime.now(UTC).date().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, shared with other work",
            "load_average": round(chosen.busy, 1),
            "jax": version("jax"),
        },
        "shapes": {"decode_rows": shapes.decode_rows, "prefill": shapes.prefill},
        "decode": _rounded(chosen.table.decode),
        "prompts": _rounded(chosen.table.prompts),
        "latency": round(chosen.table.latency, 5),
        "trace": [
            [round(s.start, 3), s.turns[0].num_input, s.turns[0].num_output] for s in sessions
        ],
        "measured": {name: round(value, 5) for name, value in chosen.measured.items()},
    }


def _rounded(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[*what, round(seconds, 5)] for *what, seconds in rows]


@contextlib.contextmanager
def _server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with running_server(MODEL, server_options(SETTINGS)) as (_, own):
        yield own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--load", type=float, default=0.5, help="share of the server's capacity")
    parser.add_argument("--seed", type=int, default=0, help="of the trace")
    parser.add_argument("--url", help="of a server with these settings that runs already")
    parser.add_argument("--record", type=Path, help="file for the most usual round")
    options = parser.parse_args()
    salts = itertools.count(5000)
    rounds: list[Round] = []
    with _server(options.url) as url:
        measure_steps(url, salts)  # what is done only once
        trace = requests_of(options, measure_steps(url, salts))
        for _ in range(options.rounds):
            rounds.append(run_round(url, trace, salts))
            show(rounds[-1])
    if options.record:
        entries = (f' "{key}": {json.dumps(value)}' for key, value in record(rounds).items())
        options.record.write_text("{\n" + ",\n".join(entries) + "\n}\n")
    ratios = {
        name: statistics.median(one.ratios[name] for one in rounds) for name in ("ttft", "tpot")
    }
    result = {"rounds": options.rounds, "requests": options.requests, "load": options.load}
    print(json.dumps({**result, "simulated_over_measured": ratios}))


if __name__ == "__main__":
    main()
