"""Prefill and decode engines that are killed and frozen at random, under clients that come and go.

Starts engines of several shapes (``dcpjax serve``, kv_producer and kv_consumer) and their router,
and for some time, all of it seeded:

* clients ask for completions whose tokens are known from one plain engine (``chaos_requests.py``),
  and some of them leave, go away with half of a hand-off, or lie about where KV is;
* engines are killed (``kill -9``) and started again at the same address, perhaps with another mesh,
  or stand still for a while;
* the side channels get what no engine has sent (``chaos_frames.py``).

Then the faults end. No answer may have had a wrong token; an error must be an error object, and
near a fault in time. Every engine must serve, with every other one; nothing may be held: no page,
no lease, no request; and all must end with exit code 0. The schedule of the faults depends on the
seed alone, what they hit does not.

The last line of stdout is JSON; the exit code is 1 when something was wrong::

    chaos_pd.py --seconds 600 --seed 7 --decode-meshes 3/3 2/2 1/1
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx
from chaos_clients import Clients, Tally
from chaos_frames import send_nonsense
from chaos_requests import Case, Json, Visit, make_cases, make_visit
from pd_processes import HOST, Cluster, Engine, EngineRole, Mesh, running_cluster

BRIEF = {
    "kv_lease_duration": 2.0,
    "kv_lease_extension": 1.5,
    "heartbeat_interval": 0.3,
    "transfer_timeout": 5.0,
}
"""Leases that end while the script runs."""
POLICIES = ("recompute", "fail")
SETTLE_SECONDS = 120.0
ANSWER_SECONDS = 120.0
"""Longer than anything here may take, the next sign of an answer does not come any more."""
CALM_CLIENTS = 4
PERIOD_SECONDS = 5.0


async def run_chaos(
    clients: Clients,
    cluster: Cluster,
    cases: Sequence[Case],
    tally: Tally,
    options: argparse.Namespace,
) -> None:
    """All clients and all faults until the time is up; afterwards all engines are there."""
    ends = time.monotonic() + options.seconds

    async def come_and_go(number: int) -> None:
        choose = random.Random(f"{options.seed} client {number}")
        while time.monotonic() < ends:
            await clients.visit(choose, make_visit(choose, cases))
            await asyncio.sleep(choose.expovariate(2.0))

    async def intrude() -> None:
        choose = random.Random(f"{options.seed} intruder")
        while time.monotonic() < ends:
            await asyncio.sleep(choose.expovariate(1.0))
            port = choose.choice(cluster.prefill).kv_port
            tally.done[await asyncio.to_thread(send_nonsense, choose, HOST, port)] += 1

    async def report() -> None:
        for left in itertools.count(1):
            await asyncio.sleep(PERIOD_SECONDS)
            print(f"[{left * PERIOD_SECONDS:.0f} s] {dict(tally.answers)}", flush=True)

    reporter = asyncio.create_task(report())
    meshes = [options.prefill_meshes] * len(cluster.prefill)
    meshes += [options.decode_meshes] * len(cluster.decode)
    await asyncio.gather(
        *(come_and_go(number) for number in range(options.clients)),
        *(
            break_often(engine, choices, tally, ends, options)
            for engine, choices in zip(cluster.engines, meshes, strict=True)
        ),
        intrude(),
    )
    reporter.cancel()
    await asyncio.gather(reporter, return_exceptions=True)


async def break_often(
    engine: Engine,
    meshes: Sequence[Mesh],
    tally: Tally,
    ends: float,
    options: argparse.Namespace,
) -> None:
    """Kill, freeze and freeze-then-kill one engine, in turns of random order."""
    choose = random.Random(f"{options.seed} {engine.name}")
    kinds: list[str] = []
    while True:
        kinds = kinds or choose.sample(["kill", "freeze", "freeze and kill"], 3)
        wait = choose.expovariate(1 / options.fault_seconds)
        mesh, stands = choose.choice(meshes), choose.expovariate(1 / options.freeze_seconds)
        if time.monotonic() + wait > ends:
            return
        await asyncio.sleep(wait)
        with tally.outage(kind := kinds.pop(), engine):
            if kind != "kill":
                engine.freeze()
                await asyncio.sleep(stands)
            if kind == "freeze":
                engine.thaw()
                continue
            engine.kill()
            engine.start(mesh)
            await asyncio.to_thread(engine.wait_until_ready)


async def check_afterwards(
    clients: Clients,
    http: httpx.AsyncClient,
    cluster: Cluster,
    cases: Sequence[Case],
    tally: Tally,
) -> None:
    """See that everything serves again and that nothing is held."""
    await check_idle(http, cluster, tally)
    tally.outages.clear()  # from here on nothing is excused
    await wait_for_router(http, cluster, tally)
    print("asking for every case", flush=True)
    for start in range(0, len(cases), CALM_CLIENTS):
        visits = [Visit(case, stream=False) for case in cases[start : start + CALM_CLIENTS]]
        await asyncio.gather(*(clients.ask(cluster.url, visit) for visit in visits))
    print("asking every pair of engines", flush=True)
    for source, target in itertools.product(cluster.prefill, cluster.decode):
        visit = Visit(cases[-1], salt=f"{source.name} {target.name}")
        offer = await clients.offer(source, visit)
        if offer is None:
            tally.fault(f"{source.name} computes no prompt for {target.name}")
        else:
            await clients.ask(target.url, visit, offer)
    await check_idle(http, cluster, tally)


async def wait_for_router(http: httpx.AsyncClient, cluster: Cluster, tally: Tally) -> None:
    """Until the router knows that all engines are there."""
    ends = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < ends:
        lines = (await http.get(f"{cluster.url}/metrics")).text.splitlines()
        healthy = [line for line in lines if line.startswith("dcpjax:router_healthy")]
        if sum(line.endswith(" 1.0") for line in healthy) == len(cluster.engines):
            return
        await asyncio.sleep(0.1)
    tally.fault("the router does not know that all engines live")


async def check_idle(http: httpx.AsyncClient, cluster: Cluster, tally: Tally) -> None:
    """Wait until the engines have nothing left, and say what they have if they keep it."""
    ends = time.monotonic() + SETTLE_SECONDS
    for engine in cluster.engines:
        while (held := await held_by(http, engine)) and time.monotonic() < ends:
            await asyncio.sleep(0.1)
        if held:
            tally.fault(f"{engine.name} holds {held}")


async def held_by(http: httpx.AsyncClient, engine: Engine) -> Json:
    """What is not as in an engine that has just started."""
    (await http.get(f"{engine.url}/health")).raise_for_status()
    stats = (await http.get(f"{engine.url}/stats")).json()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage")
    held = {name: stats[name] for name in (*names, "compilations_after_warmup")}
    held["num_leases"] = stats["kv_transfer"]["num_leases"]
    held["server_load"] = (await http.get(f"{engine.url}/load")).json()["server_load"]
    return {name: value for name, value in held.items() if value}


async def in_cluster(
    cluster: Cluster, cases: Sequence[Case], tally: Tally, options: argparse.Namespace
) -> Json:
    """Everything that needs the processes alive; what the engines have counted."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=ANSWER_SECONDS, trust_env=False) as http:
        clients = Clients(http, cluster, tally)
        await run_chaos(clients, cluster, cases, tally, options)
        print("the faults have ended", flush=True)
        await check_afterwards(clients, http, cluster, cases, tally)
        return {
            engine.name: (await http.get(f"{engine.url}/stats")).json()["kv_transfer"]
            for engine in cluster.engines
        }


