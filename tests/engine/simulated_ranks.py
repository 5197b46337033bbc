"""Ranks of one engine as threads that exchange rows in memory, and what became of each."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from dcpjax.engine.consensus import Consensus, Reduction, Row
from dcpjax.errors import ConsensusError

PAGE_SIZE = 16


class ThreadReduction:
    """The n-th exchange of each rank belongs together, whatever it was meant for."""

    def __init__(self, table: "Table", rank: int) -> None:
        self._table, self._rank = table, rank

    def exchange(self, row: Row) -> Row:
        return self._table.exchange(self._rank, row)


class Table:
    """Where the ranks meet; who waits for longer than ``seconds`` raises."""

    def __init__(self, ranks: int, seconds: float) -> None:
        self._rows: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks)
        self._seconds = seconds

    def exchange(self, rank: int, row: Row) -> Row:
        self._rows[rank] = row
        try:
            self._barrier.wait(self._seconds)
            rows = np.stack(self._rows)
            self._barrier.wait(self._seconds)
        except threading.BrokenBarrierError:
            raise ConsensusError("all ranks come to an exchange", rank=rank) from None
        return rows


def run_ranks(
    works: Sequence[Callable[[Consensus], Any]], *, capacity: int = 4, seconds: float = 30.0
) -> list[Any]:
    """What each rank's work returns, or the error that it raises."""
    table = Table(len(works), seconds)

    def start(rank: int) -> Future[Any]:
        reduction: Reduction = ThreadReduction(table, rank)
        consensus = Consensus(reduction, capacity=capacity, page_size=PAGE_SIZE)
        return executor.submit(works[rank], consensus)

    with ThreadPoolExecutor(len(works)) as executor:
        futures = [start(rank) for rank in range(len(works))]
    return [future.exception() or future.result() for future in futures]
