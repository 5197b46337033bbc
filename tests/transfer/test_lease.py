"""Leases: each ends exactly once, none too early, and no two clocks are compared."""

import itertools
import threading
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dcpjax.errors import TransferError
from dcpjax.transfer.lease import Landing, LeaseTable


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def leases(clock: Clock) -> LeaseTable:
    return LeaseTable(30.0, 20.0, clock)


def test_a_lease_ends_when_its_time_is_over(leases: LeaseTable, clock: Clock) -> None:
    leases.open("a", 1)
    clock.now += 29.75
    assert leases.expire() == []
    clock.now += 0.25
    assert [leases.expire(), leases.expire(), len(leases)] == [["a"], [], 0]
    assert leases.land("a", [0], 1) is Landing.UNKNOWN
    assert leases.heartbeat(["a"]) == []
    assert not leases.close("a")
    assert not leases.pin("a")


def test_a_heartbeat_extends_and_never_shortens(leases: LeaseTable, clock: Clock) -> None:
    leases.open("a")
    clock.now += 5
    assert leases.heartbeat(["a"]) == ["a"]  # until 25 after the start, which is less than 30
    clock.now += 24
    assert leases.expire() == []
    assert leases.heartbeat(["a", "b", "a"]) == ["a", "a"]
    clock.now += 19.75
    assert leases.expire() == []
    clock.now += 0.25
    assert leases.expire() == ["a"]


def test_an_extended_lease_does_not_hide_one_that_is_over(leases: LeaseTable, clock: Clock) -> None:
    leases.open("a")
    leases.open("b")
    leases.open("c")
    clock.now += 15
    leases.heartbeat(["a", "c"])
    clock.now += 15
    assert leases.expire() == ["b"]
    clock.now += 5
    assert leases.expire() == ["a", "c"]


@pytest.mark.parametrize("skew", [-1e7, -7200.0, 0.0, 7200.0, 1e7])
def test_the_other_side_may_have_any_clock(skew: float) -> None:
    """A consumer sends heartbeats by its own clock; the lease lasts as long as they come."""
    here, there = Clock(5000.0), Clock(5000.0 + skew)
    leases = LeaseTable(30.0, 20.0, here)
    leases.open("a")
    next_heartbeat = there.now + 5
    for _ in range(300):
        here.now += 1
        there.now += 1
        if there.now >= next_heartbeat:
            assert leases.heartbeat(["a"]) == ["a"]
            next_heartbeat += 5
        assert leases.expire() == []
    here.now += 20
    assert leases.expire() == ["a"]


def test_pages_are_held_until_every_rank_has_landed(leases: LeaseTable) -> None:
    leases.open("a", 3)
    assert leases.land("a", [1], 3) is Landing.PENDING
    assert leases.land("a", [1, 1], 3) is Landing.PENDING, "two messages of one rank count once"
    assert leases.land("a", [], 3) is Landing.PENDING
    assert leases.land("a", [2], 3) is Landing.PENDING
    assert leases.land("a", [1, 0], 3) is Landing.RELEASED
    assert leases.land("a", [0], 3) is Landing.UNKNOWN
    assert leases.expire() == []


def test_the_first_landing_may_say_how_many_ranks_there_are(leases: LeaseTable) -> None:
    leases.open("a")
    assert leases.land("a", [0], 2) is Landing.PENDING
    with pytest.raises(TransferError, match="before=2, now=1"):
        leases.land("a", [0], 1)
    assert leases.land("a", [1], 2) is Landing.RELEASED


def test_a_late_landing_is_good_while_the_pages_are_held(leases: LeaseTable, clock: Clock) -> None:
    leases.open("a", 1)
    clock.now += 1000
    assert leases.land("a", [0], 1) is Landing.RELEASED
    assert leases.expire() == []


@pytest.mark.parametrize(("rank", "count"), [(-1, 2), (2, 2), (5, 2), (0, 0), (0, -1)])
def test_ranks_outside_the_target_change_nothing(leases: LeaseTable, rank: int, count: int) -> None:
    leases.open("a")
    with pytest.raises(TransferError, match=f"num_target_ranks={count}"):
        leases.land("a", [0, rank], count)
    assert leases.land("a", [1], 2) is Landing.PENDING, "rank 0 of the wrong message is not in"


def test_a_request_is_held_once_at_a_time(leases: LeaseTable) -> None:
    leases.open("a", 1)
    with pytest.raises(TransferError, match="held once at a time .request_id='a'"):
        leases.open("a", 1)
    with pytest.raises(TransferError, match="num_target_ranks=0"):
        leases.open("b", 0)
    leases.land("a", [0], 1)
    leases.open("a", 2)
    assert leases.land("a", [0], 2) is Landing.PENDING, "nothing is left of the first time"


