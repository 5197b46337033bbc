"""Attention to expanded latents equals dense attention to keys and values that are made first.

Whatever the mesh, wherever the tokens lie, and whether a segment's own rows come from registers or
from pages. What nobody may read is NaN.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dcpjax.attention import attention_reference, expanded
from dcpjax.attention.block import Block, TokenSharding, make_block
from dcpjax.attention.decode import gather_heads, gather_weights, merge_heads, read_block
from dcpjax.attention.expanded import UpProjections, expanded_attention
from dcpjax.attention.indexer import choose_everything
from dcpjax.cache.pool import POOL_SPEC
from dcpjax.layout import local_filled
from dcpjax.mesh import ALL_RANKS, DCP, decode_mesh
from tests.attention import test_sparse
from tests.attention.test_sparse import LAYER, LONGEST, NUM_PAGES, PAGE_SIZE, SCALE, WHOLE

LATENT, ROPE, NOPE, VALUES = 8, 4, 5, 7
assert LATENT + ROPE == test_sparse.WIDTH
TOLERANCE = 2e-6
"""Of the largest value: a dozen roundings of it."""
READ_TOKENS = 2 * PAGE_SIZE


@dataclass(frozen=True)
class Case(test_sparse.Case):
    """``keys`` is where a segment's own rows are from: registers or pages."""

    exchange: str = "ag_rs"

    def __str__(self) -> str:
        return f"{super().__str__()}-{self.exchange}"


# Lengths around pages and reads, nothing before, a single token, an unused row.
SEGMENTS = [
    (1, ((READ_TOKENS, 1), (0, 1), (0, 0))),
    (5, ((PAGE_SIZE - 1, 5), (0, 3), (PAGE_SIZE, 1), (3, 4))),
    (48, ((61, 48), (0, 47), (READ_TOKENS * 4 - 1, 33), (READ_TOKENS + 1, 2))),
]
CASES = [
    Case(dcp, interleave, own, width, segments, exchange=exchange)
    for dcp, interleave, exchange in [
        (1, 1, "ag_rs"),
        (2, 1, "a2a"),
        (3, 4, "ag_rs"),
        (4, 8, "a2a"),
    ]
    for number, (width, segments) in enumerate(SEGMENTS)
    for own in [("registers", "pages")[(number + dcp) % 2]]
]


