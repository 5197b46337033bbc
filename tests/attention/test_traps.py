"""Mistakes that others made in this arithmetic. Each is made here on purpose, and a check goes red.

The checks are those of the other files; a check that no mistake can fail would prove nothing.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.attention import block, current, merge, prefill, segment, softmax
from dcpjax.attention.block import Block
from tests.attention import (
    test_block,
    test_merge,
    test_segment,
    test_segmented_attention_cp,
)
from tests.attention.sequences import lay_out
from tests.attention.test_block import Shape
from tests.attention.test_segment import GQA, LONGEST_PRIOR, MLA, Case

PAGE_PER_RANK = Case(4, "page", 8, GQA, False, "float32", "uint32")
TOKEN_PER_RANK = Case(3, 1, 8, GQA, False, "float32", "uint32")
BLOCK = Shape((1, 3), 4, "ag_rs", "uneven", 4, "by_heads")
BLOCK_BY_TOKENS = Shape((2, 2), 4, "ag_rs", "even", 4, "by_tokens")


def check_segments(case, *priors, length=17):
    """As the tests of segments do, in a newly traced program."""
    program = test_segment.compile_ranks(case)
    for prior in priors:
        test_segment.check_segment(case, program, prior, length)


def goes_red(check, *arguments, **keywords):
    with pytest.raises(AssertionError):
        check(*arguments, **keywords)


@pytest.fixture
def break_it(monkeypatch):
    """``break_it(module, name, broken)``: broken(original, ...) takes the function's place."""

    def replace(owner, name, broken):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, functools.partial(broken, original))

    return replace


def test_trap_1_an_empty_rank_has_lse_0(break_it):
    check_segments(PAGE_PER_RANK, 0, length=3)

    def finish(original, *arguments):
        out, lse = original(*arguments)
        return out, jnp.where(jnp.isneginf(lse), 0.0, lse)

    break_it(segment, "_finish", finish)
    goes_red(check_segments, PAGE_PER_RANK, 0, length=3)
    partial = test_segment.partials(PAGE_PER_RANK, test_segment.compile_ranks(PAGE_PER_RANK), 0, 3)
    goes_red(test_segment.check_merged, PAGE_PER_RANK, 0, 3, *map(jnp.asarray, partial))


@pytest.mark.parametrize("backend", ["ag_rs", "a2a"])
def test_trap_2_base_2_lse_merged_as_natural(break_it, backend):
    shape = Shape((1, 3), 4, backend, "one", 4, "by_heads")
    test_block.check_shape(shape)

    def finish(original, *arguments):
        out, lse = original(*arguments)
        return out, lse / np.float32(np.log(2))

    break_it(segment, "_finish", finish)
    goes_red(test_block.check_shape, shape)


def test_trap_2_a_merge_in_base_2(monkeypatch):
    test_merge.test_natural_logarithm()
    monkeypatch.setattr(merge.jnp, "exp", jnp.exp2)
    goes_red(test_merge.test_natural_logarithm)


def test_trap_3_nan_times_0_from_an_empty_shard(break_it):
    check = test_merge.test_merging_over_a_mesh_axis_is_merging_locally
    check("ag_rs", 0, 2, (0,))

    def weigh(original, out, lse, merged):
        return jnp.exp(lse - merged)[..., None] * out

    break_it(merge, "weigh", weigh)
    goes_red(check, "ag_rs", 0, 2, (0,))


