"""A prefill engine of several real processes, and a decode engine that reads from each of them."""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from dcpjax.engine.kv_local import LocalKV
from dcpjax.engine.request import FinishReason
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.engine.drafting_glm import SHAPE
from tests.engine.pair import Node, decode_request, node, skip_without, transfer
from tests.engine.processes import PATIENCE, EngineProcess, free_port, running
from tests.engine.serving import engine_of, request_of, serve
from tests.engine.test_pcp_handoff import least_bytes
from tests.golden.tiny import random_tokens, write_tiny_model
from tests.golden.tiny_glm import write_tiny_glm

SERVE = (sys.executable, "-c", "from dcpjax.cli import main; main()", "serve")
PAGE, TOKENS, VOCABULARY = 4, 8, 61
PROMPTS = {n: random_tokens(f"processes {n}", n, VOCABULARY) for n in (1, 2, 9, 16, 65)}
LONG = 65
SMALL: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
    "max_model_len": 96,
    "block_size": PAGE,
    "num_pages": 60,
}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
DCP_2 = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
SOURCES: dict[str, dict[str, Any]] = {
    "split": {"prefill_context_parallel_size": 2, "prefill_kv": "layer_split"},
    "tp": {"tensor_parallel_size": 2},
    "tp 2, split 2": {
        "tensor_parallel_size": 2,
        "prefill_context_parallel_size": 2,
        "prefill_kv": "layer_split",
    },
    "sharded": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
    "replicated": {"prefill_context_parallel_size": 2},
    "dcp": DCP_2,
    "dcp in Neuron's order": {
        "tensor_parallel_size": 4,
        "decode_context_parallel_size": 2,
        "apply_prefill_dcp": True,
    },
}
TARGETS: dict[str, dict[str, Any]] = {"dcp 2": DCP_2, "alone": {}}
BRIEF = {"kv_lease_duration": 2.0, "kv_lease_extension": 1.5, "transfer_timeout": 5.0}
Json = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def nixl() -> None:
    skip_without("NixlConnector")


