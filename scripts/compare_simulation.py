"""The simulator against the real server: SmolLM2 here, requests at random times.

Each round measures the server's steps with requests that are alone (how long prompts of some
lengths take, how long a step of some answers takes), sends the trace to the server, measures the
steps again, and simulates the trace with what was measured before and after. Ratios are medians
over rounds of simulated over measured, so that a machine that slows down does so for both sides.
The simulation knows nothing else of the server, and the ratios mean something only where the server
keeps up with the rate. ``--record`` keeps one round, as a table that ``dcpjax simulate --steps``
reads. The last line of stdout is JSON.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from bench_serve import server_options, stream_once
from bench_workers import MODEL, StreamTimes, make_prompt
from server_process import running_server

from dcpjax.planner import Cluster, EngineSpec, Workload, fit_steps, generate_trace, simulate
from dcpjax.planner.trace_files import Session, Turn
from dcpjax.planner.traces import Trace

PAGE, CHUNK, MAX_SEQS, NUM_PAGES = 16, 512, 8, 1024
WIDTHS = (64, CHUNK)
"""Widths of prompt chunks that an engine with these settings compiles."""
LONGEST_PROMPT = 1024


async def ask_together(
    url: str, prompts: Sequence[tuple[int, ...]], tokens: int
) -> list[StreamTimes]:
    """All prompts at the same time."""
    async with httpx.AsyncClient(base_url=url, timeout=None) as http:
        return await asyncio.gather(*(stream_once(http, prompt, tokens) for prompt in prompts))


def measure_steps(url: str, salts: Iterator[int]) -> dict[str, list[list[float]]]:
    """Rows of :func:`dcpjax.planner.fit_steps`, from requests that do not disturb each other."""

    def first_token(length: int) -> float:
        (times,) = asyncio.run(ask_together(url, [make_prompt(length, next(salts))], 2))
        return times.first - times.asked

    short, one, two = first_token(48), first_token(CHUNK), first_token(2 * CHUNK)
    prefill = [[48, 0, short], [CHUNK, 0, one], [CHUNK, CHUNK, max(two - one, 1e-4)]]
    decode: list[list[float]] = []
    for batch, length in ((1, 64), (4, 64), (MAX_SEQS, 64), (4, LONGEST_PROMPT)):
        prompts = [make_prompt(length, next(salts)) for _ in range(batch)]
        times = asyncio.run(ask_together(url, prompts, 24))
        between = statistics.median(one.inter_token_seconds for one in times)
        decode.append([batch, batch * (length + 12), between])
    return {"decode": decode, "prefill": prefill}


async def replay(url: str, trace: Trace, salts: Iterator[int]) -> list[StreamTimes]:
    """Every request at its time."""
    async with httpx.AsyncClient(base_url=url, timeout=None) as http:

        async def send(session: Session) -> StreamTimes:
            await asyncio.sleep(session.start)
            turn = session.turns[0]
            prompt = make_prompt(turn.num_input, next(salts))
            return await stream_once(http, prompt, turn.num_output)

        return await asyncio.gather(*(send(session) for session in trace.sessions))


def requests_of(options: argparse.Namespace) -> Trace:
    """The trace, with prompts and answers that the server takes."""
    work = Workload(
        num_requests=options.requests, rate=options.rate, num_input=300, num_output=24, spread=0.6
    )
    sessions = (
        Session(
            session.start,
            tuple(
                Turn(min(LONGEST_PROMPT, max(8, turn.num_input)), max(2, turn.num_output))
                for turn in session.turns
            ),
        )
        for session in generate_trace(work, seed=options.seed).sessions
    )
    return Trace("requests", tuple(sessions))


def simulated(trace: Trace, steps: dict[str, list[list[float]]]) -> dict[str, float]:
    """Medians of the same requests on a simulated engine."""
    spec = EngineSpec(
        fit_steps(steps["decode"], steps["prefill"], WIDTHS),
        num_pages=NUM_PAGES,
        page_tokens=PAGE,
        max_batch=MAX_SEQS,
        chunk=CHUNK,
    )
    report = simulate(trace, Cluster((spec,)))
    return {"ttft": report.ttft.p50, "tpot": report.tpot.p50}


def measured(times: Sequence[StreamTimes]) -> dict[str, float]:
    return {
        "ttft": statistics.median(one.first - one.asked for one in times),
        "tpot": statistics.median(one.inter_token_seconds for one in times),
    }


def run_round(url: str, trace: Trace, salts: Iterator[int]) -> dict[str, Any]:
    before = measure_steps(url, salts)
    times = asyncio.run(replay(url, trace, salts))
    after = measure_steps(url, salts)
    steps = {name: before[name] + after[name] for name in before}
    return {"steps": steps, "measured": measured(times), "simulated": simulated(trace, steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=0, help="of the trace")
    parser.add_argument("--record", type=Path, help="file for the median round")
    options = parser.parse_args()
    trace = requests_of(options)
    settings = {
        "block_size": PAGE,
        "num_pages": NUM_PAGES,
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": CHUNK,
    }
    salts = itertools.count(5000)
    rounds: list[dict[str, Any]] = []
    with running_server(MODEL, server_options(settings)) as (_, url):
        measure_steps(url, salts)  # what is done only once
        for _ in range(options.rounds):
            rounds.append(run_round(url, trace, salts))
            print(json.dumps(rounds[-1]), file=sys.stderr)
    ratios = {
        name: statistics.median(r["simulated"][name] / r["measured"][name] for r in rounds)
        for name in ("ttft", "tpot")
    }
    if options.record:
        options.record.write_text(json.dumps(_record(trace, rounds), indent=1) + "\n")
    result = {"rounds": options.rounds, "requests": options.requests, "rate": options.rate}
    print(json.dumps({**result, "simulated_over_measured": ratios}))


def _record(trace: Trace, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The round whose time to the first token was predicted as in most."""
    by_ratio = sorted(rounds, key=lambda r: r["simulated"]["ttft"] / r["measured"]["ttft"])
    chosen = by_ratio[len(by_ratio) // 2]
    requests = [[s.start, s.turns[0].num_input, s.turns[0].num_output] for s in trace.sessions]
    return {**chosen["steps"], "widths": WIDTHS, "trace": requests, "measured": chosen["measured"]}


if __name__ == "__main__":
    main()
