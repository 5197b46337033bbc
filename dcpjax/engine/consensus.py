"""What only a process can know, agreed on by all: one exchange of one fixed shape per tick.

Knows no transport (see :class:`Reduction`), no arrays on devices and no requests, only keys, states
and lengths. Invariant: a rank takes part in every exchange, with nothing to say and with an error
of its own too, and what is decided is a function of the rows of all ranks, which all ranks see. So
no two of them decide differently, and a rank that is out of step is an error on all of them.
"""

import enum
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dcpjax.errors import ConsensusError

Row = npt.NDArray[np.int64]

FAILED = -1
"""Instead of the length of a matched prefix: this rank cannot go on with the request."""

_NOTHING = np.iinfo(np.int64).max  # fills the rest of a row; no key, see key_of
_HEADER: tuple[str, ...] = ("call", "is_broken", "witness", "num_polls", "polled", "num_claims")


class Reduction(Protocol):
    """The exchange itself. Every rank calls it the same number of times."""

    def exchange(self, row: Row) -> Row:
        """The rows of all ranks, [ranks, n], in the order of ranks; the same on each of them.

        Raises:
            ConsensusError: a row did not come before the deadline, or has another length.
        """
        ...


class State(enum.IntEnum):
    """How far something is on one rank; the least of all ranks counts, so a failure wins."""

    FAILED = 0
    WAITING = 1
    MOVING = 2
    DONE = 3


@dataclass(frozen=True)
class Statement:
    """What one rank has to say at a tick.

    Attributes:
        polls: by key, of what every rank waits for: the same keys in the same order everywhere.
        claims: by key, tokens of the prefix that was matched and locked here, or FAILED. Ranks may
            have different keys: what is not there yet comes later.
        witness: something that must be equal on all ranks, as a number, see :func:`key_of`.
    """

    polls: Mapping[int, State] = field(default_factory=dict[int, State])
    claims: Mapping[int, int] = field(default_factory=dict[int, int])
    witness: int = 0


@dataclass(frozen=True)
class Decision:
    """What all ranks have decided, equal on each.

    Attributes:
        states: of each poll, the least of all ranks.
        prefixes: of the claims that all ranks have made, in ascending order of keys: the least
            length, down to a whole virtual page. FAILED where one rank has failed.
    """

    states: Mapping[int, State]
    prefixes: Mapping[int, int]


