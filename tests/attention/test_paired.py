"""Prompts computed in pairs of chunks: every rank sees what one device would see.

The pools of all ranks are NaN but for the prior tokens that their placement gives them.
"""

import functools
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dcpjax.attention import attention_reference, paired, views
from dcpjax.attention.block import TokenSharding, make_block, split_blocks
from dcpjax.attention.decode import decode_attention, gather_heads
from dcpjax.attention.paired import pair_block
from dcpjax.attention.views import (
    Stored,
    gather_prior,
    gather_rows,
    view_blocks,
    write_blocks,
)
from dcpjax.cache.pool import POOL_SPEC
from dcpjax.layout import KVPlacement, layer_owner, layer_range, local_index
from dcpjax.mesh import DCP, PAGE_RANKS, PCP, WORLD, pcp_mesh

LAYERS, HEADS, KV_HEADS, WIDTH = 3, 4, 2, 8
PAGE, PAGES, TABLE = 4, 40, 9
SCALE = 0.4
ROWS, CHUNK = 2, 3
WHOLE, BY_RANK = PartitionSpec(), PartitionSpec(WORLD)
STORED = Stored(LAYERS)


@dataclass(frozen=True)
class Case:
    """``dcp`` is 1 where every rank has all tokens, else the number of ranks."""

    ranks: int
    residency: str
    interleave: int = 1

    def __str__(self) -> str:
        return f"{self.residency}-{self.ranks}-i{self.interleave}"

    @property
    def sharding(self) -> TokenSharding:
        if self.residency == "sharded":
            return TokenSharding(self.ranks, self.interleave, PAGE, PAGES, PAGE_RANKS)
        layer_ranks = self.ranks if self.residency == "layer_split" else 1
        return TokenSharding(1, 1, PAGE, PAGES, (DCP,), layer_ranks)

    @property
    def width(self) -> int:
        return 2 * self.ranks * CHUNK

    @property
    def pool_layers(self) -> int:
        return -(-LAYERS // self.sharding.layer_ranks)

    def place(self, rank: int, layer: int, position: int) -> tuple[int, int, int] | None:
        """Layer, page index in the table and offset where ``rank`` keeps a token, if it does."""
        sharding = self.sharding
        if sharding.layer_ranks > 1:
            start, stop = layer_range(LAYERS, self.ranks, rank)
            return (layer - start, *divmod(position, PAGE)) if start <= layer < stop else None
        if position // self.interleave % sharding.ranks != (rank if sharding.ranks > 1 else 0):
            return None
        local = local_index(position, ranks=sharding.ranks, interleave=sharding.interleave)
        return (layer, *divmod(local, PAGE))


CASES = [
    Case(2, "replicated"),
    Case(3, "replicated"),
    Case(2, "sharded"),
    Case(3, "sharded", 2),
    Case(4, "sharded", PAGE),
    Case(2, "layer_split"),
    Case(3, "layer_split"),
]
COUNTS = (0, 1, "N-1", "N", "2N", "2N+1", "width-1", "width")
PRIORS = (0, 1, PAGE - 1, PAGE, 7, 11)


def count_of(word, case):
    if isinstance(word, int):
        return word
    names = {"N": case.ranks, "2N": 2 * case.ranks, "width": case.width}
    name, sign, number = word.partition("+") if "+" in word else word.partition("-")
    return names[name] + (int(sign + number) if number else 0)


@functools.cache
def compiled(case):
    """(decode rows, prompt rows) through one layer: outputs of all tokens, and the pools."""

    def on_rank(pool, layer, q, rows, tables, priors, counts, decode, rank_ids):
        rank = rank_ids[0]
        token_rank = rank if case.sharding.ranks > 1 else jnp.zeros_like(rank)
        layer_rank = rank if case.sharding.layer_ranks > 1 else None
        ends = (token_rank, case.sharding, layer_rank)
        prompts = make_block(case.width, tables[:ROWS], priors, counts, *ends)
        single = make_block(1, tables[ROWS:], decode, jnp.ones_like(decode), *ends)
        pair = pair_block(prompts, case.ranks, rank)
        blocks = (single, pair)

        def own(values):
            return jnp.concatenate([values[:1], pair.take_chunks(values[1:])])

        q, rows = own(q), own(rows)
        prior = gather_prior(pool, layer, blocks, STORED)
        gathered = gather_rows(blocks, rows)
        pool = write_blocks(pool, layer, blocks, gathered, prior, STORED)
        seen = view_blocks(pool, layer, blocks, gathered, prior, STORED)
        keys, values = jnp.split(rows, 2, axis=-1)
        outs = [
            view.from_owner(
                decode_attention(
                    gather_heads(query, view.block),
                    view.block.take_own(k),
                    view.block.take_own(v),
                    view.pool,
                    view.layer,
                    view.block,
                    scale=SCALE,
                    comm_backend="ag_rs",
                )
            )
            for query, k, v, view in zip(
                *(split_blocks(x, blocks) for x in (q, keys, values)), seen, strict=True
            )
        ]
        last = pair.take_last(outs[1].reshape(outs[1].shape[0], -1))
        return jnp.concatenate(gather_rows(blocks, jnp.concatenate(outs)))[None], last[None], pool

    mesh = pcp_mesh(jax.devices()[: case.ranks], case.ranks, 1)
    return jax.jit(
        jax.shard_map(
            on_rank,
            mesh=mesh,
            in_specs=(POOL_SPEC, *(WHOLE,) * 7, BY_RANK),
            out_specs=(PartitionSpec(PCP), PartitionSpec(PCP), POOL_SPEC),
            check_vma=False,
        )
    )


@dataclass(frozen=True)
class Sequences:
    """One decode row and the prompt rows: prior and new tokens of each, and pages for them."""

    case: Case
    layer: int
    priors: tuple[int, ...]
    counts: tuple[int, ...]
    decode: int

    @functools.cached_property
    def random(self):
        seed = [self.layer, self.decode, *self.priors, *self.counts]
        return np.random.default_rng(seed)

    @functools.cached_property
    def rows(self):
        """Keys and values by sequence: the prompts, then the decoding one."""
        lengths = [p + self.case.width for p in self.priors] + [self.decode + 1]
        return [
            self.random.normal(size=(n, KV_HEADS, 2 * WIDTH)).astype(np.float32) for n in lengths
        ]

    @functools.cached_property
    def tables(self):
        ids = np.random.default_rng(0).permutation(PAGES)[: (ROWS + 1) * TABLE]
        return ids.reshape(ROWS + 1, TABLE).astype(np.int32)

    def pool(self, stops):
        """All ranks' pools with the tokens of each sequence up to ``stops``."""
        case = self.case
        shape = (case.ranks, PAGES + 1, case.pool_layers, KV_HEADS, PAGE, 2 * WIDTH)
        pool = np.full(shape, np.nan, np.float32)
        for rank, (number, stop) in itertools.product(range(case.ranks), enumerate(stops)):
            for position in range(stop):
                if (place := case.place(rank, self.layer, position)) is not None:
                    layer, page, offset = place
                    row = self.rows[number][position]
                    pool[rank, self.tables[number, page], layer, :, offset] = row
        return pool

    def run(self):
        case, real = self.case, [*self.priors, self.decode]
        q = self.random.normal(size=(1 + ROWS * case.width, HEADS, WIDTH)).astype(np.float32)
        new = [self.rows[b][p : p + case.width] for b, p in enumerate(self.priors)]
        rows = np.concatenate([self.rows[ROWS][self.decode :], *new])
        out, last, pool = compiled(case)(
            self.pool(real).reshape(-1, *self.pool(real).shape[2:]),
            np.int32(self.layer),
            q,
            rows,
            self.tables,
            np.asarray(self.priors, np.uint32),
            np.asarray(self.counts, np.uint32),
            np.asarray([self.decode], np.uint32),
            np.arange(case.ranks, dtype=np.uint32),
        )
        return q, np.asarray(out), np.asarray(last), np.asarray(pool)


def expected_out(q, rows, first):
    """Of queries from position ``first`` on, on one device."""
    keys, values = np.split(rows, 2, axis=-1)
    positions = np.arange(len(rows))
    arrays = (q, keys, values, positions[first : first + len(q)], positions)
    return np.asarray(attention_reference(*map(jnp.asarray, arrays), scale=SCALE)[0])


def check(sequences):
    case = sequences.case
    q, outs, lasts, pool = sequences.run()
    stops = [p + n for p, n in zip(sequences.priors, sequences.counts, strict=True)]
    expected_pool = sequences.pool([*stops, sequences.decode + 1])
    found = pool.reshape(expected_pool.shape)
    np.testing.assert_array_equal(found[:, :-1], expected_pool[:, :-1])  # but for scratch pages
    for out, last in zip(outs, lasts, strict=True):  # on every rank
        decoded = expected_out(q[:1], sequences.rows[ROWS], sequences.decode)
        np.testing.assert_allclose(out[:1], decoded, atol=2e-5)
        for row, (prior, count) in enumerate(zip(sequences.priors, sequences.counts, strict=True)):
            if count:
                start = 1 + row * case.width
                rows = sequences.rows[row][: prior + count]
                wanted = expected_out(q[start : start + count], rows, prior)
                np.testing.assert_allclose(out[start : start + count], wanted, atol=2e-5)
                np.testing.assert_allclose(last[row], wanted[-1].reshape(-1), atol=2e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_and_pools_are_those_of_one_device(case):
    chance = np.random.default_rng(7)
    for word in COUNTS:
        counts = (count_of(word, case), int(chance.integers(0, case.width + 1)))
        priors = tuple(int(x) for x in chance.choice(PRIORS, 2))
        layer, decode = int(chance.integers(LAYERS)), int(chance.choice(PRIORS))
        check(Sequences(case, layer, priors, counts, decode))


def test_every_layer_has_its_owner():
    """Uneven: three layers on two ranks."""
    case = Case(2, "layer_split")
    assert [layer_owner(layer, LAYERS, 2) for layer in range(LAYERS)] == [0, 0, 1]
    for layer in range(LAYERS):
        check(Sequences(case, layer, (5, 0), (case.width, 4), 9))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_pools_are_what_the_placement_says(case):
    size = {"layers": LAYERS, "kv_heads": KV_HEADS, "page_size": PAGE}
    if case.residency == "layer_split":
        placement = KVPlacement.layer_split(case.ranks, **size)
    else:
        placement = KVPlacement.pcp_dcp(
            1, case.ranks, case.sharding.ranks, **size, interleave=case.interleave
        )
    for rank, layer, position in itertools.product(
        range(case.ranks), range(LAYERS), range(3 * PAGE)
    ):
        is_held = placement.holds(rank, layer, 0, position)
        assert bool(is_held) == (case.place(rank, layer, position) is not None)


@pytest.fixture
def recompiled():
    """What is compiled with a mistake is for one test alone."""
    compiled.cache_clear()
    yield
    compiled.cache_clear()


MISTAKEN = Sequences(Case(2, "sharded", 2), 1, (5, 3), (7, 2), 4)


def test_new_tokens_of_other_ranks_that_are_missing_are_seen(monkeypatch, recompiled):
    complete = views._complete
    without = lambda copy, block, rows, form: complete(copy, block, 0 * rows, form)  # noqa: E731
    monkeypatch.setattr(views, "_complete", without)
    with pytest.raises(AssertionError):
        check(MISTAKEN)


def test_chunks_put_together_as_if_all_were_full_are_seen(monkeypatch, recompiled):
    monkeypatch.setattr(paired, "zigzag_size", lambda tokens, _: jnp.full_like(tokens, CHUNK))
    with pytest.raises(AssertionError):
        check(MISTAKEN)