def test_nothing_ends_while_it_is_pinned(leases: LeaseTable, clock: Clock) -> None:
    leases.open("a", 1)
    assert [leases.pin("a"), leases.pin("a")] == [True, True]
    clock.now += 1000
    assert leases.expire() == []
    assert [leases.unpin("a"), leases.expire()] == [False, []]
    assert leases.unpin("a") is False
    assert leases.expire() == ["a"]


@pytest.mark.parametrize("end", ["land", "close"])
def test_the_last_pin_ends_what_was_closed_meanwhile(leases: LeaseTable, end: str) -> None:
    leases.open("a", 1)
    leases.pin("a")
    if end == "land":
        assert leases.land("a", [0], 1) is Landing.PENDING
    else:
        assert leases.close("a") is False
    assert leases.heartbeat(["a"]) == []
    assert not leases.pin("a"), "nothing new may start to write"
    assert leases.land("a", [0], 1) is Landing.UNKNOWN
    assert len(leases) == 1
    assert [leases.unpin("a"), len(leases)] == [True, 0]


def test_only_what_is_pinned_is_unpinned(leases: LeaseTable) -> None:
    leases.open("a")
    for request_id in ("a", "b"):
        with pytest.raises(TransferError, match=f"unpinned .request_id='{request_id}'"):
            leases.unpin(request_id)


IDS = st.sampled_from("abc")


class LeasesEndOnce(RuleBasedStateMachine):
    """Any sequence of calls ends each lease exactly once, and never while it is pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.leases = LeaseTable(30.0, 20.0, self.clock)
        self.held = set[str]()
        self.pins = Counter[str]()

    def end(self, *over: str) -> None:
        for id in over:
            assert self.pins[id] == 0
            self.held.remove(id)  # a KeyError if it has ended before

    @rule(id=IDS)
    def open(self, id: str) -> None:
        if id in self.held:
            with pytest.raises(TransferError):
                self.leases.open(id, 2)
        else:
            self.leases.open(id, 2)
            self.held.add(id)

    @rule(id=IDS, rank=st.integers(0, 1))
    def land(self, id: str, rank: int) -> None:
        landing = self.leases.land(id, [rank], 2)
        assert landing is Landing.UNKNOWN or id in self.held
        if landing is Landing.RELEASED:
            self.end(id)

    @rule(id=IDS)
    def close(self, id: str) -> None:
        if self.leases.close(id):
            self.end(id)

    @rule(id=IDS)
    def pin(self, id: str) -> None:
        if self.leases.pin(id):
            assert id in self.held
            self.pins[id] += 1

    @rule(id=IDS)
    def unpin(self, id: str) -> None:
        if self.pins[id]:
            self.pins[id] -= 1
            if self.leases.unpin(id):
                self.end(id)

    @rule(ids=st.lists(IDS))
    def heartbeat(self, ids: list[str]) -> None:
        assert self.held.issuperset(self.leases.heartbeat(ids))

    @rule(seconds=st.integers(0, 40))
    def expire(self, seconds: int) -> None:
        self.clock.now += seconds
        self.end(*self.leases.expire())

    @invariant()
    def is_held(self) -> None:
        assert len(self.leases) == len(self.held)

    def teardown(self) -> None:
        for id in list(self.pins.elements()):
            self.pins[id] -= 1
            if self.leases.unpin(id):
                self.end(id)
        self.expire(1000)
        assert not self.held


test_each_lease_ends_exactly_once = LeasesEndOnce.TestCase


def test_many_threads_end_each_lease_once() -> None:
    leases = LeaseTable(0.0)
    names = [str(number) for number in range(2000)]
    for name in names:
        leases.open(name, 2)
    ended: list[str] = []
    start = threading.Barrier(4)

    def land(rank: int) -> None:
        start.wait()
        ended.extend(n for n in names if leases.land(n, [rank], 2) is Landing.RELEASED)

    def close() -> None:
        start.wait()
        ended.extend(n for n in reversed(names) if leases.close(n))

    def expire() -> None:
        start.wait()
        ended.extend(itertools.chain.from_iterable(leases.expire() for _ in range(200)))

    threads = [threading.Thread(target=land, args=(rank,)) for rank in range(2)]
    threads += [threading.Thread(target=close), threading.Thread(target=expire)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == sorted(names)
    assert len(leases) == 0
