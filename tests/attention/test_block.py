"""Blocks on meshes: writes go where the layout says, and attention equals one device's.

Rows of different lengths share a block, one of them unused. The pool is full of a pattern that
nobody may read, and padding is NaN.
"""

import functools
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dcpjax.attention import attention_reference
from dcpjax.attention.block import TokenSharding, make_block
from dcpjax.attention.decode import decode_attention, write_block
from dcpjax.attention.prefill import gather_tokens, prefill_attention
from dcpjax.cache.pool import POOL_SPEC
from dcpjax.layout import slot_mapping
from dcpjax.mesh import DCP, PCP, TP, WORLD, decode_mesh, prefill_mesh
from tests.attention.sequences import Tolerance, pairwise

KEY_WIDTH = VALUE_WIDTH = 8
QUERIES_PER_KV_HEAD = 8  # splits over each number of DCP ranks but 3, see Shape.num_heads
PAGE_SIZE, NUM_PAGES, LAYERS, LAYER = 8, 40, 2, 1
SCALE = 0.3
LONGEST = 200
WHOLE = PartitionSpec()


@dataclass(frozen=True)
class Shape:
    """One compiled block: mesh, split of the tokens, static block shape, form of the exchange."""

    mesh: tuple[int, int]  # groups × DCP ranks
    interleave: int
    comm_backend: str
    width: str
    rows: int
    mode: str

    def __str__(self) -> str:
        groups, dcp = self.mesh
        block = f"{self.rows}x{self.width}"
        return f"{groups}x{dcp}-i{self.interleave}-{self.comm_backend}-{block}-{self.mode}"

    @property
    def dcp(self) -> int:
        return self.mesh[1]

    @property
    def ranks(self) -> int:
        return self.mesh[0] * self.dcp

    @property
    def num_kv_heads(self) -> int:
        return 2 * self.mesh[0]

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * (3 if self.dcp == 3 else self.dcp)

    @property
    def tokens(self) -> int:
        """Static width of the block."""
        cycle = self.dcp * self.interleave
        return {"one": 1, "uneven": cycle + 1, "even": 2 * cycle}[self.width]

    @property
    def sharding(self) -> TokenSharding:
        return TokenSharding(self.dcp, self.interleave, PAGE_SIZE, scratch_page=NUM_PAGES)

    @property
    def segments(self) -> list[tuple[int, int]]:
        """(prior, real tokens) of each row; no tokens: unused."""
        edge = self.dcp * PAGE_SIZE
        every = [(edge + 3, self.tokens), (0, max(1, self.tokens - 2)), (0, 0), (edge - 1, 1)]
        return every[: self.rows]


@functools.cache
def sequences(num_heads: int, num_kv_heads: int, rows: int) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(num_heads)
    q = random.standard_normal((rows, LONGEST, num_heads, KEY_WIDTH))
    k = random.standard_normal((rows, LONGEST, num_kv_heads, KEY_WIDTH))
    v = random.standard_normal((rows, LONGEST, num_kv_heads, VALUE_WIDTH))
    return tuple(x.astype(np.float32) for x in (q, k, v))


