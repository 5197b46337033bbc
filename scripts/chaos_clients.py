"""The clients of the chaos script: their calls, and what is kept of the answers."""

import asyncio
import contextlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
from chaos_requests import Answer, Case, Json, Visit, Way, judge, make_lie
from pd_processes import Cluster, Engine

TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
AFTERMATH_SECONDS = 15.0
"""How long after its end a fault may still cause errors: the time within which the consumers' calls
to an engine that was there are given up."""
MAX_SHOWN_FAULTS = 20


@dataclass
class Outage:
    """An engine was dead or stood still from ``start`` to ``end``, monotonic seconds."""

    start: float
    end: float = math.inf


@dataclass
class Tally:
    """What has been done and seen so far."""

    outages: list[Outage] = field(default_factory=list[Outage])
    done: Counter[str] = field(default_factory=Counter[str])
    answers: Counter[str] = field(default_factory=Counter[str])
    num_wrong: int = 0
    wrong: list[str] = field(default_factory=list[str])

    def fault(self, text: str) -> None:
        self.num_wrong += 1
        if self.num_wrong <= MAX_SHOWN_FAULTS:
            self.wrong.append(text)
            print(f"wrong: {text}", flush=True)

    @contextlib.contextmanager
    def outage(self, kind: str, engine: Engine) -> Iterator[None]:
        """A fault of an engine, from now on until it serves again."""
        self.done[kind] += 1
        outage = Outage(time.monotonic())
        self.outages.append(outage)
        print(f"{kind} {engine.name}", flush=True)
        yield
        outage.end = time.monotonic()

    def may_fail(self, start: float, end: float) -> bool:
        """Whether a fault excuses an error of a call that lasted from ``start`` to ``end``."""
        return any(
            outage.start <= end and start <= outage.end + AFTERMATH_SECONDS
            for outage in self.outages
        )

    def count(self, visit: Visit, answer: Answer, start: float) -> None:
        ending = "left" if answer.has_left else "error" if answer.error else "whole"
        self.answers["broken" if answer.broken else ending] += 1
        faults = judge(visit, answer)
        excused = self.may_fail(start, time.monotonic())
        if answer.error and not (excused or visit.way in (Way.TWICE, Way.LYING)):
            faults.append("errors come near faults alone")
        if answer.broken and not (excused and visit.way is not Way.ROUTED):
            faults.append("only an engine that is killed breaks a connection off")
        for fault in faults:
            self.fault(f"{fault}: {visit} {answer}")


class Clients:
    """Calls of the endpoint and of its engines."""

    def __init__(self, http: httpx.AsyncClient, cluster: Cluster, tally: Tally) -> None:
        self._http = http
        self._cluster = cluster
        self._tally = tally

    async def visit(self, choose: random.Random, visit: Visit) -> None:
        """One turn of one client, judged."""
        if visit.way is Way.ROUTED:
            await self.ask(self._cluster.url, visit)
            return
        source = choose.choice(self._cluster.prefill)
        offer = await self.offer(source, visit)
        if offer is None or visit.way is Way.UNCLAIMED:
            return
        if visit.way is Way.LYING:
            offer = make_lie(choose, offer)
        num_targets = 2 if visit.way is Way.TWICE else 1
        targets = choose.choices(self._cluster.decode, k=num_targets)
        await asyncio.gather(*(self.ask(target.url, visit, offer) for target in targets))

    async def offer(self, source: Engine, visit: Visit) -> Json | None:
        """Have the prompt computed; where its KV is, or None where that went wrong."""
        start, answer = time.monotonic(), Answer()
        body = visit.request(stream=False, max_tokens=1, kv_transfer_params=TO_DECODE)
        whole = await self._post(source.url, body, answer)
        first = Visit(Case(visit.case.prompt, visit.case.tokens[:1]), visit.way)
        self._tally.count(first, answer, start)
        return None if whole is None else whole.get("kv_transfer_params")

    async def ask(self, url: str, visit: Visit, offer: Json | None = None) -> Answer:
        """One call, read to its end or left as the visit says. Leaving closes the connection."""
        start, answer = time.monotonic(), Answer()
        changes = {} if offer is None else {"kv_transfer_params": offer}
        body = visit.request(stream=visit.stream, **changes)
        try:
            async with asyncio.timeout(visit.leaves_after_seconds):
                if visit.stream:
                    await self._stream(url, body, answer, visit.leaves_after_tokens)
                else:
                    await self._post(url, body, answer)
        except TimeoutError:
            answer.has_left = True
        self._tally.count(visit, answer, start)
        return answer

    async def _post(self, url: str, body: Json, answer: Answer) -> Json | None:
        try:
            response = await self._http.post(f"{url}/v1/completions", json=body)
        except httpx.HTTPError as error:
            _note_end(answer, error)
            return None
        answer.status, answer.is_done = response.status_code, True
        whole = response.json()
        answer.add(whole)
        return whole if answer.error is None else None

    async def _stream(self, url: str, body: Json, answer: Answer, most: int | None) -> None:
        try:
            async with self._http.stream("POST", f"{url}/v1/completions", json=body) as response:
                answer.status = response.status_code
                if answer.status != httpx.codes.OK:
                    answer.add(json.loads(await response.aread()))
                    return
                await _read_events(response, answer, most)
        except httpx.HTTPError as error:
            _note_end(answer, error)


def _note_end(answer: Answer, error: httpx.HTTPError) -> None:
    """What became of an answer that does not come."""
    answer.broken = f"{type(error).__name__}: {error}"
    answer.is_late = isinstance(error, httpx.TimeoutException)


async def _read_events(response: httpx.Response, answer: Answer, most: int | None) -> None:
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            answer.is_done = True
        elif data:
            answer.add(json.loads(data))
        if most is not None and len(answer.token_ids) >= most and not answer.finish_reason:
            answer.has_left = True
            return
