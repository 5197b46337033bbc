"""Many streaming clients, some of which leave, against a real server for some minutes.

Starts ``dcpjax serve``, has every distinct request answered once alone, then lets the clients come
and go at random. Every answer is judged by the lone one (see ``soak_requests.py``). Afterwards the
server must be as before: no page held, nothing running, nothing compiled, no more memory than
earlier, healthy, and it must end with exit code 0. Options that are not listed go to the server::

    soak_server.py --minutes 3 -tp 3 -dcp 3 --max-num-seqs 8

The last line of stdout is JSON; the exit code is 1 when something was wrong.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from server_process import ServerProcess, running_server
from soak_requests import (
    Answer,
    Case,
    Visit,
    ending_faults,
    has_near_tie,
    judge,
    make_cases,
    make_visit,
)

MIB = 2**20
MAX_SHOWN_FAULTS = 20
SETTLE_SECONDS = 60.0
NO_TIMEOUT = httpx.Timeout(None)


@dataclass
class Tally:
    """What has been seen so far."""

    num_finished: int = 0
    num_left: int = 0
    num_tokens: int = 0
    num_flipped: int = 0
    num_faults: int = 0
    faults: list[str] = field(default_factory=list[str])
    rss: list[int] = field(default_factory=list[int])

    def fault(self, text: str) -> None:
        self.num_faults += 1
        if len(self.faults) < MAX_SHOWN_FAULTS:
            self.faults.append(text)

    def count(self, visit: Visit, alone: Answer, answer: Answer) -> None:
        self.num_finished += not answer.has_left
        self.num_left += answer.has_left
        self.num_tokens += len(answer.token_ids)
        verdict = judge(visit.case, alone, answer)
        self.num_flipped += verdict.is_flipped
        for fault in verdict.faults:
            self.fault(f"{visit.case.path} {visit.case.body['max_tokens']} tokens: {fault}")


async def visit_server(http: httpx.AsyncClient, visit: Visit) -> Answer:
    """One stream, read to its end or left as the visit says. Leaving closes the connection."""
    answer = Answer()
    try:
        async with asyncio.timeout(visit.leaves_after_seconds):
            await _read(http, visit, answer)
    except TimeoutError:
        answer.has_left = True
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _read(http: httpx.AsyncClient, visit: Visit, answer: Answer) -> None:
    body = visit.case.request(with_logprobs=visit.with_logprobs)
    async with http.stream("POST", visit.case.path, json=body) as response:
        if response.status_code != httpx.codes.OK:
            answer.error = (await response.aread()).decode()
            return
        if visit.leaves_after_tokens == 0:
            answer.has_left = True
            return
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                answer.is_done = True
            elif data:
                answer.add(json.loads(data))
            if visit.leaves_after_tokens and len(answer.token_ids) >= visit.leaves_after_tokens:
                answer.has_left = not answer.is_done
                return


async def answer_alone(http: httpx.AsyncClient, cases: list[Case], tally: Tally) -> list[Answer]:
    """Each case on an idle server with an empty prefix cache."""
    answers: list[Answer] = []
    for case in cases:
        (await http.post("/reset_prefix_cache")).raise_for_status()
        answer = await visit_server(http, Visit(case, with_logprobs=True))
        faults = [answer.error] if answer.error else ending_faults(case, answer)
        for fault in faults:
            tally.fault(f"alone: {case.path}: {fault}")
        answers.append(answer)
    return answers


async def run_clients(
    http: httpx.AsyncClient,
    cases: list[Case],
    alone: list[Answer],
    tally: Tally,
    options: argparse.Namespace,
) -> None:
    """All clients, one visit after the other each, until the time is up."""
    ends = time.monotonic() + 60 * options.minutes
    answers = {id(case): answer for case, answer in zip(cases, alone, strict=True)}

    async def client(number: int) -> None:
        choose = random.Random(f"{options.seed} {number}")
        while time.monotonic() < ends:
            visit = make_visit(choose, cases)
            tally.count(visit, answers[id(visit.case)], await visit_server(http, visit))

    await asyncio.gather(*(client(number) for number in range(options.clients)))


async def watch_memory(server: ServerProcess, tally: Tally, period: float) -> None:
    while True:
        tally.rss.append(await asyncio.to_thread(server.rss_bytes))
        await asyncio.sleep(period)


async def settled_stats(http: httpx.AsyncClient) -> dict[str, Any]:
    """The engine's statistics once nothing runs; an abort takes effect with the next step."""
    ends = time.monotonic() + SETTLE_SECONDS
    while True:
        stats = (await http.get("/stats")).json()
        is_idle = stats["num_requests_running"] == stats["num_requests_waiting"] == 0
        if is_idle or time.monotonic() > ends:
            return stats
        await asyncio.sleep(0.1)


