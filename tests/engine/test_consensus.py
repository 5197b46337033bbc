"""Ranks that know different things decide the same, or all say why not; none waits for ever."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.engine.consensus import (
    FAILED,
    Consensus,
    Decision,
    Reservations,
    Reserved,
    State,
    Statement,
    key_of,
)
from dcpjax.errors import ConsensusError
from tests.engine.simulated_ranks import PAGE_SIZE, run_ranks

lengths = st.one_of(st.just(FAILED), st.integers(0, 5 * PAGE_SIZE))
claims = st.dictionaries(st.integers(0, 6), lengths, max_size=4)


def say(**values: Any) -> Callable[[Consensus], Decision]:
    """A rank that takes part in one exchange."""
    return lambda consensus: consensus.tick(lambda: Statement(**values))


# What is decided


@given(st.lists(claims, min_size=1, max_size=5), st.data())
def test_all_ranks_decide_the_same_and_the_least_counts(by_rank, data):
    polled = data.draw(st.lists(st.integers(0, 99), unique=True, max_size=4))
    states = [{key: data.draw(st.sampled_from(State)) for key in polled} for _ in by_rank]
    found = run_ranks(
        [say(polls=polls, claims=own) for polls, own in zip(states, by_rank, strict=True)]
    )
    everywhere = sorted(set(by_rank[0]).intersection(*by_rank))
    wanted = Decision(
        states={key: min(polls[key] for polls in states) for key in polled},
        prefixes={
            key: FAILED
            if any(own[key] == FAILED for own in by_rank)
            else min(own[key] for own in by_rank) // PAGE_SIZE * PAGE_SIZE
            for key in everywhere
        },
    )
    assert found == [wanted] * len(by_rank)


def test_prefixes_of_2048_and_2045_tokens_agree_on_whole_pages():
    found = run_ranks([say(claims={7: 2048}), say(claims={7: 2045})])
    assert [decision.prefixes for decision in found] == [{7: 2032}] * 2


def test_a_rank_with_nothing_to_say_takes_part():
    found = run_ranks([say(claims={7: 32}), say(), say(claims={7: 48})])
    assert found == [Decision({}, {})] * 3


def test_claims_beyond_the_capacity_come_later_and_block_nobody():
    """Each rank has a claim first that the other gets last, and more than a row holds."""
    orders = [list(range(9)), list(range(8, -1, -1))]

    def rank(order: Sequence[int]) -> Callable[[Consensus], list[int]]:
        def work(consensus: Consensus) -> list[int]:
            own: dict[int, int] = {}
            settled: list[int] = []
            for tick in range(12):
                own |= {key: 16 for key in order[tick : tick + 1]}
                statement = Statement(claims=own)
                agreed = consensus.tick(lambda statement=statement: statement).prefixes
                settled += agreed
                own = {key: n for key, n in own.items() if key not in agreed}
            return settled

        return work

    first, second = run_ranks([rank(order) for order in orders], capacity=2)
    assert first == second and sorted(first) == list(range(9))


# What is out of step: an error on every rank, with the values of all


def check_refused(found: Sequence[Any], *words: str) -> None:
    """All ranks raise the same, which has ``words``."""
    assert {type(error) for error in found} == {ConsensusError}, found
    (message,) = {str(error) for error in found}
    assert all(word in message for word in words), message


WAITING = State.WAITING
OUT_OF_STEP: dict[str, tuple[list[Mapping[str, Any]], tuple[str, ...]]] = {
    "another count": ([{"polls": {1: WAITING, 2: WAITING}}, {"polls": {1: WAITING}}], ("[2, 1]",)),
    "an empty queue": ([{}, {"polls": {1: WAITING}}, {}], ("num_polls_by_rank=[0, 1, 0]",)),
    "other keys, as many": ([{"polls": {1: WAITING}}, {"polls": {2: WAITING}}], ("polled",)),
    "another order": (
        [{"polls": {1: WAITING, 2: WAITING}}, {"polls": {2: WAITING, 1: WAITING}}],
        ("same order",),
    ),
    "other tokens": ([{"witness": 5}, {"witness": 6}], ("witness_by_rank=[5, 6]",)),
}


@pytest.mark.parametrize("name", OUT_OF_STEP)
def test_what_differs_is_an_error_on_all_ranks(name: str):
    statements, words = OUT_OF_STEP[name]
    check_refused(run_ranks([say(**values) for values in statements]), *words)


def test_a_rank_that_is_a_call_behind_is_seen():
    def ahead(consensus: Consensus) -> Any:
        consensus._calls = 1  # as if the other one had left an exchange out
        return consensus.tick(Statement)

    check_refused(run_ranks([ahead, say(), say()]), "call_by_rank=[2, 1, 1]")


def test_a_rank_that_raises_takes_part_and_the_others_hear_of_it():
    def raises(consensus: Consensus) -> Any:
        return consensus.tick(lambda: Statement(polls={1: State(1 // 0)}))

    broken, *others = run_ranks([raises, say(), say()])
    assert isinstance(broken, ZeroDivisionError)
    check_refused(others, "is_broken_by_rank=[1, 0, 0]")


def test_more_polls_than_a_row_holds_are_an_error_everywhere():
    many = {key: WAITING for key in range(5)}
    first, second = run_ranks([say(polls=many), say(polls=many)], capacity=4)
    assert "polls=5, capacity=4" in str(first) and "polls=5, capacity=4" in str(second)


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever():
    found = run_ranks([say(), say(), lambda consensus: None], seconds=0.2)
    assert {type(error) for error in found[:2]} == {ConsensusError}


def test_there_is_no_tick_after_an_error():
    def twice(consensus: Consensus) -> Any:
        with pytest.raises(ConsensusError, match="same"):
            consensus.tick(lambda: Statement(witness=id(consensus)))
        return consensus.tick(Statement)

    check_refused(run_ranks([twice, twice]), "no further tick")


@given(st.binary(max_size=20), st.binary(max_size=20))
def test_keys_are_numbers_of_62_bits_that_tell_names_apart(one, other):
    assert 0 <= key_of(one) < 2**62
    assert (key_of(one) == key_of(other)) == (one == other)


# From a match to pages


class Holder:
    """A cache that has as much of each request as it is told, and counts what is held."""

    def __init__(self, lengths: Mapping[int, int]) -> None:
        self._lengths = lengths
        self.held: dict[int, int] = {}

    def lock(self, key: int) -> int:
        self.held[key] = self._lengths[key]
        return self._lengths[key]

    def release(self, key: int, tokens: int) -> None:
        assert tokens <= self.held[key], "more is kept than was locked"
        self.held[key] = tokens
        if not tokens:
            del self.held[key]


@given(st.data())
def test_requests_that_come_in_any_order_take_the_same_pages_in_the_same_order(data):
    """Some are given up on one rank before the others have them: then nobody computes them."""
    ranks, keys = data.draw(st.integers(1, 4)), range(data.draw(st.integers(0, 6)))
    lengths = [
        {key: data.draw(st.integers(0, 5 * PAGE_SIZE)) for key in keys} for _ in range(ranks)
    ]
    arrivals = [data.draw(st.permutations(keys)) for _ in range(ranks)]
    given_up = {(data.draw(st.integers(0, ranks - 1)), key) for key in keys if key % 3 == 2}

    def rank(number: int) -> Callable[[Consensus], Any]:
        def work(consensus: Consensus) -> tuple[list[Reserved], dict[int, int]]:
            holder = Holder(lengths[number])
            reservations = Reservations(holder)
            reserved: list[Reserved] = []
            for tick in range(12):
                for key in arrivals[number][tick : tick + 1]:
                    reservations.match(key)
                    if (number, key) in given_up:
                        reservations.abandon(key)
                decision = consensus.tick(lambda: Statement(claims=reservations.claims))
                reserved += reservations.settle(decision)
            assert not reservations.claims
            return reserved, holder.held

        return work

    found = run_ranks([rank(number) for number in range(ranks)])
    assert all(outcome == found[0] for outcome in found), found
    reserved, held = found[0]
    gone = {key for _, key in given_up}
    agreed = {
        key: min(own[key] for own in lengths) // PAGE_SIZE * PAGE_SIZE
        for key in keys
        if key not in gone
    }
    assert {item.key: item.num_cached for item in reserved} == agreed
    assert held == {key: tokens for key, tokens in agreed.items() if tokens}


def test_the_simulation_can_fail(monkeypatch: pytest.MonkeyPatch):
    """Ranks that go by what they know themselves take different pages."""
    own = lambda self, rows, statement: Decision({}, statement.claims)  # noqa: E731
    monkeypatch.setattr(Consensus, "_decide", own)
    first, second = run_ranks([say(claims={7: 2048}), say(claims={7: 2045})])
    assert first != second
