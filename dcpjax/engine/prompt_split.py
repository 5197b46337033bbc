"""What PCP ranks share of prompts: how even their work was, and what copies they hold for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dcpjax.engine.plan import Segment
from dcpjax.layout import zigzag_chunks


class PromptSplit:
    """Counts the attention work of each rank.

    Args:
        ranks: PCP ranks.
        residency: what they keep of a sequence.
        copy_bytes: most bytes of temporary copies that a rank holds in a step.
    """

    def __init__(self, ranks: int, residency: str, copy_bytes: int) -> None:
        self._ranks, self._residency, self._copy_bytes = ranks, residency, copy_bytes
        self._work = np.zeros(ranks, np.int64)

    def count(self, prompts: Sequence[Segment]) -> None:
        """Add the prompt chunks of one step."""
        for segment in prompts:
            self._work += attention_work(segment.start, segment.num_tokens, self._ranks)

    def stats(self) -> dict[str, Any]:
        """``balance``: work of the busiest rank over the mean, 1 before the first prompt."""
        total = int(self._work.sum())
        balance = float(self._work.max() * self._ranks / total) if total else 1.0
        return {
            "ranks": self._ranks,
            "prefill_kv": self._residency,
            "balance": balance,
            "copy_bytes": self._copy_bytes,
        }


def attention_work(start: int, num_tokens: int, ranks: int) -> np.ndarray:
    """Pairs of a token and one that it sees, by the rank that computes them: int64 [ranks].

    ``num_tokens`` tokens of one sequence behind ``start`` others, in pairs of chunks.
    """

    def pairs(first: int, stop: int) -> int:
        """Of the tokens [first, stop) of the segment: token t sees start + t + 1."""
        return (stop - first) * (2 * start + first + stop + 1) // 2

    chunks = (zigzag_chunks(num_tokens, ranks, rank) for rank in range(ranks))
    return np.array([sum(pairs(*chunk) for chunk in both) for both in chunks], np.int64)
