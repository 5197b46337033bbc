"""The kernels on the NumPy emulation, against their JAX references and dense attention.

The emulation is ours: what holds here is shapes, masks and arithmetic, not that AWS's compiler
takes the kernels or that the hardware does what the documentation says.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from dcpjax.layout import local_filled
from neuron.nki import PAIRS, tiling
from tests.neuron.nki.emulated_memory import NkiViolation, Tensor
from tests.neuron.nki.shards import Case, Heads, dense, rank_arguments, tolerance_of

PAGE = 16
GQA64 = Heads(query_heads=8, kv_heads=2, key_width=64, value_width=64)
MQA128 = Heads(query_heads=4, kv_heads=1, key_width=128, value_width=128)
MLA = Heads(query_heads=4, kv_heads=1, key_width=160, value_width=128, values_are_keys=True)

DECODE = {
    "gqa64-1": Case(GQA64, 1, 1, PAGE, width=1, longest=40),
    "gqa64-2x4": Case(GQA64, 2, 4, PAGE, width=1, longest=40),
    "mqa128-4xpage": Case(MQA128, 4, PAGE, PAGE, width=1, longest=140),
    "mqa128-2x1-bf16": Case(MQA128, 2, 1, PAGE, width=1, longest=40, dtype="bfloat16"),
    "mla-3x4-layers": Case(MLA, 3, 4, PAGE, width=1, longest=60, has_layers=True),
    "gqa64-2x4-verify": Case(GQA64, 2, 4, PAGE, width=5, longest=40),
    "mqa128-1-steps": Case(MQA128, 1, 1, PAGE, width=1, longest=600),
}
CONTEXT = {
    "gqa64-1": Case(GQA64, 1, 1, PAGE, width=24, longest=40),
    "gqa64-2x4-tiles": Case(GQA64, 2, 4, PAGE, width=40, longest=40),
    "mqa128-4xpage": Case(MQA128, 4, PAGE, PAGE, width=32, longest=140),
    "mqa128-2x1-bf16-blocks": Case(MQA128, 2, 1, PAGE, width=136, longest=40, dtype="bfloat16"),
    "mla-3x4-layers": Case(MLA, 3, 4, PAGE, width=12, longest=60, has_layers=True),
}
CASES = [("decode", name) for name in DECODE] + [("context", name) for name in CONTEXT]


def case_of(kind: str, name: str) -> Case:
    return {"decode": DECODE, "context": CONTEXT}[kind][name]


def priors_of(case: Case) -> list[int]:
    """Edges of pages and of ranks, and the longest."""
    page, turn = case.page_size, case.ranks * case.page_size
    edges = {0, 1, page - 1, page, page + 1, case.ranks - 1, case.ranks, turn - 1, turn, turn + 1}
    return sorted({*(edge for edge in edges if edge <= case.longest), case.longest})


def run(function, kind: str, arguments: tuple, **settings) -> tuple[np.ndarray, np.ndarray]:
    """One sequence through a kernel or its reference; decode takes it as a batch of one."""
    if kind == "context":
        return tuple(map(np.asarray, function(*arguments, **settings)))
    q, pages, table, prior, k, v, positions, rank = arguments
    lone = (q[None], pages, table[None], prior[None], k[None], v[None], positions[None], rank)
    return tuple(np.asarray(x)[0] for x in function(*lone, **settings))


@functools.cache
def compiled_reference(kind: str, case: Case):
    return jax.jit(functools.partial(PAIRS[kind].reference, **case.settings))


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_each_rank_equals_the_reference_and_all_ranks_equal_dense(kind, name, emulated):
    """At each length; pages that nobody owns, other ranks' tokens and fresh tiles are NaN."""
    case = case_of(kind, name)
    allowed = tolerance_of(case)
    for prior in priors_of(case):
        arguments = [rank_arguments(case, prior, rank) for rank in range(case.ranks)]
        partials = [run(PAIRS[kind].kernel, kind, one, **case.settings) for one in arguments]
        for one, (out, lse) in zip(arguments, partials, strict=True):
            expected_out, expected_lse = run(compiled_reference(kind, case), kind, one)
            assert_allclose(out, expected_out, rtol=0, atol=2 * allowed.out, err_msg=str(prior))
            assert_allclose(lse, expected_lse, rtol=0, atol=2 * allowed.lse, err_msg=str(prior))
        outs, lses = (jnp.asarray(np.stack(x)) for x in zip(*partials, strict=True))
        merged = PAIRS["merge"].kernel(outs, lses)
        for got, expected, atol in zip(
            merged, dense(case, prior), (allowed.out, allowed.lse), strict=True
        ):
            assert_allclose(got, expected, rtol=0, atol=2 * atol, err_msg=str(prior))


