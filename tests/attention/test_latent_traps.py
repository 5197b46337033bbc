"""The mistakes of tests/attention/test_traps.py where a cache has latents, all of them or chosen.

Each is made here on purpose, and a check goes red.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.attention import expanded, indexer, merge, segment, sparse
from dcpjax.attention.block import Block, TokenSharding, make_block
from dcpjax.attention.indexer import ChosenPlaces
from tests.attention import test_expanded, test_segment, test_sparse
from tests.attention.test_segment import LONGEST_PRIOR, MLA
from tests.attention.test_sparse import DECODE
from tests.attention.test_traps import break_it, check_segments, goes_red

__all__ = ["break_it"]

DENSE = test_segment.Case(4, "page", 8, MLA, True, "float32", "uint32")
SHARDED = test_sparse.Case(4, 8, "sharded", 1, DECODE)
WHOLE = test_sparse.Case(4, 8, "whole", 1, DECODE)
EXPANDED = test_expanded.Case(4, 8, "registers", 5, ((100, 5), (0, 3), (0, 0), (7, 1)))


def check_dense():
    """An empty cache, where ranks have nothing, and a long one."""
    for prior, length in ((0, 3), (LONGEST_PRIOR, 17)):
        check_segments(DENSE, prior, length=length)


def check_sparse(case=SHARDED):
    test_sparse.test_sparse_attention_equals_one_device(case)


def check_expanded():
    """Rows with few tokens and with none, where most ranks have nothing."""
    test_expanded.check(EXPANDED)


CHECKS = {
    "dense": (check_dense, segment, "_finish"),
    "sparse": (check_sparse, sparse, "finish"),
    "expanded": (check_expanded, expanded, "finish"),
}
WRONG_LSE = {
    "trap 1: an empty rank has lse 0": lambda lse: jnp.where(jnp.isneginf(lse), 0.0, lse),
    "trap 2: base 2 merged as natural": lambda lse: lse / np.float32(np.log(2)),
    "trap 4: bf16 lse": lambda lse: lse.astype(jnp.bfloat16).astype(jnp.float32),
}


@pytest.mark.parametrize("kind", CHECKS)
def test_without_a_mistake_all_is_well(kind):
    CHECKS[kind][0]()


@pytest.mark.parametrize("kind", CHECKS)
@pytest.mark.parametrize("mistake", WRONG_LSE)
def test_a_wrong_lse(mistake, kind, break_it):
    check, module, name = CHECKS[kind]

    def finish(original, *arguments):
        out, lse = original(*arguments)
        return out, WRONG_LSE[mistake](lse)

    break_it(module, name, finish)
    goes_red(check)


def test_prior_tokens_counted_up_to_another_position(break_it):
    """Expanded, the segment's first token would be read as well: twice, or as NaN."""

    def filled(original, length, rank, **layout):
        return original(length + 1, rank, **layout)

    break_it(expanded, "local_filled", filled)
    goes_red(check_expanded)


def test_trap_3_nan_times_0_from_a_row_that_is_not_used(break_it):
    def weigh(original, out, lse, merged):
        return jnp.exp(lse - merged)[..., None] * out

    break_it(merge, "weigh", weigh)
    goes_red(check_sparse)


def test_trap_9_whole_pages_without_the_factor_of_the_ranks(monkeypatch):
    """The pages themselves tell: they are longer than what is read of them."""
    check_sparse(WHOLE)

    def whole(self):
        sharding = TokenSharding(1, 1, self.sharding.page_size, self.sharding.scratch_page)
        segments = (self.page_tables, self.prior_lengths, self.num_tokens)
        return make_block(self.width, *segments, jnp.zeros_like(self.rank), sharding)

    monkeypatch.setattr(Block, "whole", whole)
    with pytest.raises(TypeError, match="incompatible shapes"):
        check_sparse(WHOLE)


def test_trap_11_the_union_of_local_choices(break_it):
    def union(original, best, *arguments):
        return ChosenPlaces(best.indices, indexer._num_finite(best.scores))

    break_it(indexer, "_counted_over_ranks", union)
    goes_red(check_sparse)


def test_trap_11_ties_broken_by_the_highest_position(break_it):
    break_it(indexer, "_positions", lambda original, *arguments: -original(*arguments))
    goes_red(check_sparse)
