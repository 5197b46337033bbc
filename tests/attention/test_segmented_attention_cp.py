"""The heads-first call: first and later chunks in one program, against dense attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dcpjax.attention import attention_reference, segmented_attention_cp
from dcpjax.errors import LayoutError
from tests.attention.sequences import Tolerance, deal, lay_out, pairwise

HEADS, KV_HEADS, WIDTH, VALUE_WIDTH, SCALE = 4, 2, 8, 6, 0.3
BLOCK_SIZE, NUM_CHUNKS = 32, 3


@functools.cache
def prompt(length):
    random = np.random.default_rng(length)
    shapes = (HEADS, length, WIDTH), (KV_HEADS, length, WIDTH), (KV_HEADS, length, VALUE_WIDTH)
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)


def compile_chunk(ranks, interleave, tp_q, tp_out):
    """(q, k, v by rank, caches of k, v, table, local prior, ranks) -> out of the chunk."""
    group = "cp" if ranks > 1 else None

    def on_rank(q, k, v, k_cache, v_cache, table, prior, rank):
        return segmented_attention_cp(
            q,
            k[0],
            v[0],
            k_cache[0],
            v_cache[0],
            table,
            prior,
            BLOCK_SIZE,
            rank[0],
            ranks,
            interleave,
            group,
            SCALE,
            tp_q=tp_q,
            tp_out=tp_out,
        )

    mesh = Mesh(np.array(jax.devices()[:ranks]), ("cp",))
    spread, whole = PartitionSpec("cp"), PartitionSpec()
    return jax.jit(
        jax.shard_map(
            on_rank,
            mesh=mesh,
            in_specs=(whole, *(spread,) * 4, whole, whole, spread),
            out_specs=PartitionSpec(None, None, "cp") if tp_out else PartitionSpec(None, "cp"),
        )
    )


def check_chunks(ranks, interleave, tp_q, tp_out):
    chunk = ranks * interleave * (16 // interleave if interleave < 16 else 1)
    q, k, v = prompt(NUM_CHUNKS * chunk)
    run = compile_chunk(ranks, interleave, tp_q, tp_out)
    rows = np.concatenate([k, v], axis=-1).swapaxes(0, 1)
    hands = deal(len(rows), ranks, interleave)
    for start in range(0, NUM_CHUNKS * chunk, chunk):
        own = [hand[(hand >= start) & (hand < start + chunk)] for hand in hands]
        cache = lay_out(
            rows,
            start,
            ranks=ranks,
            interleave=interleave,
            page_size=BLOCK_SIZE,
            num_entries=len(rows) // (ranks * BLOCK_SIZE) + 2,
            generator=np.random.default_rng(start),
        )
        queries = q[:, start : start + chunk]
        out = run(
            queries.swapaxes(1, 2) if tp_q else queries,
            *(np.stack([x[:, mine] for mine in own]) for x in (k, v)),
            *np.split(cache.rows, [WIDTH], axis=-1),
            cache.table[None],
            np.full((1, 1), start // ranks, np.int32),
            np.arange(ranks, dtype=np.int32),
        )
        check_chunk(out.swapaxes(1, 2) if tp_out else out, (q, k, v), start, chunk)
    assert run._cache_size() == 1, "first and later chunks are one program"


def check_chunk(out, whole, start, chunk):
    q, k, v = (x.swapaxes(0, 1) for x in whole)
    positions = np.arange(len(k))
    queries = slice(start, start + chunk)
    dense, _ = attention_reference(
        *map(jnp.asarray, (q[queries], k, v, positions[queries], positions)), scale=SCALE
    )
    score = SCALE * float(np.sum(np.abs(q).max((0, 1)) * np.abs(k).max((0, 1))))
    atol = Tolerance(WIDTH, len(k), score, float(np.abs(v).max())).out
    np.testing.assert_allclose(out.swapaxes(0, 1), dense, rtol=0, atol=atol)


FACTORS = {
    "ranks": (1, 2, 4, 8),
    "interleave": (1, 16, BLOCK_SIZE),
    "tp_q": (False, True),
    "tp_out": (False, True),
}


@pytest.mark.parametrize("choice", pairwise(FACTORS), ids=lambda c: "-".join(map(str, c.values())))
def test_chunks_of_a_prompt_in_one_program(choice):
    check_chunks(**choice)


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"cp_group": None}, "several ranks merge over a mesh axis"),
        ({"k_local": jnp.zeros((KV_HEADS, 4, WIDTH))}, "a chunk is cp_world_size times"),
        ({"cp_kv_cache_interleave_size": 16}, "a chunk is a multiple of cp_world_size"),
        ({"block_size": 16}, "pages hold block_size tokens"),
        ({"cp_kv_cache_interleave_size": 3}, "a chunk is a multiple of cp_world_size"),
        ({"prior_tokens": jnp.array([[3]])}, "the prior tokens of a rank are a multiple"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_runs(change, rule):
    ranks, own = 2, 8
    fitting = {
        "q": jnp.zeros((HEADS, ranks * own, WIDTH)),
        "k_local": jnp.zeros((KV_HEADS, own, WIDTH)),
        "k_cache": jnp.zeros((3, KV_HEADS, BLOCK_SIZE, WIDTH)),
        "v_cache": jnp.zeros((3, KV_HEADS, BLOCK_SIZE, VALUE_WIDTH)),
        "block_tables": jnp.zeros((1, 2), int),
        "prior_tokens": jnp.zeros((1, 1), int),
        "block_size": BLOCK_SIZE,
        "cp_rank": 0,
        "cp_world_size": ranks,
        "cp_kv_cache_interleave_size": 4,
        "cp_group": "cp",
        "scale": SCALE,
    }
    arguments = fitting | change
    local = arguments["k_local"].shape[:2]
    with pytest.raises(LayoutError, match=rule):
        segmented_attention_cp(v_local=jnp.zeros((*local, VALUE_WIDTH)), **arguments)


def test_an_interleave_larger_than_a_page_is_refused():
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    with pytest.raises(LayoutError, match="block_size is a multiple of") as caught:
        segmented_attention_cp(
            zeros((1, 8, 4)),
            *(zeros((1, 8, 4)),) * 2,
            *(zeros((2, 1, 4, 4)),) * 2,
            jnp.zeros((1, 1), int),
            jnp.zeros((1, 1), int),
            4,
            0,
            1,
            8,
            None,
            SCALE,
        )
    assert caught.value.values == {"block_size": 4, "cp_kv_cache_interleave_size": 8}
