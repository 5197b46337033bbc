"""The indexer's choice and the attention to it equal one device's, whatever the mesh.

Scores are small integers, so that many are equal and the rule for ties decides; pages that nobody
may read are full of NaN.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dcpjax.attention.block import Block, TokenSharding, make_block
from dcpjax.attention.chosen import attend_chosen, choose
from dcpjax.attention.decode import merge_heads
from dcpjax.attention.indexer import Query, index_scores
from dcpjax.cache.pool import POOL_SPEC
from dcpjax.form import FORMS, StepForm
from dcpjax.layout import slot_mapping
from dcpjax.mesh import ALL_RANKS, DCP, decode_mesh

PAGE_SIZE, NUM_PAGES, LAYER, TOP_K = 8, 40, 1, 16
WIDTH, VALUES, INDEX_HEADS, INDEX_WIDTH = 12, 8, 4, 6
SCALE, LONGEST = 0.3, 150
WHOLE = PartitionSpec()


@dataclass(frozen=True)
class Case:
    dcp: int
    interleave: int
    keys: str  # whole or sharded
    width: int
    segments: tuple[tuple[int, int], ...]  # (prior, real tokens) of each row
    form: str = "dynamic"

    def __str__(self) -> str:
        shape = f"{len(self.segments)}x{self.width}"
        return f"dcp{self.dcp}-i{self.interleave}-{self.keys}-{shape}-{self.form}"

    @property
    def step_form(self) -> StepForm:
        """With reads of two or three pages: static ones are several, and the last is not full."""
        tokens = 3 * PAGE_SIZE if self.form == "unrolled" else 2 * PAGE_SIZE
        return dataclasses.replace(FORMS[self.form], read_tokens=tokens)

    @property
    def num_heads(self) -> int:
        return 2 * self.dcp

    @property
    def sharding(self) -> TokenSharding:
        return TokenSharding(self.dcp, self.interleave, PAGE_SIZE, NUM_PAGES)

    @property
    def key_sharding(self) -> TokenSharding:
        if self.keys == "sharded":
            return self.sharding
        return TokenSharding(1, 1, PAGE_SIZE * self.dcp, NUM_PAGES)


DECODE = ((100, 1), (0, 1), (0, 0), (15, 1), (37, 1))
CASES = [
    Case(dcp, interleave, keys, width, segments)
    for dcp, interleave in [(1, 1), (2, 1), (2, 8), (3, 4), (4, 8), (8, 1)]
    for keys in ("whole", "sharded")
    for width, segments in [(1, DECODE), (5, ((7, 5), (0, 3))), (48, ((61, 48),))]
    if keys == "sharded" or dcp > 1
]
CASES += [
    *(
        dataclasses.replace(case, form="static")
        for case in CASES
        if (case.dcp, case.interleave) in ((1, 1), (3, 4))
    ),
    Case(2, 1, "whole", 5, ((7, 5), (0, 3)), "unrolled"),
]


@functools.cache
def sequences(num_heads: int, rows: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(rows)

    def integers(*shape: int) -> np.ndarray:
        return random.integers(-1, 2, (rows, LONGEST, *shape)).astype(np.float32)

    return {
        "q": random.standard_normal((rows, LONGEST, num_heads, WIDTH)).astype(np.float32),
        "rows": random.standard_normal((rows, LONGEST, 1, WIDTH)).astype(np.float32),
        "index_q": integers(INDEX_HEADS, INDEX_WIDTH),
        "weights": integers(INDEX_HEADS),
        "keys": integers(1, INDEX_WIDTH),
    }


def expected_of(case: Case) -> np.ndarray:
    """[tokens, heads, VALUES] by brute force; zeros for padding."""
    data = sequences(case.num_heads, len(case.segments))
    out = np.zeros((len(case.segments), case.width, case.num_heads, VALUES), np.float32)
    for row, (prior, real) in enumerate(case.segments):
        one = {name: values[row].astype(np.float64) for name, values in data.items()}
        for token in range(real):
            position = prior + token
            seen = slice(0, position + 1)
            products = np.einsum("hd,skd->hs", one["index_q"][position], one["keys"][seen])
            scores = one["weights"][position] @ np.maximum(products, 0)
            chosen = np.lexsort((np.arange(position + 1), -scores))[:TOP_K]
            rows = one["rows"][chosen, 0]
            logits = SCALE * one["q"][position] @ rows.T
            exps = np.exp(logits - logits.max(axis=1, keepdims=True))
            out[row, token] = exps / exps.sum(axis=1, keepdims=True) @ rows[:, :VALUES]
    return out.reshape(-1, case.num_heads, VALUES)


def tables_of(case: Case) -> np.ndarray:
    ids = iter(np.random.default_rng(1).permutation(NUM_PAGES).tolist())
    tables = np.full((len(case.segments), LONGEST // (case.dcp * PAGE_SIZE) + 1), NUM_PAGES)
    for row, (prior, real) in enumerate(case.segments):
        needed = -(-(prior + real) // (case.dcp * PAGE_SIZE))
        tables[row, :needed] = [next(ids) for _ in range(needed)]
    return tables.astype(np.int32)


def pool_of(case: Case, tables: np.ndarray, values: np.ndarray, sharding: TokenSharding):
    """[dcp · pages, 2, 1, P, W]: the tokens of all rows, NaN elsewhere."""
    shape = (case.dcp, NUM_PAGES + 1, 2, 1, sharding.page_size, values.shape[-1])
    pool = np.full(shape, np.nan, np.float32)
    for row, (prior, real) in enumerate(case.segments):
        positions = np.arange(prior + real)
        for rank in range(case.dcp):
            slots = slot_mapping(
                tables[row],
                positions,
                rank if sharding.ranks > 1 else 0,
                ranks=sharding.ranks,
                interleave=sharding.interleave,
                page_size=sharding.page_size,
            )
            mine, slots = positions[slots >= 0], slots[slots >= 0]
            pages, offsets = slots // sharding.page_size, slots % sharding.page_size
            pool[rank][pages, LAYER, :, offsets] = values[row, mine]
    return pool.reshape(-1, *shape[2:])


def tokens_of(case: Case, name: str) -> np.ndarray:
    """[rows · width, ...] of the segments; padding is NaN."""
    values = sequences(case.num_heads, len(case.segments))[name]
    block = np.full((len(case.segments), case.width, *values.shape[2:]), np.nan, np.float32)
    for row, (prior, real) in enumerate(case.segments):
        block[row, :real] = values[row, prior : prior + real]
    return block.reshape(-1, *values.shape[2:])


def attend_on_rank(case: Case, q, index_q, weights, pool, keys, tables, priors, counts, rank):
    block = make_block(case.width, tables, priors, counts, rank[0], case.sharding)
    key_block: Block = block.whole() if case.keys == "whole" else block
    query = Query(index_q, weights, 1.0, TOP_K)
    form = case.step_form
    choice = choose(query, keys, LAYER, key_block, block, form)
    if case.dcp > 1:
        q = jax.lax.all_gather(q, DCP, axis=1, tiled=True)
    sizes = {"value_width": VALUES, "scale": SCALE}
    out, lse = attend_chosen(q, pool, LAYER, block, choice, form=form, **sizes)
    return merge_heads(out, lse, block, "ag_rs")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sparse_attention_equals_one_device(case):
    data, tables = sequences(case.num_heads, len(case.segments)), tables_of(case)
    heads = PartitionSpec(None, ALL_RANKS)
    step = jax.shard_map(
        functools.partial(attend_on_rank, case),
        mesh=decode_mesh(jax.devices()[: case.dcp], case.dcp),
        in_specs=(heads, WHOLE, WHOLE, POOL_SPEC, POOL_SPEC, WHOLE, WHOLE, WHOLE)
        + (PartitionSpec(DCP),),
        out_specs=heads,
        check_vma=False,
    )
    out = jax.jit(step)(
        *(tokens_of(case, name) for name in ("q", "index_q", "weights")),
        pool_of(case, tables, data["rows"], case.sharding),
        pool_of(case, tables, data["keys"], case.key_sharding),
        tables,
        *(np.asarray(part, np.uint32) for part in zip(*case.segments, strict=True)),
        np.arange(case.dcp, dtype=np.uint32),
    )
    np.testing.assert_allclose(np.asarray(out), expected_of(case), atol=2e-6)


def test_scores_of_many_and_few_queries_are_the_same():
    random = np.random.default_rng(0)
    q, weights, keys = (
        jnp.asarray(random.standard_normal(shape), jnp.float32)
        for shape in [(40, 4, 6), (40, 4), (9, 6)]
    )
    many = index_scores(q, weights, keys, 0.4)
    few = jnp.concatenate([index_scores(q[:8], weights[:8], keys, 0.4), many[8:]])
    by_hand = np.einsum(
        "th,ths->ts", weights, np.maximum(0.4 * np.einsum("thd,sd->ths", q, keys), 0)
    )
    np.testing.assert_allclose(many, by_hand, atol=1e-5)
    np.testing.assert_allclose(few, by_hand, atol=1e-5)


def test_the_union_of_local_choices_is_another_one():
    """facts: two ranks, top-1; keys 1, .9 | .95, .85 as the ranks have them."""
    scores = np.array([1.0, 0.9, 0.95, 0.85])
    union = {int(np.argmax(np.where(np.arange(4) % 2 == rank, scores, 0))) for rank in (0, 1)}
    assert union != {int(np.argmax(scores))}