@pytest.fixture(autouse=True)
def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several."""
    monkeypatch.setattr(expanded, "READ_TOKENS", READ_TOKENS)


@functools.cache
def weights_of(num_heads: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(num_heads)
    shapes = {
        "q": (4, LONGEST, num_heads, NOPE + ROPE),
        "k_b": (num_heads, NOPE, LATENT),
        "v_b": (num_heads, LATENT, VALUES),
    }
    return {name: random.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def queries_of(case: Case) -> np.ndarray:
    """[rows · width, heads, D]; padding is NaN."""
    q = weights_of(case.num_heads)["q"]
    block = np.full((len(case.segments), case.width, *q.shape[2:]), np.nan, np.float32)
    for row, (prior, real) in enumerate(case.segments):
        block[row, :real] = q[row, prior : prior + real]
    return block.reshape(-1, *q.shape[2:])


def expected_of(case: Case) -> np.ndarray:
    """[rows, width, heads, VALUES] by the reference; zeros for padding."""
    weights = weights_of(case.num_heads)
    cached = test_sparse.sequences(case.num_heads, len(case.segments))["rows"][:, :, 0]
    out = np.zeros((len(case.segments), case.width, case.num_heads, VALUES), np.float32)
    for row, (prior, real) in enumerate(case.segments):
        positions = np.arange(prior + real)
        latents, rotated = np.split(cached[row, positions], (LATENT,), axis=-1)
        keys = np.einsum("sr,hdr->shd", latents, weights["k_b"])
        shared = np.broadcast_to(rotated[:, None], (*keys.shape[:2], ROPE))
        everything = (
            weights["q"][row, prior : prior + real],
            np.concatenate([keys, shared], axis=-1),
            np.einsum("sr,hrd->shd", latents, weights["v_b"]),
            positions[prior:],
            positions,
        )
        if real:
            out[row, :real] = attention_reference(*map(jnp.asarray, everything), scale=SCALE)[0]
    return out


def attend_on_rank(case: Case, q, k_b, v_b, rows, pool, tables, priors, counts, rank):
    block = make_block(case.width, tables, priors, counts, rank[0], case.sharding)
    if case.keys == "registers":
        own = block.take_own(rows)
    else:
        own = read_block(pool, LAYER, block, q.dtype)
    up = UpProjections(*gather_weights((k_b, v_b), block))
    q = gather_heads(q, block)
    out, lse = expanded_attention(q, own, pool, LAYER, block, up, scale=SCALE)
    return merge_heads(out, lse, block, case.exchange)


def found_of(case: Case) -> np.ndarray:
    data, tables = (
        test_sparse.sequences(case.num_heads, len(case.segments)),
        test_sparse.tables_of(case),
    )
    weights = weights_of(case.num_heads)
    heads, of_head = PartitionSpec(None, ALL_RANKS), PartitionSpec(ALL_RANKS)
    step = jax.shard_map(
        functools.partial(attend_on_rank, case),
        mesh=decode_mesh(jax.devices()[: case.dcp], case.dcp),
        in_specs=(heads, of_head, of_head, WHOLE, POOL_SPEC, *(WHOLE,) * 3, PartitionSpec(DCP)),
        out_specs=heads,
        check_vma=False,
    )
    out = jax.jit(step)(
        queries_of(case),
        weights["k_b"],
        weights["v_b"],
        test_sparse.tokens_of(case, "rows"),
        test_sparse.pool_of(case, tables, data["rows"], case.sharding),
        tables,
        *(np.asarray(part, np.uint32) for part in zip(*case.segments, strict=True)),
        np.arange(case.dcp, dtype=np.uint32),
    )
    return np.asarray(out).reshape(len(case.segments), case.width, case.num_heads, VALUES)


def check(case: Case) -> None:
    found, expected = found_of(case), expected_of(case)
    limit = TOLERANCE * np.abs(expected).max()
    for row, (_, real) in enumerate(case.segments):
        np.testing.assert_allclose(found[row, :real], expected[row, :real], atol=limit)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_expanded_attention_equals_the_reference(case):
    check(case)


def rope_first(original, self, rows):
    keys, values = original(self, rows)
    return jnp.concatenate([keys[..., NOPE:], keys[..., :NOPE]], axis=-1), values


def latent_and_rope_exchanged(original, self, rows):
    return original(self, jnp.concatenate([rows[..., ROPE:], rows[..., :ROPE]], axis=-1))


def heads_in_another_order(original, self, rows):
    keys, values = original(self, rows)
    return keys[::-1], values


MISTAKES = [rope_first, latent_and_rope_exchanged, heads_in_another_order]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_split_is_seen(mistake, monkeypatch):
    original = UpProjections.expand
    monkeypatch.setattr(UpProjections, "expand", lambda self, rows: mistake(original, self, rows))
    with pytest.raises(AssertionError):
        check(Case(2, 1, "registers", 5, ((7, 5), (0, 3))))


def test_weights_of_one_rank_are_not_enough(monkeypatch):
    """Heads of other ranks have weights of their own."""
    monkeypatch.setitem(
        attend_on_rank.__globals__,
        "gather_weights",
        lambda weights, block: tuple(jnp.concatenate([one, one]) for one in weights),
    )
    with pytest.raises(AssertionError):
        check(Case(2, 1, "registers", 5, ((7, 5), (0, 3))))


@pytest.mark.parametrize("ranks, interleave", [(1, 1), (2, 1), (3, 4)])
def test_everything_is_what_a_rank_has_up_to_the_query(ranks, interleave):
    top_k, priors, counts = 30, (0, 7, 20), (4, 3, 10)
    tables = jnp.zeros((3, 8), jnp.int32)
    sharding = TokenSharding(ranks, interleave, PAGE_SIZE, NUM_PAGES)
    for rank in range(ranks):
        block: Block = make_block(
            10,
            tables,
            jnp.asarray(priors, jnp.uint32),
            jnp.asarray(counts, jnp.uint32),
            jnp.uint32(rank),
            sharding,
        )
        choice = choose_everything(block, top_k)
        for row, (prior, count) in enumerate(zip(priors, counts, strict=True)):
            for token in range(count):
                held = local_filled(prior + token + 1, rank, ranks=ranks, interleave=interleave)
                chosen = np.asarray(choice.indices)[row, token, : choice.counts[row, token]]
                assert chosen.tolist() == list(range(held))
