"""A prefill engine and decode engines as real processes, over NIXL, that are killed and frozen."""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.engine.pair import skip_without
from tests.engine.serving import engine_of, request_of, serve
from tests.golden.tiny import random_tokens, write_tiny_model
from tests.server.test_router import live_router

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 120.0  # seconds until a test that waits for a process gives up
NUM_TOKENS = 12
PROMPTS = {length: random_tokens(f"pair {length}", length) for length in (1, 8, 50, 97)}
SETTINGS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "max_model_len": 144,
    "block_size": 8,
    "num_pages": 54,
    "skip_tokenizer_init": True,
    "device": "cpu",
}
BRIEF = {
    "kv_connector": "NixlConnector",
    "kv_lease_duration": 2.0,
    "kv_lease_extension": 1.5,
    "heartbeat_interval": 0.3,
    "transfer_timeout": 5.0,
}
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
Json = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def nixl() -> None:
    skip_without("NixlConnector")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(write_tiny_model(tmp_path_factory.mktemp("pair") / "gqa", "gqa")))


@pytest.fixture(scope="module")
def patched(pytestconfig: pytest.Config) -> Iterator[pytest.MonkeyPatch]:
    """Processes share what they compile."""
    assert pytestconfig.cache is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(pytestconfig.cache.mkdir("jax")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.syspath_prepend(ROOT / "scripts")
        yield patch


@pytest.fixture(scope="module")
def expected(model: Checkpoint) -> Mapping[int, list[int]]:
    """What one engine says alone."""
    engine = engine_of(model, **SETTINGS)
    requests = [request_of(str(n), prompt, max_tokens=NUM_TOKENS) for n, prompt in PROMPTS.items()]
    served = serve(engine, requests)
    engine.close()
    return {n: served[str(n)].tokens for n in PROMPTS}


class Pair:
    """One prefill engine, and two decode engines that differ in what they do without KV."""

    def __init__(self, cluster: Any, meshes: Any) -> None:
        self.url = cluster.url
        (self.prefill,) = cluster.prefill
        self.decode = {engine.policy: engine for engine in cluster.decode}
        self.meshes = meshes
        self._threads = ThreadPoolExecutor(4)

    def offer(self, num_tokens: int) -> Json:
        """Have a prompt computed for a decode engine."""
        response = complete(
            self.prefill.url, num_tokens, max_tokens=1, kv_transfer_params=TO_DECODE
        )
        return response.raise_for_status().json()["kv_transfer_params"]

    def ask(self, policy: str, num_tokens: int, offer: Json) -> "Future[httpx.Response]":
        """Have a decode engine go on with a prompt."""
        url = self.decode[policy].url
        return self._threads.submit(complete, url, num_tokens, kv_transfer_params=offer)

    def check_serves(self, expected: Mapping[int, list[int]]) -> None:
        for policy in self.decode:
            for num_tokens in PROMPTS:
                response = self.ask(policy, num_tokens, self.offer(num_tokens)).result()
                assert tokens_of(response) == expected[num_tokens]
        self.check_idle()

    def check_idle(self) -> None:
        """Sooner or later nobody holds anything."""
        for engine in (self.prefill, *self.decode.values()):
            wait_until(lambda engine=engine: not held_by(engine))

    def restart(self, engine: Any, mesh: str) -> None:
        engine.start(self.meshes.read(mesh))
        engine.wait_until_ready()

    def close(self) -> None:
        self._threads.shutdown()


@pytest.fixture(scope="module")
def pair(model: Checkpoint, patched: pytest.MonkeyPatch) -> Iterator[Pair]:
    pd = importlib.import_module("pd_processes")

    def role(name: str, kv_role: str, policy: str) -> Any:
        transfer = {**BRIEF, "kv_role": kv_role, "kv_load_failure_policy": policy}
        transfer["pipelined_sends"] = True  # to those that ask for it
        return pd.EngineRole(name, str(model.path), SETTINGS, transfer)

    with pd.running_cluster(
        [role("prefill", "kv_producer", "fail")],
        [role(policy, "kv_consumer", policy) for policy in ("recompute", "fail")],
        [pd.Mesh.read(text) for text in ("2/1", "3/3", "2/1")],
    ) as cluster:
        pair = Pair(cluster, pd.Mesh)
        yield pair
        pair.close()


def complete(url: str, num_tokens: int, **changes: Any) -> httpx.Response:
    """One greedy completion in one piece."""
    body = {
        "prompt": PROMPTS[num_tokens],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
        **changes,
    }
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)


def tokens_of(response: httpx.Response) -> list[int]:
    (choice,) = response.raise_for_status().json()["choices"]
    assert choice["finish_reason"] == "length"
    return choice["token_ids"]


def stats_of(engine: Any) -> Json:
    return httpx.get(f"{engine.url}/stats", timeout=PATIENCE).raise_for_status().json()


def held_by(engine: Any) -> Json:
    """Everything that an engine without requests has not."""
    stats = stats_of(engine)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage")
    held = {name: stats[name] for name in names} | {"leases": stats["kv_transfer"]["num_leases"]}
    return {name: value for name, value in held.items() if value}


def wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.05)


def check_without_kv(answers: Mapping[str, "Future[httpx.Response]"], tokens: list[int]) -> None:
    """The prompt is computed again, or the request ends with an error, as configured."""
    assert tokens_of(answers["recompute"].result()) == tokens
    failed = answers["fail"].result()
    assert failed.status_code == 500
    error = failed.json()["error"]
    assert (error["type"], error["code"]) == ("internal_server_error", "sequence_failed")
    assert error["message"]


def test_chaos(model: Checkpoint, patched: pytest.MonkeyPatch):
    """Before the other tests: it has engines of its own, and those are not there yet."""
    run = subprocess.run(
        [
            *(sys.executable, ROOT / "scripts" / "chaos_pd.py", "--model", str(model.path)),
            *("--seconds", "30", "--seed", "3", "--fault-seconds", "8", "--clients", "4"),
            *("--prefill-meshes", "2/1", "4/2", "--decode-meshes", "3/3", "2/1"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["wrong"] == [], run.stderr
    assert (result["passed"], run.returncode) == (True, 0)
    assert result["answers"]["whole"] > 0
    assert any("kill" in name for name in result["done"])


def test_the_pair_gives_the_tokens_of_one_engine(pair: Pair, expected: Mapping[int, list[int]]):
    pair.check_serves(expected)
    for num_tokens in PROMPTS:
        assert tokens_of(complete(pair.url, num_tokens)) == expected[num_tokens]
    pair.check_idle()
    moved = {policy: stats_of(engine)["kv_transfer"] for policy, engine in pair.decode.items()}
    assert all(stats["num_bytes"] and not stats["num_failed"] for stats in moved.values())


def test_a_router_may_ask_both_at_once(pair: Pair, expected: Mapping[int, list[int]]):
    """The decode engine is asked while the prompt is still computed."""
    forget_prefixes(pair.decode.values())
    decode = pair.decode["fail"]
    with live_router([pair.prefill.url], [decode.url], pipelined_prefill=True) as live:
        for num_tokens in PROMPTS:
            assert tokens_of(complete(live.url, num_tokens)) == expected[num_tokens]
        assert live.count("repeated_prefills_total") == 0 == live.count("fallbacks_total")
    pair.check_idle()


def test_a_producer_that_is_killed_before_its_kv_is_read(
    pair: Pair, expected: Mapping[int, list[int]]
):
    """It is another engine when it is back, at the same address, and has no KV of the first."""
    before = {policy: [pair.offer(97), pair.offer(50)] for policy in pair.decode}
    forget_prefixes(pair.decode.values())  # nothing is asked of a source that is not needed
    pair.prefill.kill()
    answers = {policy: pair.ask(policy, 97, offers[0]) for policy, offers in before.items()}
    check_without_kv(answers, expected[97])
    pair.restart(pair.prefill, "4/2")
    answers = {policy: pair.ask(policy, 50, offers[1]) for policy, offers in before.items()}
    check_without_kv(answers, expected[50])
    old, new = before["fail"][0], pair.offer(97)
    assert (old["remote_host"], old["remote_port"]) == (new["remote_host"], new["remote_port"])
    assert old["remote_engine_id"] != new["remote_engine_id"]
    pair.check_serves(expected)


def test_a_producer_that_is_killed_while_it_is_waited_for(
    pair: Pair, expected: Mapping[int, list[int]]
):
    offers = {policy: pair.offer(97) for policy in pair.decode}
    forget_prefixes(pair.decode.values())
    pair.prefill.freeze()
    answers = {policy: pair.ask(policy, 97, offer) for policy, offer in offers.items()}
    for policy, engine in pair.decode.items():
        wait_until(
            lambda engine=engine, policy=policy: (
                answers[policy].done() or stats_of(engine)["num_requests_running"]
            )
        )
    pair.prefill.kill()
    check_without_kv(answers, expected[97])
    pair.restart(pair.prefill, "2/1")
    pair.check_serves(expected)


def test_pages_of_a_killed_consumer_come_back(pair: Pair, expected: Mapping[int, list[int]]):
    """And it may come back as another shape, of which the producer need not be told."""
    offers = [pair.offer(97) for _ in range(3)]  # one more than it computes at a time
    consumer = pair.decode["fail"]
    forget_prefixes([consumer])
    pair.prefill.freeze()
    answers = [pair.ask("fail", 97, offer) for offer in offers]
    wait_until(lambda: stats_of(consumer)["num_requests_waiting"] == 1)
    consumer.kill()
    for answer in answers:
        with pytest.raises(httpx.TransportError):
            answer.result()
    pair.prefill.thaw()
    wait_until(lambda: not held_by(pair.prefill))
    pair.restart(consumer, "3/3")
    assert pair.offer(8)["remote_engine_id"] == offers[0]["remote_engine_id"]
    pair.check_serves(expected)


def forget_prefixes(engines: Sequence[Any]) -> None:
    for engine in engines:
        httpx.post(f"{engine.url}/reset_prefix_cache", timeout=PATIENCE).raise_for_status()