def test_trap_3_nan_times_0_from_pages_that_nobody_owns(break_it):
    check_segments(TOKEN_PER_RANK, 9)

    def attend_rows(original, running, queries, keys, rows, visible, scale):
        everything = jnp.ones_like(visible)
        seen = original(running, queries, keys, rows, visible, scale)
        values = original(running, queries, keys, rows, everything, scale).values
        return seen._replace(values=jnp.where(jnp.isnan(values), values, seen.values))

    break_it(segment, "_attend_rows", attend_rows)
    goes_red(check_segments, TOKEN_PER_RANK, 9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trap_4_bf16_lse(break_it, dtype):
    case = Case(3, 4, 8, MLA, True, dtype, "uint32")
    check_segments(case, LONGEST_PRIOR)

    def finish(original, *arguments):
        out, lse = original(*arguments)
        return out, lse.astype(jnp.bfloat16).astype(jnp.float32)

    break_it(segment, "_finish", finish)
    goes_red(check_segments, case, LONGEST_PRIOR)


def test_a_scale_rounded_to_bf16_changes_the_temperature(break_it):
    case = Case(3, 4, 8, MLA, True, "bfloat16", "uint32")
    check_segments(case, LONGEST_PRIOR)

    rounded = float(np.asarray(test_segment.SCALE, jnp.bfloat16)) / test_segment.SCALE

    def product(original, equation, a, b):
        return original(equation, a, b) * (rounded if equation.endswith("->kqs") else 1.0)

    break_it(softmax, "_product", product)
    goes_red(check_segments, case, LONGEST_PRIOR)


def smaller_kernel_pages(rows, kernel_page):
    """[ranks, pages, K, P, W] as pages of ``kernel_page`` tokens."""
    ranks, pages, heads, page_size, width = rows.shape
    parts = page_size // kernel_page
    split = rows.reshape(ranks, pages, heads, parts, kernel_page, width).swapaxes(2, 3)
    return split.reshape(ranks, pages * parts, heads, kernel_page, width)


def check_kernel_pages(case, kernel_page, prior, length=17):
    """Logical pages, read by a kernel in smaller ones; the interleave is a logical page."""
    _, k, v = (np.asarray(x) for x in test_segment.sequence_of(case))
    pages = lay_out(
        np.concatenate([k, v], axis=-1),
        prior,
        **case.split,
        page_size=case.page_size,
        num_entries=case.num_entries,
        generator=np.random.default_rng(5),
    )
    parts = case.page_size // kernel_page
    table = (pages.table[:, None] * parts + np.arange(parts, dtype=np.int32)).reshape(-1)
    q = np.zeros((test_segment.WIDTH, *test_segment.sequence_of(case)[0].shape[1:]), np.float32)
    q[:length] = test_segment.sequence_of(case)[0][prior : prior + length]
    out, lse = test_segment.compile_ranks(case)(
        np.arange(case.ranks, dtype=np.uint32),
        smaller_kernel_pages(pages.rows, kernel_page),
        *test_segment.own_tokens(case, prior, length),
        q,
        table,
        np.uint32(prior),
    )
    test_segment.check_merged(case, prior, length, out[:, :length], lse[:, :length])


def test_trap_8_ownership_computed_on_the_pages_of_the_kernel(break_it):
    case, kernel_page = Case(4, "page", 16, GQA, False, "float32", "uint32"), 4
    check_kernel_pages(case, kernel_page, 77)

    def with_kernel_page(original, *arguments, ranks, interleave):
        return original(*arguments, ranks=ranks, interleave=min(interleave, kernel_page))

    break_it(segment, "local_filled", with_kernel_page)
    goes_red(check_kernel_pages, case, kernel_page, 77)


@pytest.mark.parametrize("shape", [BLOCK, BLOCK_BY_TOKENS], ids=str)
def test_trap_10_padding_written_as_real(break_it, shape):
    test_block.check_shape(shape)

    def write_slots(original, table, positions, valid, *arguments, **keywords):
        return original(table, positions, jnp.ones_like(valid), *arguments, **keywords)

    break_it(block, "write_slots", write_slots)
    goes_red(test_block.check_shape, shape)


def test_trap_13_the_last_0_of_a_list_are_all_of_it(monkeypatch):
    """``tokens[-0:]``: an unused row that counts as full."""
    correct = Block.write_slots
    test_block.check_shape(BLOCK)

    def write_slots(self):
        is_unused = self.num_tokens == 0
        full = dataclasses.replace(
            self,
            num_tokens=jnp.where(is_unused, jnp.uint32(self.width), self.num_tokens),
            page_tables=jnp.where(is_unused[:, None], 0, self.page_tables),  # somebody else's page
        )
        return correct(full)

    monkeypatch.setattr(Block, "write_slots", write_slots)
    goes_red(test_block.check_shape, BLOCK)


def test_a_length_localised_before_it_is_expanded(break_it):
    """Positions counted on from a rank's own prior: right on one rank, wrong on several."""
    check_segments(TOKEN_PER_RANK, 41)

    def begin(original, q, prior, k, v, positions, rank, ranks, interleave, scale):
        local = segment.local_filled(prior, rank, ranks=ranks, interleave=interleave)
        moved = positions - prior + local
        return original(q, prior, k, v, moved, rank, ranks, interleave, scale)

    break_it(segment, "_begin", begin)
    goes_red(check_segments, TOKEN_PER_RANK, 41)


def test_the_current_tokens_counted_by_every_rank(break_it):
    check_segments(TOKEN_PER_RANK, 41)
    break_it(current, "active_mask", lambda _, positions, rank, **split: positions >= 0)
    goes_red(check_segments, TOKEN_PER_RANK, 41)


def test_gathered_tokens_left_in_the_order_of_ranks(break_it):
    test_block.check_shape(BLOCK_BY_TOKENS)

    def window_order(original, start, width, **split):
        return jnp.sort(original(start, width, **split))

    break_it(prefill, "window_order", window_order)
    goes_red(test_block.check_shape, BLOCK_BY_TOKENS)


def test_own_tokens_taken_for_consecutive_ones(break_it):
    check = test_segmented_attention_cp.check_chunks
    check(2, 16, False, False)
    break_it(prefill, "global_position", lambda _, index, rank, ranks, interleave: index)
    goes_red(check, 2, 16, False, False)
