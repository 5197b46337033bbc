"""One segment on one rank, merged over the ranks, against dense attention to the whole sequence.

A case is one compiled program for all ranks; prior and segment lengths are traced. What nobody may
read is NaN.
"""

import functools
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.attention import attention_reference, merge_partials, segment, segment_attention
from tests.attention.sequences import Pages, Tolerance, as_bits, deal, lay_out, pairwise

WIDTH = 64  # static number of tokens of a segment; lengths below it are padded
LONGEST_PRIOR = 300
SCALE = 0.3  # not a power of two: bfloat16 would round it
LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class Heads:
    name: str
    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    values_are_keys: bool = False  # the first columns of the keys, stored once (MLA)

    def __str__(self) -> str:
        return self.name


GQA, MHA, MQA = Heads("gqa", 4, 2, 8, 8), Heads("mha", 2, 2, 8, 4), Heads("mqa", 3, 1, 8, 8)
MLA = Heads("mla", 4, 1, 12, 8, values_are_keys=True)


@dataclass(frozen=True)
class Case:
    ranks: int
    interleave: int | str
    page_size: int
    heads: Heads
    has_layers: bool
    dtype: str
    lengths: str

    def __str__(self) -> str:
        pages = "layered" if self.has_layers else "flat"
        split = f"{self.ranks}x{self.interleave}-p{self.page_size}"
        return f"{split}-{self.heads}-{pages}-{self.dtype}-{self.lengths}"

    @property
    def split(self) -> dict[str, int]:
        interleave = self.page_size if self.interleave == "page" else int(self.interleave)
        return {"ranks": self.ranks, "interleave": interleave}

    @property
    def num_entries(self) -> int:
        return -(-(LONGEST_PRIOR + WIDTH) // (self.ranks * self.page_size)) + 2

    @property
    def priors(self) -> list[int]:
        ranks, page = self.ranks, self.page_size
        edges = {0, 1, page - 1, page, page + 1, ranks - 1, ranks, LONGEST_PRIOR}
        return sorted(edges | {ranks * page - 1, ranks * page, ranks * page + 1})


FACTORS = {
    "ranks": (1, 2, 3, 4, 8),
    "interleave": (1, 4, "page"),
    "page_size": (4, 8, 16),
    "heads": (GQA, MHA, MQA, MLA),
    "has_layers": (False, True),
    "dtype": ("float32", "bfloat16"),
    "lengths": ("int32", "uint32"),
}
COVER = [Case(**choice) for choice in pairwise(FACTORS)]
EVERYTHING = [
    Case(ranks, interleave, page_size, heads, has_layers, dtype, "uint32")
    for ranks in FACTORS["ranks"]
    for page_size in FACTORS["page_size"]
    for interleave in ((1, "page") if page_size == 4 else FACTORS["interleave"])
    for heads in FACTORS["heads"]
    for has_layers in FACTORS["has_layers"]
    for dtype in FACTORS["dtype"]
]


@functools.cache
def sequence(heads: Heads, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k, v of the longest sequence, in ``dtype``."""
    random = np.random.default_rng(7)
    length = LONGEST_PRIOR + WIDTH
    q = random.standard_normal((length, heads.num_heads, heads.key_width))
    k = random.standard_normal((length, heads.num_kv_heads, heads.key_width))
    v = random.standard_normal((length, heads.num_kv_heads, heads.value_width))
    if heads.values_are_keys:
        v = k[..., : heads.value_width]
    return tuple(jnp.asarray(x, jnp.float32).astype(dtype) for x in (q, k, v))


@functools.cache
def expected(heads: Heads, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Dense out and lse of every position of the longest sequence."""
    q, k, v = sequence(heads, dtype)
    positions = jnp.arange(len(q), dtype=jnp.int32)
    reference = jax.jit(functools.partial(attention_reference, scale=SCALE))
    return jax.tree.map(np.asarray, reference(q, k, v, positions, positions))


def tolerance_of(heads: Heads, dtype: str) -> Tolerance:
    q, k, v = (np.abs(np.asarray(x, np.float32)) for x in sequence(heads, dtype))
    score = SCALE * float(np.sum(q.max((0, 1)) * k.max((0, 1))))
    terms = LONGEST_PRIOR + WIDTH + 8
    return Tolerance(heads.key_width, terms, score, float(v.max()), dtype == "bfloat16")


_merge = jax.jit(merge_partials)


def compile_ranks(case: Case):
    """Partials of all ranks, of (rank, pages, k, v, positions) by rank and q, table, prior."""

    def attend(rank, pages, k, v, positions, q, table, prior):
        return segment_attention(
            q,
            pages,
            table,
            prior,
            k,
            v,
            positions,
            rank,
            **case.split,
            scale=SCALE,
            layer=LAYER if case.has_layers else None,
        )

    return jax.jit(jax.vmap(attend, in_axes=(0, 0, 0, 0, 0, None, None, None)))


def pages_of(case: Case, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Table, and pages of all ranks as they are stored, with the first ``num_tokens`` tokens."""
    _, k, v = (np.asarray(x, np.float32) for x in sequence(case.heads, case.dtype))
    rows = k if case.heads.values_are_keys else np.concatenate([k, v], axis=-1)
    pages: Pages = lay_out(
        rows,
        num_tokens,
        **case.split,
        page_size=case.page_size,
        num_entries=case.num_entries,
        generator=np.random.default_rng(5),
    )
    stored = as_bits(pages.rows, jnp.dtype(case.dtype))
    if case.has_layers:
        nothing = as_bits(np.full_like(pages.rows, np.nan), jnp.dtype(case.dtype))
        layers = [stored if layer == LAYER else nothing for layer in range(LAYERS)]
        stored = np.stack(layers, axis=2)
    return pages.table, stored


def own_tokens(case: Case, prior: int, length: int):
    """Keys, values and positions [ranks, WIDTH, ...] of the segment; each rank has all of them.

    Past the end there is padding: zeros at positions after all queries.
    """
    _, k, v = (np.asarray(x[prior : prior + WIDTH], np.float32) for x in sequence_of(case))
    is_real = np.arange(len(k)) < length
    k, v = (np.where(is_real[:, None, None], x, 0) for x in (k, v))
    k, v = (np.pad(x, ((0, WIDTH - len(x)), (0, 0), (0, 0))) for x in (k, v))
    positions = (prior + np.arange(WIDTH)).astype(case.lengths)
    return tuple(
        np.broadcast_to(x, (case.ranks, *x.shape))
        for x in (k.astype(jnp.dtype(case.dtype)), v.astype(jnp.dtype(case.dtype)), positions)
    )


def sequence_of(case: Case):
    return sequence(case.heads, case.dtype)


def partials(case: Case, program, prior: int, length: int, written: int = 0):
    """Out and lse [ranks, length, ...]; ``written`` current tokens are already in the pages."""
    table, pages = pages_of(case, prior + written)
    q = np.zeros((WIDTH, *sequence_of(case)[0].shape[1:]), jnp.dtype(case.dtype))
    q[:length] = sequence_of(case)[0][prior : prior + length]
    ranks = np.arange(case.ranks, dtype=case.lengths)
    out, lse = program(
        ranks,
        pages,
        *own_tokens(case, prior, length),
        q,
        table,
        np.asarray(prior, case.lengths),
    )
    assert out.dtype == lse.dtype == jnp.float32
    return np.asarray(out)[:, :length], np.asarray(lse)[:, :length]


def check_empty_partials(case: Case, prior: int, out: np.ndarray, lse: np.ndarray) -> None:
    """A rank sees nothing exactly until its first token; then out is 0 and lse is −inf."""
    hands = deal(LONGEST_PRIOR + WIDTH, **case.split)
    for rank, hand in enumerate(hands):
        first = hand[0] if len(hand) else np.inf
        sees_nothing = prior + np.arange(lse.shape[1]) < first
        assert (np.isneginf(lse[rank]) == sees_nothing[:, None]).all()
        assert (out[rank][sees_nothing] == 0).all()


def check_segment(case: Case, program, prior: int, length: int) -> None:
    out, lse = partials(case, program, prior, length)
    check_empty_partials(case, prior, out, lse)
    check_merged(case, prior, length, jnp.asarray(out), jnp.asarray(lse))


def check_merged(case: Case, prior: int, length: int, outs: jax.Array, lses: jax.Array) -> None:
    merged = _merge(outs, lses)
    tolerance = tolerance_of(case.heads, case.dtype)
    reference = [x[prior : prior + length] for x in expected(case.heads, case.dtype)]
    np.testing.assert_allclose(merged[0], reference[0], rtol=0, atol=tolerance.out)
    np.testing.assert_allclose(merged[1], reference[1], rtol=0, atol=tolerance.lse)


def check_case(case: Case, lengths_per_prior: int) -> None:
    """All priors, each with some of the segment lengths in turn."""
    program, lengths = compile_ranks(case), itertools.cycle((1, 3, 17, WIDTH))
    for prior in case.priors:
        for length in itertools.islice(lengths, lengths_per_prior):
            check_segment(case, program, prior, length)
    for prior in (0, case.page_size + 1, LONGEST_PRIOR):
        before, after = (partials(case, program, prior, 17, written) for written in (0, 17))
        np.testing.assert_array_equal(before[0], after[0])
        np.testing.assert_array_equal(before[1], after[1])


@pytest.fixture
def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several reads per sequence, the last of them over the end of the table."""
    monkeypatch.setattr(segment, "READ_TOKENS", {False: 48, True: 48})


@pytest.mark.usefixtures("short_reads")
@pytest.mark.parametrize("case", COVER, ids=str)
def test_all_ranks_together_give_dense_attention(case: Case):
    check_case(case, 2)


@pytest.mark.matrix
@pytest.mark.usefixtures("short_reads")
@pytest.mark.parametrize("case", EVERYTHING, ids=str)
def test_all_ranks_together_give_dense_attention_in_every_combination(case: Case):
    check_case(case, 4)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("prior", [0, 2, 41])
def test_lengths_may_be_python_ints_and_segments_of_any_width(prior, length):
    case = Case(3, 4, 8, GQA, False, "float32", "int32")
    table, pages = pages_of(case, prior)
    q = sequence_of(case)[0][prior : prior + length]
    keys, values, positions = (x[:, :length] for x in own_tokens(case, prior, length))
    parts = [
        segment_attention(
            q,
            jnp.asarray(pages[rank]),
            jnp.asarray(table),
            prior,
            jnp.asarray(keys[rank]),
            jnp.asarray(values[rank]),
            jnp.asarray(positions[rank]),
            rank,
            **case.split,
            scale=SCALE,
        )
        for rank in range(case.ranks)
    ]
    check_merged(case, prior, length, *map(jnp.stack, zip(*parts, strict=True)))


def test_foreign_current_tokens_may_be_nan():
    """A rank need not have computed the tokens of others."""
    case = Case(2, 4, 8, GQA, False, "float32", "uint32")
    table, pages = pages_of(case, 5)
    keys, values, positions = own_tokens(case, 5, 17)
    is_foreign = positions // 4 % 2 != np.arange(2)[:, None]
    keys, values = (np.where(is_foreign[..., None, None], np.nan, x) for x in (keys, values))
    q = np.pad(sequence_of(case)[0][5:22], ((0, WIDTH - 17), (0, 0), (0, 0)))
    ranks = np.arange(2, dtype=np.uint32)
    out, lse = compile_ranks(case)(ranks, pages, keys, values, positions, q, table, np.uint32(5))
    check_merged(case, 5, 17, out[:, :17], lse[:, :17])