def tables_of(shape: Shape) -> np.ndarray:
    """[rows, M] page ids, distinct; the scratch page past the end and in unused rows."""
    ids = iter(np.random.default_rng(1).permutation(NUM_PAGES).tolist())
    tables = np.full((shape.rows, LONGEST // (shape.dcp * PAGE_SIZE) + 1), NUM_PAGES, np.int32)
    for row, (prior, real) in enumerate(shape.segments):
        needed = -(-(prior + real) // (shape.dcp * PAGE_SIZE))
        tables[row, :needed] = [next(ids) for _ in range(needed)]
    return tables


def pattern(shape: Shape) -> np.ndarray:
    """[dcp, pages, layers, K, P, W]: large and different everywhere."""
    size = (shape.dcp, NUM_PAGES + 1, LAYERS, shape.num_kv_heads, PAGE_SIZE)
    whole = (*size, KEY_WIDTH + VALUE_WIDTH)
    return 1e3 + np.arange(np.prod(whole), dtype=np.float32).reshape(whole)


def with_tokens(shape: Shape, pool: np.ndarray, tables: np.ndarray, ranges) -> np.ndarray:
    """The pool with the tokens ``ranges[row]`` = (start, stop) of each row at their slots."""
    _, k, v = sequences(shape.num_heads, shape.num_kv_heads, shape.rows)
    pool = pool.copy()
    for row, (start, stop) in enumerate(ranges):
        positions = np.arange(start, stop)
        for rank in range(shape.dcp):
            slots = slot_mapping(
                tables[row],
                positions,
                rank,
                ranks=shape.dcp,
                interleave=shape.interleave,
                page_size=PAGE_SIZE,
            )
            mine, slots = positions[slots >= 0], slots[slots >= 0]
            values = np.concatenate([k[row, mine], v[row, mine]], axis=-1)
            pool[rank][slots // PAGE_SIZE, LAYER, :, slots % PAGE_SIZE] = values
    return pool


def current_tokens(shape: Shape) -> list[np.ndarray]:
    """q, k, v [rows · width, heads, ·] of the segments; padding is NaN."""
    tokens = []
    for values in sequences(shape.num_heads, shape.num_kv_heads, shape.rows):
        block = np.full((shape.rows, shape.tokens, *values.shape[2:]), np.nan, np.float32)
        for row, (prior, real) in enumerate(shape.segments):
            block[row, :real] = values[row, prior : prior + real]
        tokens.append(block.reshape(-1, *values.shape[2:]))
    return tokens


def attend_on_rank(shape: Shape, q, k, v, pool, tables, priors, counts, rank):
    """The step's order: write, then attend. Out [1, ...] per rank, and the pool."""
    block = make_block(shape.tokens, tables, priors, counts, rank[0], shape.sharding)
    own_k, own_v = block.take_own(k), block.take_own(v)
    pool = write_block(pool, LAYER, block, jnp.concatenate([own_k, own_v], axis=-1))
    keywords = {"scale": SCALE, "comm_backend": shape.comm_backend}
    if shape.mode == "by_tokens":
        out = prefill_attention(block.take_own(q), own_k, own_v, pool, LAYER, block, **keywords)
        return gather_tokens(out, block).reshape(-1, *out.shape[2:])[None], pool
    gathered = shape.mode == "gathered"
    out = decode_attention(q, own_k, own_v, pool, LAYER, block, **keywords, heads_gathered=gathered)
    return out, pool


def program(shape: Shape, make_mesh=decode_mesh):
    """Jitted over global arrays; the pool is [dcp · pages, ...]."""
    groups, ranks = (PCP, TP), PartitionSpec((DCP, PCP))
    q_spec = PartitionSpec(None, WORLD if shape.mode == "by_heads" else groups)
    kv_spec = PartitionSpec(None, groups)
    by_rank = PartitionSpec(DCP, None, groups)
    out_spec = by_rank if shape.mode == "by_tokens" else PartitionSpec(None, WORLD)
    return jax.jit(
        jax.shard_map(
            functools.partial(attend_on_rank, shape),
            mesh=make_mesh(jax.devices()[: shape.ranks], shape.dcp),
            in_specs=(q_spec, kv_spec, kv_spec, POOL_SPEC, WHOLE, WHOLE, WHOLE, ranks),
            out_specs=(out_spec, POOL_SPEC),
        )
    )


def arguments(shape: Shape):
    """Those of the program, and the pool as it must be afterwards."""
    tables = tables_of(shape)
    before = with_tokens(shape, pattern(shape), tables, [(0, prior) for prior, _ in shape.segments])
    after = with_tokens(shape, before, tables, [(p, p + real) for p, real in shape.segments])
    priors, counts = np.array(shape.segments, np.uint32).T
    flat = before.reshape(-1, *before.shape[2:])
    ranks = np.arange(shape.dcp, dtype=np.uint32)
    return (*current_tokens(shape), flat, tables, priors, counts, ranks), after


@functools.cache
def compiled_reference():
    return jax.jit(functools.partial(attention_reference, scale=SCALE))


def expected(shape: Shape, row: int) -> np.ndarray:
    """[LONGEST, H, Dv] dense outputs of the whole sequence of a row."""
    positions = np.arange(LONGEST)
    heads = sequences(shape.num_heads, shape.num_kv_heads, shape.rows)
    return np.asarray(compiled_reference()(*(x[row] for x in heads), positions, positions)[0])


def check_outputs(shape: Shape, out: np.ndarray) -> None:
    q, k, v = (np.abs(x) for x in sequences(shape.num_heads, shape.num_kv_heads, shape.rows))
    score = SCALE * float(np.sum(q.max((0, 1, 2)) * k.max((0, 1, 2))))
    atol = Tolerance(KEY_WIDTH, LONGEST, score, float(v.max())).out
    out = out.reshape(shape.rows, shape.tokens, shape.num_heads, VALUE_WIDTH)
    for row, (prior, real) in enumerate(shape.segments):
        dense = expected(shape, row)[prior : prior + real]
        np.testing.assert_allclose(out[row, :real], dense, rtol=0, atol=atol)


def check_pool(shape: Shape, pool: np.ndarray, after: np.ndarray) -> None:
    """As expected everywhere but in the scratch page."""
    pool = pool.reshape(after.shape)
    np.testing.assert_array_equal(pool[:, :NUM_PAGES], after[:, :NUM_PAGES])
    np.testing.assert_array_equal(pool[:, NUM_PAGES, 1 - LAYER], after[:, NUM_PAGES, 1 - LAYER])


COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "collective_permute")


def count_collectives(lowered) -> dict[str, int]:
    text = lowered.as_text()
    counts = {name: text.count(f'"stablehlo.{name}"') for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}


def allowed_collectives(shape: Shape) -> dict[str, int]:
    """One for the queries, unless they come gathered, and those of the merge."""
    if shape.dcp == 1:
        return {}
    queries = int(shape.mode != "gathered")
    together = int(shape.mode == "by_tokens")  # the test's own, which puts the outputs together
    if shape.comm_backend == "ag_rs":
        return {"all_gather": queries + together + 1, "reduce_scatter": 1}
    counts = {"all_gather": queries + together, "all_to_all": 1}
    return {name: count for name, count in counts.items() if count}


def check_shape(shape: Shape, make_mesh=decode_mesh) -> None:
    run = program(shape, make_mesh)
    values, after = arguments(shape)
    assert count_collectives(run.lower(*values)) == allowed_collectives(shape)
    out, pool = run(*values)
    outs = np.asarray(out) if shape.mode == "by_tokens" else np.asarray(out)[None]
    for of_rank in outs:
        check_outputs(shape, of_rank)
    check_pool(shape, np.asarray(pool), after)


FACTORS = {
    "mesh": ((1, 3), (2, 2), (2, 4), (1, 8)),
    "interleave": (1, 4, 8),
    "comm_backend": ("ag_rs", "a2a"),
    "width": ("one", "uneven", "even"),
    "rows": (1, 4),
    "mode": ("by_heads", "gathered"),
}
BY_TOKENS = {**FACTORS, "width": ("even",), "mode": ("by_tokens",)}
ONE_RANK = [Shape((groups, 1), 1, "ag_rs", "even", 4, "by_heads") for groups in (1, 2)]


def every(factors):
    values = itertools.product(*factors.values())
    return [Shape(**dict(zip(factors, choice, strict=True))) for choice in values]


COVER = [Shape(**choice) for factors in (FACTORS, BY_TOKENS) for choice in pairwise(factors)]


@pytest.mark.parametrize("shape", COVER + ONE_RANK, ids=str)
def test_a_block_equals_one_device(shape: Shape):
    check_shape(shape)


def test_a_block_on_the_mesh_of_a_producer():
    check_shape(Shape((2, 4), 8, "ag_rs", "even", 4, "by_tokens"), prefill_mesh)


@pytest.mark.matrix
@pytest.mark.parametrize("shape", every(FACTORS) + every(BY_TOKENS), ids=str)
def test_a_block_equals_one_device_in_every_combination(shape: Shape):
    check_shape(shape)
