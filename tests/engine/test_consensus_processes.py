"""Real processes that know different things: each try ends on all of them, with one decision."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.processes import ROOT, free_port, running

RANKS = 3
NAMES = (
    "prefixes",
    "nothing",
    "an empty queue",
    "a raising poll",
    "another count",
    "slow",
    "silent",
)
SCRIPT = ROOT / "tests" / "assets" / "consensus_process.py"
AGREED = 2032  # of 2048, 2045 and 2100 tokens, in pages of 16


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By try, what each rank says."""
    ports = ",".join(str(free_port()) for _ in NAMES)
    commands = [
        [sys.executable, str(SCRIPT), str(rank), str(RANKS), ports] for rank in range(RANKS)
    ]
    cache: Path = tmp_path_factory.mktemp("cache")
    with running(commands, cache) as processes:
        found = {name: [process.hear(name)[name] for process in processes] for name in NAMES}
        assert [process.end() for process in processes] == [0] * RANKS
    return found


@pytest.mark.parametrize("name", ["prefixes", "slow"])
def test_the_least_prefix_is_everybodys(outcomes: dict[str, list[Any]], name: str):
    assert outcomes[name] == [{"prefixes": [[7, AGREED]]}] * RANKS


def test_ranks_without_anything_to_say_agree(outcomes: dict[str, list[Any]]):
    assert outcomes["nothing"] == [{"prefixes": []}] * RANKS


def test_an_empty_queue_is_an_error_on_all_ranks(outcomes: dict[str, list[Any]]):
    (message,) = {outcome["message"] for outcome in outcomes["an empty queue"]}
    assert "num_polls_by_rank=[1, 0, 1]" in message


def test_a_raising_poll_is_an_error_on_all_ranks(outcomes: dict[str, list[Any]]):
    kinds = [outcome["error"] for outcome in outcomes["a raising poll"]]
    assert kinds == ["ConsensusError", "ZeroDivisionError", "ConsensusError"]
    assert "is_broken_by_rank=[0, 1, 0]" in outcomes["a raising poll"][0]["message"]


def test_rows_of_another_length_end_it_on_all_ranks(outcomes: dict[str, list[Any]]):
    for outcome in outcomes["another count"]:
        assert "lengths_by_rank=[18, 21, 24]" in outcome["message"]


def test_a_silent_rank_is_not_waited_for(outcomes: dict[str, list[Any]]):
    leader, silent, other = outcomes["silent"]
    assert leader["error"] == "ConsensusError" and "silent_ranks=[1]" in leader["message"]
    assert {"error"} <= silent.keys() and {"error"} <= other.keys()
