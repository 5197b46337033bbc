"""What each rank reads and multiplies of one chunk of a prompt, by the layout's own functions.

How often a loop over prior tokens runs is known only at run time, so a compiler cannot count it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from dcpjax.attention import indexer, sparse
from dcpjax.attention.ragged import Reads
from dcpjax.attention.segment import MANY_QUERIES, READ_TOKENS
from dcpjax.config import GlmConfig
from dcpjax.layout import zigzag_chunks
from scripts.prefill.steps import PromptStep


@dataclass(frozen=True)
class Work:
    """Of one rank and layer.

    Attributes:
        trips: runs of the loop over what is read.
        pairs: of a query and a token that it scores.
    """

    trips: int
    pairs: int


def rank_work(step: PromptStep, prior: int, rank: int) -> dict[str, Work]:
    """What a rank does for a full chunk behind ``prior`` tokens, by kind of loop."""
    ranges = [(prior + start, prior + stop) for start, stop in _ranges(step, rank)]
    model = step.blueprint.model
    if not isinstance(model, GlmConfig):
        return {"attention": _read_before(step, ranges)}
    if model.indexer is None:
        return {"attention": _read_before(step, ranges)}
    return {
        "indexer": _scored(step, ranges),
        "attention": _chosen(step, ranges, model.indexer.top_k),
    }


def _ranges(step: PromptStep, rank: int) -> Iterator[tuple[int, int]]:
    if step.ranks == 1:
        yield 0, step.chunk
        return
    for start, stop in zigzag_chunks(step.chunk, step.ranks, rank):
        yield int(start), int(stop)


def _read_before(step: PromptStep, ranges: list[tuple[int, int]]) -> Work:
    """Dense attention: every range reads what is before it; its own tokens are no loop."""
    queries = ranges[0][1] - ranges[0][0]
    tokens = _reads(step, READ_TOKENS[queries > MANY_QUERIES]).tokens
    return Work(sum(-(-start // tokens) for start, _ in ranges), _pairs(ranges))


def _scored(step: PromptStep, ranges: list[tuple[int, int]]) -> Work:
    """The indexer: every range reads all tokens up to its own last one."""
    tokens = _reads(step, indexer.READ_TOKENS).tokens
    return Work(sum(-(-stop // tokens) for _, stop in ranges), _pairs(ranges))


def _chosen(step: PromptStep, ranges: list[tuple[int, int]], top_k: int) -> Work:
    """Sparse attention: every query reads what was chosen for it."""
    most = min(top_k, step.copied_tokens)
    read = min(sparse.READ_TOKENS, most)
    positions = np.concatenate([np.arange(start, stop) for start, stop in ranges])
    counts = np.minimum(positions + 1, most)
    return Work(int(np.sum(-(-counts // read))), int(np.sum(counts)))


def _reads(step: PromptStep, tokens: int) -> Reads:
    """What is read at a time, of a copy or of the pool."""
    page_size = step.config.block_size
    return Reads.of(jnp.zeros((1, step.copied_tokens // page_size)), page_size, tokens)


def _pairs(ranges: list[tuple[int, int]]) -> int:
    return sum((stop * (stop + 1) - start * (start + 1)) // 2 for start, stop in ranges)