@pytest.mark.parametrize("kind", ["decode", "context"])
def test_a_rank_that_holds_nothing_returns_zero_and_minus_infinity(kind, emulated):
    case = Case(GQA64, ranks=4, interleave=4, page_size=PAGE, width=1, longest=8)
    arguments = rank_arguments(case, 2, 3)
    assert local_filled(3, 3, ranks=4, interleave=4) == 0
    out, lse = run(PAIRS[kind].kernel, kind, arguments, **case.settings)
    assert_array_equal(out, np.zeros_like(out))
    assert_array_equal(lse, np.full_like(lse, -np.inf))


def test_sequences_of_a_batch_do_not_see_each_other(emulated):
    """A row's result is the same alone and beside others, one of them empty."""
    case = DECODE["gqa64-2x4"]
    rows = [rank_arguments(case, prior, 1) for prior in (17, 0, 40)]
    pages = jnp.concatenate([row[1] for row in rows])
    size = rows[0][1].shape[0]
    tables = [row[2] + index * size for index, row in enumerate(rows)]
    columns = [jnp.stack([row[at] for row in rows]) for at in (0, 3, 4, 5, 6)]
    q, priors, k, v, positions = columns
    out, lse = PAIRS["decode"].kernel(
        q, pages, jnp.stack(tables), priors, k, v, positions, 1, **case.settings
    )
    for index, row in enumerate(rows):
        alone = run(PAIRS["decode"].kernel, "decode", row, **case.settings)
        assert_array_equal(out[index], alone[0])
        assert_array_equal(lse[index], alone[1])


@pytest.mark.parametrize(
    ("kind", "name"), [("decode", "gqa64-2x4"), ("context", "gqa64-2x4-tiles")]
)
def test_two_cores_give_the_bits_of_one(kind, name, emulated):
    case = case_of(kind, name)
    arguments = rank_arguments(case, 33, 1)
    one, two = (run(PAIRS[kind].kernel, kind, arguments, **case.settings, lnc=n) for n in (1, 2))
    assert_array_equal(one[0], two[0])
    assert_array_equal(one[1], two[1])


def test_large_scores_do_not_overflow(emulated):
    """exp of a score of a thousand is infinite in float32; its softmax is not."""
    case = DECODE["gqa64-1"]
    q, *rest = rank_arguments(case, 40, 0)
    arguments = (q * 200, *rest)
    out, lse = run(PAIRS["decode"].kernel, "decode", arguments, **case.settings)
    expected_out, expected_lse = run(compiled_reference("decode", case), "decode", arguments)
    assert float(np.max(lse)) > 100
    allowed = tolerance_of(case)
    assert_allclose(lse, expected_lse, rtol=0, atol=400 * allowed.lse)
    assert_allclose(out, expected_out, rtol=0, atol=400 * allowed.out)


def partials(num: int, rows: tuple[int, ...], width: int, seed: int = 0):
    random = np.random.default_rng(seed)
    outs = random.standard_normal((num, *rows, width)).astype(np.float32)
    lses = (5 * random.standard_normal((num, *rows))).astype(np.float32)
    return outs, lses


def merged_by(function, outs, lses, **options) -> tuple[np.ndarray, np.ndarray]:
    return tuple(map(np.asarray, function(jnp.asarray(outs), jnp.asarray(lses), **options)))


@pytest.mark.parametrize("rows", [(1, 1), (3, 8), (127,), (128,), (129,)])
@pytest.mark.parametrize("num", [1, 2, 8])
def test_merge_equals_its_reference_with_empty_and_broken_partials(num, rows, emulated):
    outs, lses = partials(num, rows, 16)
    lses[(0, *(0 for _ in rows))] = -np.inf
    lses[-1, -1] = np.nan
    outs[0][(0,) * len(rows)] = np.nan
    outs[-1, -1] = np.nan
    pair = PAIRS["merge"]
    merged, expected = (merged_by(f, outs, lses) for f in (pair.kernel, pair.reference))
    eps = float(np.finfo(np.float32).eps)
    largest = float(np.max(np.abs(outs[np.isfinite(outs)]), initial=0))
    score = float(np.max(np.abs(lses[np.isfinite(lses)]), initial=0))
    # Each weight is off by the rounding of its exponent; num of them are added, on either side.
    atol = 2 * eps * (num + score + 2)
    assert_allclose(merged[1], expected[1], rtol=0, atol=atol)
    assert_allclose(merged[0], expected[0], rtol=0, atol=2 * largest * atol)


def test_a_merge_of_empty_partials_is_empty(emulated):
    outs, lses = partials(3, (5,), 8)
    out, lse = merged_by(PAIRS["merge"].kernel, outs * np.nan, np.full_like(lses, -np.inf))
    assert_array_equal(out, np.zeros((5, 8)))
    assert_array_equal(lse, np.full(5, -np.inf))