def check_exits(cluster: Cluster, tally: Tally) -> None:
    """End all processes, each as an operator would, and see how they leave."""
    numbers = itertools.cycle([signal.SIGTERM, signal.SIGINT])
    codes: dict[str, int | None] = {"router": cluster.router.stop()}
    for engine, number in zip(cluster.engines, numbers, strict=False):
        codes[engine.name] = engine.stop(number)
    for name, code in codes.items():
        if code != 0:
            tally.fault(f"{name} ended with exit code {code}")
    tracebacks = {engine.name: engine.num_tracebacks for engine in cluster.engines}
    tracebacks["router"] = cluster.router.num_tracebacks
    for name, count in tracebacks.items():
        if count:
            tally.fault(f"the log of {name} has {count} tracebacks")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="folder, .gguf file or known name")
    add("--seconds", type=float, default=600.0, help="with faults")
    add("--seed", type=int, default=0)
    add("--connector", default="NixlConnector", help="kv_connector of all engines")
    mesh: dict[str, Any] = {"type": Mesh.read, "nargs": "+", "metavar": "TP/DCP"}
    add("--prefill-meshes", **mesh, default=[Mesh(1, 1), Mesh(2, 2)], help="to choose from")
    add("--decode-meshes", **mesh, default=[Mesh(3, 3), Mesh(1, 1)], help="to choose from")
    add("--prefills", type=int, default=1, help="prefill engines")
    add("--decodes", type=int, default=2, help="decode engines")
    add("--clients", type=int, default=6, help="concurrent clients")
    add("--cases", type=int, default=24, help="distinct requests")
    add("--max-prompt", type=int, default=120, help="tokens of a prompt")
    add("--max-tokens", type=int, default=24, help="of an answer")
    add("--fault-seconds", type=float, default=12.0, help="mean time between faults of one engine")
    add("--freeze-seconds", type=float, default=2.0, help="mean time that an engine stands still")
    return parser.parse_args()


