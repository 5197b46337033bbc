"""The parts of the chaos script: what it asks, how it judges, what it sends to side channels."""

import importlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcpjax.transfer.messages import Abort, Aborted, HeartbeatReply, Released, Welcome
from dcpjax.transfer.side_channel import SideChannelServer
from dcpjax.transfer.side_channel_client import PeerGoneError, SideChannelClient

ROOT = Path(__file__).resolve().parent.parent.parent
ERROR = {"message": "gone", "type": "service_unavailable_error", "param": None, "code": None}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module


@pytest.fixture
def asked(load: Callable[[str], Any]) -> Any:
    return load("chaos_requests")


@pytest.fixture
def visit(asked: Any) -> Any:
    return asked.Visit(asked.Case((1, 2), (7, 8, 9)))


def whole(asked: Any, **changes: Any) -> Any:
    answer = asked.Answer(
        status=200, token_ids=[7, 8, 9], finish_reason="length", is_done=True, error=None
    )
    return replace(answer, **changes)


def test_right_answers_and_proper_errors_pass(asked: Any, visit: Any):
    right = [
        whole(asked),
        whole(asked, token_ids=[7], finish_reason=None, is_done=False, has_left=True),
        whole(asked, token_ids=[7, 8], finish_reason=None, error=ERROR),
        whole(asked, token_ids=[7, 8], finish_reason=None, is_done=False, broken="ReadError"),
        asked.Answer(status=503, error=ERROR),
        asked.Answer(status=500, error=ERROR),
        asked.Answer(broken="ConnectError"),
        asked.Answer(has_left=True),
    ]
    assert [asked.judge(visit, answer) for answer in right] == [[]] * len(right)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [7, 8, 1]},
        {"token_ids": [7, 8]},
        {"token_ids": [7, 8, 9, 9]},
        {"token_ids": []},
        {"finish_reason": "abort"},
        {"finish_reason": "error"},
        {"finish_reason": None},
        {"is_done": False},
        {"broken": "ReadTimeout", "is_late": True},
        {"token_ids": [1], "finish_reason": None, "is_done": False, "has_left": True},
        {"token_ids": [1], "finish_reason": None, "error": ERROR},
        {"token_ids": [7], "finish_reason": None, "error": "gone"},
        {"token_ids": [7], "finish_reason": None, "error": {"message": "gone"}},
        {"token_ids": [7], "finish_reason": None, "error": {**ERROR, "message": ""}},
        {"token_ids": [7], "finish_reason": None, "error": ERROR, "is_done": False},
        {"token_ids": [], "finish_reason": None, "error": ERROR, "status": 400},
    ],
    ids=str,
)
def test_every_wrong_answer_is_found(asked: Any, visit: Any, changes: dict[str, Any]):
    assert asked.judge(visit, whole(asked, **changes))


def test_visits_are_seeded_and_of_every_kind(asked: Any):
    cases = [asked.Case((1,), (2, 3, 4)), asked.Case((1, 5), (6,))]

    def visits() -> list[Any]:
        choose = random.Random(3)
        return [asked.make_visit(choose, cases) for _ in range(300)]

    made = visits()
    assert made == visits()
    assert {visit.way for visit in made} == set(asked.Way)
    assert {visit.stream for visit in made} == {True, False}
    assert any(visit.salt for visit in made) and not all(visit.salt for visit in made)
    assert any(visit.leaves_after_tokens == 0 for visit in made)
    assert any(visit.leaves_after_seconds for visit in made)


def test_a_lie_is_never_the_truth(asked: Any):
    offer = {
        "remote_engine_id": "engine",
        "remote_request_id": "request",
        "remote_port": 5000,
        "remote_block_ids": [4, 7],
    }
    choose = random.Random(0)
    lies = [asked.make_lie(choose, offer) for _ in range(100)]
    assert all(lie != offer for lie in lies)
    assert {key for lie in lies for key in offer if lie[key] != offer[key]} == offer.keys()


def test_prompts_share_beginnings(asked: Any):
    prompts = asked.make_prompts(random.Random(1), 131, count=60, max_prompt=80)
    assert all(0 < len(prompt) <= 80 for prompt in prompts)
    assert all(0 <= token < 131 for prompt in prompts for token in prompt)
    longest = [tuple(prompt[:40]) for prompt in prompts if len(prompt) > 40]
    assert len(set(longest)) < len(longest)


# Which errors a fault excuses


@pytest.fixture
def tally(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    clients = load("chaos_clients")
    monkeypatch.setattr(clients, "AFTERMATH_SECONDS", 5.0)
    return clients.Tally(outages=[clients.Outage(100.0, 110.0)])


@pytest.mark.parametrize(
    ("start", "end", "is_excused"),
    [
        (90.0, 99.0, False),
        (90.0, 100.0, True),
        (101.0, 102.0, True),
        (90.0, 200.0, True),
        (115.0, 120.0, True),
        (115.1, 120.0, False),
    ],
)
def test_an_error_is_excused_near_a_fault(tally: Any, start: float, end: float, is_excused: bool):
    assert tally.may_fail(start, end) is is_excused


@pytest.mark.parametrize(
    ("way", "answer", "num_wrong"),
    [
        ("ROUTED", {"status": 503, "error": ERROR}, 1),
        ("UNCLAIMED", {"status": 503, "error": ERROR}, 1),
        ("TWICE", {"status": 500, "error": ERROR}, 0),
        ("LYING", {"status": 500, "error": ERROR}, 0),
        ("ROUTED", {"broken": "ReadError"}, 1),
        ("TWICE", {"broken": "ReadError"}, 1),
    ],
)
def test_without_a_fault_only_who_is_wrong_gets_errors(
    asked: Any, visit: Any, tally: Any, way: str, answer: dict[str, Any], num_wrong: int
):
    tally.outages.clear()
    tally.count(replace(visit, way=asked.Way[way]), asked.Answer(**answer), start=0.0)
    assert tally.num_wrong == len(tally.wrong) == num_wrong


# What side channels get


class Producer:
    """Answers everything, and remembers nothing."""

    def hello(self, call: Any) -> Welcome:
        return Welcome(connector_version=1, compatibility="0" * 64, factors={}, metadata=b"")

    def push(self, call: Any) -> Any:
        raise AssertionError("nobody has said Hello")

    def landed(self, call: Any) -> Released:
        return Released(ok=False)

    def heartbeat(self, call: Any) -> HeartbeatReply:
        return HeartbeatReply(request_ids=())

    def abort(self, call: Any) -> Aborted:
        return Aborted()


def test_nonsense_of_every_kind_is_survived(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
):
    frames = load("chaos_frames")
    monkeypatch.setattr(frames, "_SECONDS", 0.2)
    server = SideChannelServer(Producer(), engine_id="producer")
    client = SideChannelClient(server.address)
    try:
        for send in frames.KINDS.values():
            for seed in range(4):
                send(random.Random(seed), "127.0.0.1", server.port)
            with pytest.raises(PeerGoneError):
                client.abort(
                    Abort(engine_id="another", target_engine_id="d", request_id="r"), timeout_s=10
                )
    finally:
        client.close()
        server.close()
    assert frames.send_nonsense(random.Random(0), "127.0.0.1", server.port) in frames.KINDS
