"""One engine as several real processes: its tokens, and how it ends when one does not go on.

Collectives between processes are slow on CPUs, so the models are tiny and the answers short.
"""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dcpjax.engine.request import Request
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.engine.drafting_glm import SHAPE
from tests.engine.processes import EngineProcess, running_engine
from tests.engine.serving import SMALL, engine_of, request_of, serve
from tests.golden.tiny import random_tokens, write_random_model, write_tiny_model
from tests.golden.tiny_glm import write_tiny_glm

DCP_2 = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
VOCABULARY = 61  # of the smaller model
PROMPTS = {n: random_tokens(f"processes {n}", n, VOCABULARY) for n in (1, 8, 41, 100)}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 5, "top_p": 0.9},
    "penalties": {"temperature": 0.5, "seed": 6, "repetition_penalty": 1.3, "logprobs": 2},
}
NUM_TOKENS = 10
BUSY = {"calls": [[[PROMPTS[41], {"max_tokens": 100, "temperature": 0.0}]]], "repeats": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = write_tiny_model(tmp_path_factory.mktemp("processes") / "gqa", "gqa")
    return open_checkpoint(str(folder))


@pytest.fixture(scope="module")
def cache(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    return Path(pytestconfig.cache.mkdir("jax"))


def calls() -> list[list[list[Any]]]:
    """For each kind of sampling one call with all prompts, more than run at once."""
    return [
        [[prompt, {**params, "max_tokens": NUM_TOKENS, "ignore_eos": True}]
         for prompt in PROMPTS.values()]
        for params in PARAMS.values()
    ]  # fmt: skip


def alone(model: Checkpoint, **settings: Any) -> list[list[list[int]]]:
    """The tokens of one process with one device."""
    engine = engine_of(model, **settings)
    found = []
    for number, call in enumerate(calls()):
        requests: list[Request] = [
            request_of(f"{number} {place}", prompt, **params)
            for place, (prompt, params) in enumerate(call)
        ]
        served = serve(engine, requests)
        found.append([served[request.request_id].tokens for request in requests])
    engine.close()
    return found


def check_tokens(
    model: Checkpoint, cache: Path, settings: Mapping[str, Any], nnodes: int = 2
) -> None:
    """Several processes say what one says."""
    lead = {0: {"calls": calls()}}
    with running_engine(
        model.path, SMALL | settings, nnodes=nnodes, cache=cache, specs=lead
    ) as processes:
        said = processes[0].hear("tokens")
        assert said["tokens"] == alone(model)
        stats = said["stats"]
        assert stats["num_processes"] == nnodes and stats["compilations_after_warmup"] == 0
        assert [process.end() for process in processes] == [0] * nnodes


def test_two_processes_say_what_one_says(model: Checkpoint, cache: Path):
    """Greedy and sampled; and the leader ends when the follower is killed."""
    busy = {"calls": [*calls(), *BUSY["calls"]], "repeats": True}
    with running_engine(model.path, SMALL | DCP_2, cache=cache, specs={0: busy}) as processes:
        leader, follower = processes
        found = [leader.hear("served")["tokens"] for _ in calls()]
        assert found == alone(model)
        leader.hear("served")
        follower.send(signal.SIGKILL)
        check_ends(leader, 1, "gone")


@pytest.mark.matrix
@pytest.mark.parametrize("nnodes", [2, 4])
def test_four_ranks_in_several_processes(model: Checkpoint, cache: Path, nnodes: int):
    settings = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}
    check_tokens(model, cache, settings, nnodes)


@pytest.mark.parametrize(
    "residency",
    [
        "layer_split",
        *(pytest.param(x, marks=pytest.mark.matrix) for x in ("replicated", "sharded")),
    ],
)
def test_each_process_computes_its_chunks_of_a_prompt(model: Checkpoint, cache: Path, residency):
    """PCP ranks in different processes, whatever they keep."""
    settings = {"prefill_context_parallel_size": 2, "prefill_kv": residency}
    if residency == "sharded":
        settings["decode_context_parallel_size"] = 2
    check_tokens(model, cache, settings)


@pytest.mark.matrix
@pytest.mark.parametrize("exchange", ["ag_rs", "a2a"])
def test_n_grams_are_verified_on_all_processes(model: Checkpoint, cache: Path, exchange: str):
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    check_tokens(model, cache, DCP_2 | {"speculative_config": ngram, "dcp_comm_backend": exchange})


@pytest.mark.matrix
def test_drafts_on_the_devices_of_all_processes(cache: Path, tmp_path: Path):
    """A sparse model with a latent cache, whose draft layer goes on from the sampled tokens."""
    model = open_checkpoint(str(write_tiny_glm(tmp_path / "glm", "periodic", **SHAPE)))
    mtp = {"method": "mtp", "num_speculative_tokens": 2}
    check_tokens(model, cache, DCP_2 | {"speculative_config": mtp})


# How it ends


def check_ends(process: EngineProcess, rank: int, *reasons: str) -> None:
    """The process says that the engine ended because of another one, or itself, and leaves."""
    message = process.hear("message")["message"]
    assert f"node rank {rank}" in message, message
    assert all(reason in message for reason in reasons), message
    assert process.end() == 1


@pytest.mark.matrix
def test_a_leader_that_is_killed_ends_the_engine(model: Checkpoint, cache: Path):
    with running_engine(model.path, SMALL | DCP_2, cache=cache, specs={0: BUSY}) as processes:
        leader, follower = processes
        leader.hear("served")
        leader.send(signal.SIGKILL)
        check_ends(follower, 0, "gone")


@pytest.mark.matrix
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_is_stopped_ends_the_engine(model: Checkpoint, cache: Path, stopped: int):
    with running_engine(model.path, SMALL | DCP_2, cache=cache, specs={0: BUSY}) as processes:
        processes[0].hear("served")
        processes[stopped].send(signal.SIGSTOP)
        check_ends(processes[1 - stopped], stopped, "gone")


@pytest.mark.matrix
def test_a_follower_that_fails_ends_the_engine(model: Checkpoint, cache: Path):
    specs = {0: BUSY, 1: {"raises_at": 20}}
    with running_engine(model.path, SMALL | DCP_2, cache=cache, specs=specs) as processes:
        for process in processes:
            check_ends(process, 1, "ZeroDivisionError", "as the test wants it")


@pytest.mark.matrix
def test_a_leader_that_fails_ends_the_engine(model: Checkpoint, cache: Path):
    specs = {0: BUSY | {"raises_at": 20}}
    with running_engine(model.path, SMALL | DCP_2, cache=cache, specs=specs) as processes:
        for process in processes:
            check_ends(process, 0, "ZeroDivisionError", "as the test wants it")


# How it does not start

COMPILING = {0: {"calls": [], "warm_up": "waits"}, 1: {"warm_up": "waits"}}


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_a_process_that_is_killed_while_they_compile(model: Checkpoint, cache: Path, killed: int):
    """JAX's own service, which still runs, would end the other one with a stack and SIGABRT."""
    with running_engine(model.path, SMALL | DCP_2, cache=cache, specs=COMPILING) as processes:
        for process in processes:
            process.hear("warming")
        processes[killed].send(signal.SIGKILL)
        left = processes[1 - killed]
        check_ends(left, killed, "gone")
        assert left.errors == ""


@pytest.mark.parametrize("failing", [1, pytest.param(0, marks=pytest.mark.matrix)])
def test_a_process_that_fails_while_others_compile(model: Checkpoint, cache: Path, failing: int):
    specs = {**COMPILING, failing: COMPILING[failing] | {"warm_up": "raises"}}
    with running_engine(model.path, SMALL | DCP_2, cache=cache, specs=specs) as processes:
        for process in processes:
            check_ends(process, failing, "ZeroDivisionError", "as the test wants it")
        assert processes[1 - failing].errors == ""


def test_different_settings_are_refused_on_all_processes(model: Checkpoint, cache: Path):
    specs = {1: {"settings": {"block_size": 16, "seed": 1}}}
    refused = refusals(model, cache, specs)
    assert "same settings" in refused
    assert "block_size is 8 on node 0, 16 on node 1;" in refused
    assert "seed is 0 on node 0, 1 on node 1" in refused


def test_a_node_rank_that_is_there_twice_is_refused(model: Checkpoint, cache: Path):
    refused = refusals(model, cache, {2: {"settings": {"node_rank": 1}}}, nnodes=3)
    assert "node_rank of its own" in refused and "[0, 1, 1]" in refused


def test_different_weights_are_refused(model: Checkpoint, cache: Path, tmp_path: Path):
    other = write_random_model(
        tmp_path / "other", "other", json.loads((model.path / "config.json").read_text())
    )
    assert "weights is " in refusals(model, cache, {1: {"model": str(other)}})


def refusals(model: Checkpoint, cache: Path, specs: Mapping[int, Any], nnodes: int = 2) -> str:
    """Why no process started; all say the same."""
    ranks = {"tensor_parallel_size": nnodes, "decode_context_parallel_size": nnodes}
    specs = {0: {"calls": []}, **specs}
    with running_engine(
        model.path, SMALL | ranks, nnodes=nnodes, cache=cache, specs=specs
    ) as processes:
        found = {process.hear("message")["message"] for process in processes}
        assert [process.end() for process in processes] == [1] * nnodes
    (message,) = found
    return message