def engine_settings(options: argparse.Namespace) -> Json:
    """Of every engine; so few pages that prompts wait for each other."""
    longest = options.max_prompt + options.max_tokens
    return {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "max_model_len": longest,
        "block_size": 8,
        "num_pages": 3 * math.ceil(longest / 8),
        "skip_tokenizer_init": True,
        "device": "cpu",
    }


def roles(options: argparse.Namespace, side: str, count: int) -> list[EngineRole]:
    """Engines that differ in what they do where KV cannot be loaded."""
    kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[side]
    transfer = {**BRIEF, "kv_role": kv_role, "kv_connector": options.connector}
    policies = itertools.islice(itertools.cycle(POLICIES), count)
    return [
        EngineRole(
            name=f"{side} {number}",
            model=options.model,
            settings=engine_settings(options),
            transfer={**transfer, "kv_load_failure_policy": policy},
        )
        for number, policy in enumerate(policies)
    ]


def check_cluster(options: argparse.Namespace) -> Json:
    """Start everything, break it, stop it; what was found."""
    cases = make_cases(
        random.Random(options.seed),
        {"model": options.model, **engine_settings(options)},
        count=options.cases,
        max_prompt=options.max_prompt,
        max_tokens=options.max_tokens,
    )
    print(f"{len(cases)} cases", flush=True)
    tally = Tally()
    sides = (("prefill", options.prefills), ("decode", options.decodes))
    prefill, decode = (roles(options, side, count) for side, count in sides)
    meshes = _cycled(options.prefill_meshes, options.prefills)
    meshes += _cycled(options.decode_meshes, options.decodes)
    with running_cluster(prefill, decode, meshes) as cluster:
        counted = asyncio.run(in_cluster(cluster, cases, tally, options))
        check_exits(cluster, tally)
    return {
        "passed": not tally.num_wrong,
        "done": dict(tally.done),
        "answers": dict(tally.answers),
        "kv_transfer": counted,
        "num_wrong": tally.num_wrong,
        "wrong": tally.wrong,
    }


def _cycled(meshes: Sequence[Mesh], count: int) -> list[Mesh]:
    return list(itertools.islice(itertools.cycle(meshes), count))


def main() -> int:
    for ending in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C does: the processes are ended first
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    result = check_cluster(parse_options())
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