async def check_salts(http: httpx.AsyncClient, cases: list[Case], tally: Tally) -> None:
    """A prompt is found again under its own salt alone."""
    longest = max(cases, key=lambda case: len(str(case.body)))
    cached: list[int] = []
    for salt in ("a", "a", "b"):
        body = {**longest.body, "max_tokens": 1, "cache_salt": salt}
        usage = (await http.post(longest.path, json=body)).raise_for_status().json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    if not cached[0] == cached[2] == 0 < cached[1]:
        tally.fault(f"cached tokens under the salts a, a, b: {cached}")


async def check_afterwards(http: httpx.AsyncClient, tally: Tally) -> dict[str, Any]:
    """See that the load has left nothing behind."""
    await settled_stats(http)
    (await http.post("/reset_prefix_cache")).raise_for_status()
    stats = await settled_stats(http)
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage",
        "compilations_after_warmup",
    ):
        if stats[name]:
            tally.fault(f"{name} is {stats[name]} after the load")
    if (load := (await http.get("/load")).json()["server_load"]) != 0:
        tally.fault(f"{load} requests are open after the load")
    if (health := await http.get("/health")).status_code != httpx.codes.OK:
        tally.fault(f"/health answers {health.status_code} after the load")
    return stats


def check_memory(tally: Tally, max_growth: float) -> dict[str, Any]:
    """Compare the second quarter of the load with its last; the first one is still warming up."""
    quarter = len(tally.rss) // 4
    if not quarter:
        tally.fault("the load was too short to say anything about memory")
        return {}
    second = statistics.median(tally.rss[quarter : 2 * quarter])
    last = statistics.median(tally.rss[-quarter:])
    if (growth := last / second - 1) > max_growth:
        tally.fault(f"the server's memory has grown by {growth:.1%}")
    return {
        "rss_second_quarter_mib": round(second / MIB, 1),
        "rss_last_quarter_mib": round(last / MIB, 1),
        "rss_growth_percent": round(100 * growth, 2),
        "rss_mib": [round(value / MIB) for value in tally.rss[:: max(quarter // 4, 1)]],
    }


async def soak(
    server: ServerProcess, url: str, tally: Tally, options: argparse.Namespace
) -> dict[str, Any]:
    """Everything that needs the server alive; what was measured."""
    cases = make_cases(
        random.Random(options.seed),
        count=options.cases,
        max_words=options.max_words,
        max_tokens=options.max_tokens,
    )
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=NO_TIMEOUT) as http:
        alone = await answer_alone(http, cases, tally)
        started = time.monotonic()
        watcher = asyncio.create_task(watch_memory(server, tally, 60 * options.minutes / 100))
        await run_clients(http, cases, alone, tally, options)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        seconds = time.monotonic() - started
        await check_salts(http, cases, tally)
        stats = await check_afterwards(http, tally)
    return {
        "seconds": round(seconds, 1),
        "cases": len(cases),
        "cases_with_near_ties": sum(map(has_near_tie, alone)),
        "preemptions": stats["num_preemptions"],
        "prefix_cache_hits": stats["prefix_cache_hits"],
        "steps": stats["steps"],
        **check_memory(tally, options.max_growth),
    }


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """Our options, and those of the server."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="smollm2-135m", help="folder, .gguf file or known name")
    parser.add_argument("--minutes", type=float, default=3.0, help="length of the load")
    parser.add_argument("--clients", type=int, default=64, help="concurrent clients")
    parser.add_argument("--cases", type=int, default=24, help="distinct requests")
    parser.add_argument("--max-words", type=int, default=300, help="of a part of a prompt")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-growth", type=float, default=0.05, help="of memory, as a part of it")
    return parser.parse_known_args()


def check_server(options: argparse.Namespace, server_options: list[str]) -> dict[str, Any]:
    """Start a server, load it, stop it; what was found."""
    tally = Tally()
    with running_server(options.model, server_options) as (server, url):
        measured = asyncio.run(soak(server, url, tally, options))
        code = server.stop()
    if code != 0:
        tally.fault(f"the server ended with exit code {code}")
    if server.num_tracebacks:
        tally.fault(f"the server's log has {server.num_tracebacks} tracebacks")
    return {
        "passed": not tally.num_faults,
        "finished": tally.num_finished,
        "left": tally.num_left,
        "tokens": tally.num_tokens,
        "flipped_at_near_ties": tally.num_flipped,
        **measured,
        "exit_code": code,
        "num_faults": tally.num_faults,
        "faults": tally.faults,
    }


def main() -> int:
    result = check_server(*parse_options())
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