def key_of(name: bytes) -> int:
    """62 bits that stand for ``name`` in an exchange."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 2


class Consensus:
    """One rank's part in the agreement.

    Args:
        capacity: polls of a tick at most, and claims of a tick: further ones take part later.
        page_size: tokens of a virtual page.
    """

    def __init__(self, reduction: Reduction, *, capacity: int, page_size: int) -> None:
        self._reduction = reduction
        self._capacity, self._page_size = capacity, page_size
        self._calls = 0
        self._is_over = False

    def tick(self, observe: Callable[[], Statement]) -> Decision:
        """Take part in one exchange.

        ``observe`` says what this rank knows. Whatever it raises is raised here, after an exchange
        that tells the other ranks.

        Raises:
            ConsensusError: the ranks are out of step, one has failed, or one was silent; the same
                on every rank that is there. There is no further tick after any error.
        """
        if self._is_over:
            raise ConsensusError("there is no further tick after an error", calls=self._calls)
        self._is_over = True  # until the end
        self._calls += 1
        row = self._broken_row()
        try:
            statement = observe()
            row = self._row(statement)
        finally:
            rows = self._reduction.exchange(row)
        decision = self._decide(rows, statement)
        self._is_over = False
        return decision

    def _broken_row(self) -> Row:
        row = np.full(len(_HEADER) + 3 * self._capacity, _NOTHING, np.int64)
        row[: len(_HEADER)] = (self._calls, 1, 0, 0, 0, 0)
        return row

    def _row(self, statement: Statement) -> Row:
        polls = statement.polls
        # The least keys first: the least one of all ranks is then in the row of every rank that
        # has it, so claims beyond the capacity never block each other.
        claims = sorted(statement.claims.items())[: self._capacity]
        if len(polls) > self._capacity:
            raise ConsensusError(
                "a rank polls at most as much as a row holds",
                polls=len(polls),
                capacity=self._capacity,
            )
        row = self._broken_row()
        polled = key_of(np.asarray([*polls], np.int64).tobytes())
        row[: len(_HEADER)] = (
            self._calls, 0, statement.witness, len(polls), polled, len(claims),
        )  # fmt: skip
        body = row[len(_HEADER) :].reshape(3, self._capacity)
        body[0, : len(polls)] = list(polls.values())
        for place, (key, tokens) in enumerate(claims):
            body[1:, place] = key, tokens
        return row

    def _decide(self, rows: Row, statement: Statement) -> Decision:
        columns: list[list[int]] = rows[:, : len(_HEADER)].T.tolist()
        header: dict[str, list[int]] = dict(zip(_HEADER, columns, strict=True))
        _check_in_step(header)
        bodies = rows[:, len(_HEADER) :].reshape(len(rows), 3, self._capacity)
        states = bodies[:, 0, : len(statement.polls)].min(axis=0)
        return Decision(
            states={
                key: State(state)
                for key, state in zip(statement.polls, states.tolist(), strict=True)
            },
            prefixes=self._agreed_prefixes(bodies[:, 1], bodies[:, 2]),
        )

    def _agreed_prefixes(self, keys: Row, tokens: Row) -> dict[int, int]:
        pairs = zip(keys.tolist(), tokens.tolist(), strict=True)
        by_rank = [dict(zip(*pair, strict=True)) for pair in pairs]
        everywhere = set(by_rank[0]).intersection(*by_rank[1:]) - {_NOTHING}
        least = {key: min(claims[key] for claims in by_rank) for key in sorted(everywhere)}
        size = self._page_size
        return {key: FAILED if n == FAILED else n // size * size for key, n in least.items()}


def _check_in_step(header: Mapping[str, list[int]]) -> None:
    """Raise where the ranks are not at the same tick with the same things.

    A broken rank comes second: who is behind reads the row of another tick.
    """
    rules = {
        "call": "all ranks are at the same tick",
        "is_broken": "no rank fails while it looks at what it knows",
        "num_polls": "all ranks poll the same number of things",
        "polled": "all ranks poll the same things in the same order",
        "witness": "all ranks have computed the same",
    }
    for name, rule in rules.items():
        values = header[name]
        if len(set(values)) > 1 or (name == "is_broken" and any(values)):
            raise ConsensusError(rule, **{f"{name}_by_rank": values})


class PrefixHolder(Protocol):
    """Where one rank looks for prefixes and keeps them."""

    def lock(self, key: int) -> int:
        """Tokens that are there for a request; they stay there until they are released."""
        ...

    def release(self, key: int, tokens: int) -> None:
        """What is behind the first ``tokens`` of a request is no longer held."""
        ...


@dataclass(frozen=True)
class Reserved:
    """A request that may take its pages, on every rank with the same ``num_cached`` tokens."""

    key: int
    num_cached: int


class Reservations:
    """Requests between their match and their pages, on one rank.

    First a request is matched and locked, and its length goes into the next exchanges; when all
    ranks have it, it is clamped to what they agreed on. Only then it takes pages.
    """

    def __init__(self, holder: PrefixHolder) -> None:
        self._holder = holder
        self._claims: dict[int, int] = {}

    @property
    def claims(self) -> Mapping[int, int]:
        """For the next statement: lengths as they were when they were locked."""
        return self._claims

    def match(self, key: int) -> None:
        """Lock what is there for a new request."""
        self._claims[key] = self._holder.lock(key)

    def abandon(self, key: int) -> None:
        """The request ended here before it was settled; the other ranks hear of it."""
        if self._claims.get(key, FAILED) != FAILED:
            self._holder.release(key, 0)
            self._claims[key] = FAILED

    def settle(self, decision: Decision) -> list[Reserved]:
        """Clamp what all ranks have: the requests that take pages now, in the same order on all.

        Called right after the tick that decided. Requests that failed on some rank are gone
        everywhere.
        """
        reserved: list[Reserved] = []
        for key, agreed in decision.prefixes.items():
            own = self._claims.pop(key)
            if own != FAILED:
                self._holder.release(key, max(agreed, 0))
            if agreed != FAILED:
                reserved.append(Reserved(key, agreed))
        return reserved
