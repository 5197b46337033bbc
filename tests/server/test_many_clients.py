"""Many streams at once, some of which leave: no wrong token, nothing left behind."""

import asyncio
import json
import random

import httpx

from tests.fakes import CountUpEngine
from tests.server.conftest import LiveServer, live_server


def test_many_streams_with_random_aborts(engine: CountUpEngine) -> None:
    with live_server(engine) as live:
        results = asyncio.run(run_clients(live, 64, random.Random(7)))
        usage = httpx.get(live.url + "/stats").json()
        load = httpx.get(live.url + "/load").json()
    for first, wanted, leaves_after, tokens, reason in results:
        expected = [(first + 1 + i) % 257 for i in range(wanted)]
        if leaves_after is None:
            assert tokens == expected
            assert reason == "length"
        else:
            assert tokens == expected[:leaves_after]
    assert not engine.open_requests
    assert usage["num_requests_running"] == 0
    assert load == {"server_load": 0}


async def run_clients(
    live: LiveServer, count: int, choose: random.Random
) -> list[tuple[int, int, int | None, list[int], str | None]]:
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        return await asyncio.gather(
            *(
                run_client(
                    client,
                    live.url + "/v1/completions",
                    first=choose.randrange(257),
                    wanted=choose.randrange(10, 100),
                    leaves_after=choose.choice([None, 1, 5]),
                )
                for _ in range(count)
            )
        )


async def run_client(
    client: httpx.AsyncClient, url: str, *, first: int, wanted: int, leaves_after: int | None
) -> tuple[int, int, int | None, list[int], str | None]:
    """One stream, left after some tokens or read to its end."""
    body = {
        "prompt": [first],
        "max_tokens": wanted,
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    tokens: list[int] = []
    reason = None
    async with client.stream("POST", url, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            tokens += choice["token_ids"]
            reason = choice["finish_reason"]
            if len(tokens) == leaves_after:
                break
    return first, wanted, leaves_after, tokens, reason
