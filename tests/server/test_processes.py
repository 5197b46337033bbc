"""A server whose engine is two real processes, and what clients hear when one of them is killed."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.engine.processes import PATIENCE, EngineProcess, free_port, running
from tests.engine.serving import SMALL, engine_of, request_of, serve
from tests.golden.tiny import random_tokens, write_tiny_model

PROMPT = random_tokens("served by processes", 20)
SERVE = (sys.executable, "-c", "from dcpjax.cli import main; main()", "serve")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = write_tiny_model(tmp_path_factory.mktemp("served") / "gqa", "gqa")
    return open_checkpoint(str(folder))


@pytest.fixture
def processes(model: Checkpoint, pytestconfig: pytest.Config) -> Iterator[list[EngineProcess]]:
    """The same command twice, but for the node rank."""
    assert pytestconfig.cache is not None
    settings = {**SMALL, "tensor-parallel-size": 2, "decode-context-parallel-size": 2}
    settings |= {"nnodes": 2, "master-port": free_port(), "port": 0}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [*SERVE, str(model.path), "--skip-tokenizer-init", *words]
    cache = Path(pytestconfig.cache.mkdir("jax"))
    with running([[*command, f"--node-rank={rank}"] for rank in (0, 1)], cache) as both:
        yield both


def url_of(leader: EngineProcess) -> str:
    """Where it serves, once it does."""
    words = leader.hear_line("ready: ").split()
    return next(word for word in words if word.startswith("http"))


def test_a_follower_that_is_killed_ends_streams_and_the_server(
    model: Checkpoint, processes: list[EngineProcess]
):
    leader, follower = processes
    url = f"{url_of(leader)}/completions"
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    engine = engine_of(model)
    expected = serve(engine, [request_of("alone", PROMPT, max_tokens=8)])["alone"].tokens
    engine.close()
    answer = httpx.post(url, json=body, timeout=PATIENCE).raise_for_status().json()
    assert answer["choices"][0]["token_ids"] == expected

    endless = {**body, "stream": True, "max_tokens": 230, "ignore_eos": True}
    with httpx.stream("POST", url, json=endless, timeout=PATIENCE) as response:
        events = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        assert json.loads(next(events))["choices"]
        follower.send(signal.SIGKILL)
        *_, last, done = events
    assert done == "[DONE]"
    message = json.loads(last)["error"]["message"]
    assert "node rank 1" in message and "gone" in message
    assert leader.end() == 1
    assert "node rank 1" in leader.errors and "Traceback" not in leader.errors


@pytest.mark.matrix
def test_a_server_without_requests_hears_of_it_too(processes: list[EngineProcess]):
    leader, follower = processes
    url_of(leader)
    follower.hear_line("ready: ")
    follower.send(signal.SIGKILL)
    assert leader.end() == 1
    assert "node rank 1" in leader.errors


@pytest.mark.matrix
def test_processes_that_are_told_to_leave_together_leave_well(processes: list[EngineProcess]):
    """As a container's runtime tells them: the follower waits for the leader's word."""
    leader, follower = processes
    url_of(leader)
    follower.hear_line("ready: ")
    for process in (follower, leader):
        process.send(signal.SIGTERM)
    assert (leader.end(), follower.end()) == (0, 0)
    assert all("Traceback" not in process.errors for process in processes)
    assert "SIGTERM: waits up to" in follower.errors