def test_a_merge_along_another_axis_and_on_two_cores(emulated):
    outs, lses = partials(4, (130,), 8)
    kernel = PAIRS["merge"].kernel
    out, lse = merged_by(kernel, outs, lses)
    moved = merged_by(kernel, np.moveaxis(outs, 0, 1), np.moveaxis(lses, 0, 1), axis=1, lnc=2)
    assert_array_equal(moved[0], out)
    assert_array_equal(moved[1], lse)


@pytest.mark.parametrize("heads", [GQA64, MQA128, MLA], ids=["gqa64", "mqa128", "mla"])
@pytest.mark.parametrize("width", [1, 40])
def test_estimates_of_instructions_and_memory_are_not_below_the_truth(heads, width, emulated):
    """One KV head on one core; the emulation never frees, so one step is what it allocated."""
    case = Case(heads, 1, 1, PAGE, width=width, longest=40)
    run(PAIRS["context"].kernel, "context", rank_arguments(case, 40, 0), **case.settings)
    rows = width * heads.query_heads // heads.kv_heads
    keys = case.num_entries * case.page_size
    widths = (heads.key_width, heads.value_width)
    counted = sum(tiling.num_instructions(rows, n, *widths) for n in (keys, width))
    assert emulated.instructions <= heads.kv_heads * counted
    tiles = len(tiling.cut(rows, tiling.PARTITIONS))
    steps = 2 * tiles  # prior and current, and a tile's part of a step for each tile
    planned = tiling.state_bytes(rows, *widths, 4) + steps * tiling.step_bytes(*widths, 4)
    assert emulated.sbuf_bytes <= heads.kv_heads * planned


def differs(prior: int) -> bool:
    """Whether rank 1's decode after ``prior`` tokens is beyond the tolerance of its reference."""
    case = DECODE["gqa64-2x4"]
    arguments = rank_arguments(case, prior, 1)
    out, lse = run(PAIRS["decode"].kernel, "decode", arguments, **case.settings)
    expected_out, expected_lse = run(compiled_reference("decode", case), "decode", arguments)
    allowed = tolerance_of(case)
    is_close = np.allclose(out, expected_out, rtol=0, atol=2 * allowed.out)
    return not (is_close and np.allclose(lse, expected_lse, rtol=0, atol=2 * allowed.lse))


@pytest.mark.parametrize(
    ("name", "value", "prior"),
    [
        ("NEVER", 1.0, 36),  # the rank's own current token counts as hidden
        ("LOWEST_HIGHEST", -2.0e30, 0),  # hidden scores count in a row that sees nothing
        ("HIDDEN_SCORE", 0.0, 33),  # nothing is hidden
        ("LEAST_TOTAL", 1.0e9, 33),  # real sums are replaced
    ],
)
def test_a_wrong_constant_is_noticed(name, value, prior, emulated, monkeypatch):
    """The comparison with the reference can fail: each constant of the masks matters."""
    assert not differs(prior)
    for module in [name for name in sys.modules if name.startswith("neuron.nki.kernels")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(tiling, name, value)
    assert differs(prior)


def tile(rows: int, columns: int, buffer: str = "sbuf", dtype=np.float32) -> Tensor:
    return Tensor(np.ones((rows, columns), dtype), buffer)


@pytest.mark.parametrize(
    ("violation", "rule"),
    [
        (lambda nl, nisa: nl.ndarray((129, 1), nl.float32), "128 partitions"),
        (lambda nl, nisa: nl.ndarray((1, 513), nl.float32, nl.psum), "one bank"),
        (lambda nl, nisa: tile(4, 4)[0:5, :], "inside the tensor"),
        (lambda nl, nisa: tile(1, 4).broadcast(0, 4), "partitions cannot be broadcast"),
        (lambda nl, nisa: nisa.dma_copy(tile(2, 2, "psum"), tile(2, 2)), "HBM and SBUF"),
        (lambda nl, nisa: nisa.tensor_copy(tile(2, 2), tile(2, 3)), "shapes agree"),
        (lambda nl, nisa: nisa.tensor_copy(tile(2, 2), tile(2, 2, "hbm")), "SBUF and PSUM"),
        (
            lambda nl, nisa: nisa.nc_matmul(tile(2, 2), tile(2, 2), tile(2, 2), accumulate=False),
            "products go to PSUM",
        ),
        (
            lambda nl, nisa: tile(1, 2, "hbm").vector_select(0, tile(1, 1, dtype=np.int32)),
            "out of range",
        ),
    ],
)
def test_the_emulation_refuses_what_the_documentation_forbids(violation, rule, emulated):
    import nki.isa
    import nki.language

    with pytest.raises(NkiViolation, match=rule):
        violation(nki.language, nki.isa)
