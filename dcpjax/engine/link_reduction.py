"""Exchanges of rows between the processes of one engine."""

from collections.abc import Mapping

import numpy as np

from dcpjax.engine.consensus import Reduction, Row
from dcpjax.engine.link import Link
from dcpjax.engine.link_messages import AllRows, RowOf
from dcpjax.errors import ConsensusError


def gather_bytes(reduction: Reduction, found: bytes) -> list[bytes]:
    """What each rank brings, by rank; the same on all of them. Two exchanges."""
    sizes = reduction.exchange(np.asarray([len(found)], np.int64))[:, 0].tolist()
    row = np.zeros(-(-max(sizes) // 8), np.int64)
    row.view(np.uint8)[: len(found)] = np.frombuffer(found, np.uint8)
    rows = reduction.exchange(row)
    return [row.tobytes()[:size] for row, size in zip(rows, sizes, strict=True)]


class LinkReduction:
    """Exchanges over a link: the followers' rows go to the leader, which sends all to all.

    ``timeout`` are the seconds until a silent follower ends the exchange, None: it may take as long
    as the process is there. Followers wait for the leader as long as it is there.
    """

    def __init__(self, link: Link, timeout: float | None = None) -> None:
        self._link, self.timeout = link, timeout

    def exchange(self, row: Row) -> Row:
        """See :class:`dcpjax.engine.consensus.Reduction`."""
        return self._collect(row) if self._link.rank == 0 else self._contribute(row)

    def _contribute(self, row: Row) -> Row:
        self._link.send(RowOf(row.tobytes()))
        message = self._link.receive()[1]
        if not isinstance(message, AllRows):  # Close: the leader was interrupted while it waited
            raise ConsensusError("the leader closed the engine in the middle of an exchange")
        return np.frombuffer(message.rows, np.int64).reshape(self._link.ranks, -1)

    def _collect(self, row: Row) -> Row:
        ranks = range(self._link.ranks)
        rows = {0: row}
        while len(rows) < len(ranks):
            rank, rows[rank] = self._receive(rows)
        lengths = [rows[rank].size for rank in ranks]
        if len(set(lengths)) > 1:
            raise ConsensusError("the rows of all ranks have one length", lengths_by_rank=lengths)
        together = np.stack([rows[rank] for rank in ranks])
        self._link.send(AllRows(together.tobytes()))
        return together

    def _receive(self, rows: Mapping[int, Row]) -> tuple[int, Row]:
        try:
            rank, message = self._link.receive(self.timeout)
        except TimeoutError:
            silent = sorted(set(range(self._link.ranks)) - rows.keys())
            raise ConsensusError(
                f"all ranks come to an exchange within {self.timeout} s",
                silent_ranks=silent,
                rows_by_rank={rank: came[:8].tolist() for rank, came in rows.items()},
            ) from None
        assert isinstance(message, RowOf), "followers send nothing but rows"
        return rank, np.frombuffer(message.row, np.int64)