@pytest.fixture(scope="module")
def cache(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    return Path(pytestconfig.cache.mkdir("jax"))


@dataclass
class Models:
    """Written when they are asked for, and what one engine says alone to all prompts."""

    folder: Path
    opened: dict[str, Checkpoint] = field(default_factory=dict)
    said: dict[str, Mapping[int, list[int]]] = field(default_factory=dict)

    def model(self, name: str) -> Checkpoint:
        if name not in self.opened:
            folder = self.folder / name
            if name == "glm":
                write_tiny_glm(folder, "periodic", **SHAPE)
            else:
                write_tiny_model(folder, name, num_hidden_layers=3)
            self.opened[name] = open_checkpoint(str(folder))
        return self.opened[name]

    def expected(self, name: str) -> Mapping[int, list[int]]:
        if name not in self.said:
            engine = engine_of(self.model(name), **SMALL)
            requests = [
                request_of(f"{n}", prompt, max_tokens=TOKENS, ignore_eos=True)
                for n, prompt in PROMPTS.items()
            ]
            served = serve(engine, requests)
            engine.close()
            self.said[name] = {n: served[f"{n}"].tokens for n in PROMPTS}
        return self.said[name]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@dataclass
class Producer:
    """A prefill engine: its processes, the leader first, and where it serves."""

    processes: Sequence[EngineProcess]
    url: str

    def offer(self, length: int) -> Json:
        """Have a prompt computed for another engine."""
        answer = httpx.post(self.url, json=self._body(length), timeout=PATIENCE)
        return answer.raise_for_status().json()["kv_transfer_params"]

    @contextlib.contextmanager
    def early_offer(self, length: int) -> Iterator[Json]:
        """Have a prompt begun for another engine; at the end it is computed."""
        body = self._body(length, early_offer=True) | {"stream": True}
        with httpx.stream("POST", self.url, json=body, timeout=PATIENCE) as answer:
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
            yield json.loads(next(lines))["kv_transfer_params"]
            for _ in lines:
                pass

    def _body(self, length: int, **params: Any) -> Json:
        wanted = {"do_remote_decode": True, "do_remote_prefill": False, **params}
        return {"prompt": PROMPTS[length], "max_tokens": 1, "kv_transfer_params": wanted}


@contextlib.contextmanager
def producing(
    model: Checkpoint, settings: Mapping[str, Any], cache: Path, nnodes: int = 2, **config: Any
) -> Iterator[Producer]:
    """The same command for each process, but for the node rank."""
    shared = {**SMALL, **settings, **transfer("kv_producer", "NixlConnector", **BRIEF, **config)}
    shared |= {"nnodes": nnodes, "master-port": free_port(), "port": 0}
    own_options = {"apply_prefill_dcp"}  # of no option of its own
    additional = {name: shared.pop(name) for name in own_options & shared.keys()}
    words = [f"--{name.replace('_', '-')}={_word(value)}" for name, value in shared.items()]
    command = [*SERVE, str(model.path), "--skip-tokenizer-init", *words]
    command += [f"--additional-config={json.dumps(additional)}"] if additional else []
    commands = [[*command, f"--node-rank={rank}"] for rank in range(nnodes)]
    with running(commands, cache) as processes:
        words = processes[0].hear_line("ready: ").split()
        url = next(word for word in words if word.startswith("http"))
        yield Producer(processes, f"{url}/completions")


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def consuming(model: Checkpoint, settings: Mapping[str, Any], policy: str = "fail") -> Any:
    config = transfer("kv_consumer", "NixlConnector", kv_load_failure_policy=policy)
    return node(model, **SMALL, **settings, **config)


def go_on(consumer: Node, length: int, offer: Mapping[str, Any]) -> list[int]:
    """What the consumer says, which has nothing of the prompt yet."""
    consumer.engine.reset_prefix_cache()
    request = decode_request(PROMPTS[length], offer, max_tokens=TOKENS, ignore_eos=True)
    consumer.engine.add(request)
    consumer.run(request.request_id)
    served = consumer.served[request.request_id]
    assert served.finish_reason is FinishReason.LENGTH, consumer.errors
    return served.tokens


def check_bytes(consumer: Node, length: int) -> None:
    """What is wanted, once."""
    last = consumer.engine.stats()["kv_transfer"]["last_transfer"]
    least = least_bytes(consumer, range(length - 1))
    assert last["parts"] == least
    assert last["num_bytes"] == np.sum(last["bytes"]) == sum(least.values())
    assert (np.sum(last["bytes"], axis=1) > 0).all(), "every rank sends something"


def check_tokens(consumer: Node, producer: Producer, expected: Mapping[int, list[int]]) -> None:
    for length in PROMPTS:
        assert go_on(consumer, length, producer.offer(length)) == expected[length]
        if length == LONG:
            check_bytes(consumer, length)
    assert consumer.engine.stats()["kv_transfer"]["num_failed"] == 0
    consumer.drain()


def check_early(consumer: Node, producer: Producer, expected: Mapping[int, list[int]]) -> None:
    """Chunks move while later ones are computed, if the consumer is quick enough."""
    with producer.early_offer(LONG) as offer:
        assert go_on(consumer, LONG, offer) == expected[LONG]
    consumer.drain()


def with_drafts(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**settings, **(MTP if model == "glm" else {})}


@pytest.mark.parametrize("name", ["gqa", pytest.param("glm", marks=pytest.mark.matrix)])
def test_layers_of_two_processes_until_one_is_killed(
    models: Models, cache: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    """To pages on two ranks; then one is gone that a consumer has been promised to read from."""
    model, expected = models.model(name), models.expected(name)
    source = with_drafts(name, SOURCES["split"])
    with (
        producing(model, source, cache, pipelined_sends=True) as producer,
        consuming(model, with_drafts(name, DCP_2), "recompute") as consumer,
    ):
        check_tokens(consumer, producer, expected)
        check_early(consumer, producer, expected)
        leader, follower = producer.processes
        pull = LocalKV.pull

        def pulling(local: LocalKV, *arguments: Any) -> None:
            follower.send(signal.SIGKILL)
            follower.end()
            pull(local, *arguments)

        offer = producer.offer(LONG)
        monkeypatch.setattr(LocalKV, "pull", pulling)
        assert go_on(consumer, LONG, offer) == expected[LONG]
        assert consumer.engine.stats()["kv_transfer"]["num_failed"] == 1
        consumer.drain()
        assert leader.end() == 1
        assert "node rank 1" in leader.errors and "gone" in leader.errors


@pytest.mark.matrix
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("model", "source", "nnodes"),
    [
        ("gqa", "tp", 2),
        ("gqa", "tp 2, split 2", 2),
        ("gqa", "tp 2, split 2", 4),
        ("gqa", "sharded", 2),
        ("gqa", "replicated", 2),
        ("gqa", "dcp", 2),
        ("gqa", "dcp in Neuron's order", 2),
        ("glm", "tp", 2),
        ("glm", "sharded", 2),
    ],
)
def test_a_prompt_of_several_processes_goes_on(
    models: Models, cache: Path, model: str, source: str, nnodes: int, target: str
):
    found, expected = models.model(model), models.expected(model)
    settings = with_drafts(model, SOURCES[source])
    with (
        producing(found, settings, cache, nnodes, pipelined_sends=True) as producer,
        consuming(found, with_drafts(model, TARGETS[target])) as consumer,
    ):
        check_tokens(consumer, producer, expected)
        check_early(consumer, producer, expected)
        producer.processes[0].send(signal.SIGTERM)
        assert [process.end() for process in producer.processes] == [0] * nnodes


@pytest.mark.matrix
@pytest.mark.parametrize("model", ["gqa", "glm"])
def test_pages_pass_through_the_host_of_each_process(models: Models, cache: Path, model: str):
    found, expected = models.model(model), models.expected(model)
    source = with_drafts(model, SOURCES["split"])
    with (
        producing(found, source, cache, kv_buffer_device="cpu") as producer,
        consuming(found, with_drafts(model, DCP_2)) as consumer,
    ):
        check_tokens(consumer, producer, expected)


# How it ends


@pytest.mark.matrix
@pytest.mark.parametrize("ended", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_ends_costs_its_prompts_only(
    models: Models, cache: Path, ended: int, number: signal.Signals
):
    """The consumer says so within its deadlines, and its pages come back."""
    model, expected = models.model("gqa"), models.expected("gqa")
    with consuming(model, DCP_2) as consumer:
        with producing(model, SOURCES["split"], cache) as producer:
            offers = [producer.offer(LONG), producer.offer(16)]
            producer.processes[ended].send(number)
            if number == signal.SIGSTOP:  # it is noticed, and the others end
                assert producer.processes[1 - ended].end() == 1
            consumer.engine.reset_prefix_cache()
            requests = [
                decode_request(PROMPTS[length], offer, max_tokens=TOKENS)
                for length, offer in zip((LONG, 16), offers, strict=True)
            ]
            for request in requests:
                consumer.engine.add(request)
            consumer.run(*(request.request_id for request in requests))
            assert consumer.errors.keys() == {request.request_id for request in requests}
            assert not any(consumer.served[name].tokens for name in consumer.errors)
            consumer.drain()
        with producing(model, SOURCES["tp"], cache) as producer:
            check_served(consumer, producer, expected)


def check_served(consumer: Node, producer: Producer, expected: Mapping[int, list[int]]) -> None:
    assert go_on(consumer, LONG, producer.offer(LONG)) == expected[LONG]
    consumer.drain()


@pytest.mark.matrix
def test_a_process_that_is_killed_while_a_consumer_waits_for_the_rest(models: Models, cache: Path):
    """A prompt that was told of early is never finished."""
    model, expected = models.model("gqa"), models.expected("gqa")
    with (
        producing(model, SOURCES["split"], cache, pipelined_sends=True) as producer,
        consuming(model, DCP_2, "recompute") as consumer,
    ):
        with contextlib.suppress(httpx.TransportError), producer.early_offer(LONG) as offer:
            producer.processes[1].send(signal.SIGKILL)
            assert go_on(consumer, LONG, offer) == expected[LONG]
        assert consumer.engine.stats()["kv_transfer"]["num_failed"] == 1
        consumer.drain()
        assert producer.processes[0].end() == 1
