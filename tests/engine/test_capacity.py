"""Pages: how many there are by default, what they cost, and that dcp multiplies what they hold."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dcpjax.cache.parts import KV
from dcpjax.cache.pool import PoolShape, PoolShapes, allocate_pool
from dcpjax.config import EngineConfig
from dcpjax.engine import capacity
from dcpjax.engine.capacity import choose_num_pages
from dcpjax.errors import ConfigError, ContextLengthError
from dcpjax.mesh import decode_mesh
from tests.engine.serving import engine_of, request_of, serve
from tests.golden.tiny import random_tokens

SHAPE = PoolShape(
    num_pages=1, num_layers=3, num_heads=4, page_size=16, width=16, dtype=jnp.dtype(jnp.float32)
)
SHAPES = PoolShapes({KV: SHAPE})
PAGE_BYTES = 3 * 4 * 16 * 16 * 4


def config_of(**settings) -> EngineConfig:
    return EngineConfig("any", **{"max_num_seqs": 4, **settings})


def mesh_of(config: EngineConfig):
    devices = jax.devices()[: config.tensor_parallel_size]
    return decode_mesh(devices, config.decode_context_parallel_size)


def chosen(config: EngineConfig, max_model_len: int = 1000) -> int:
    return choose_num_pages(SHAPES, config, max_model_len, mesh_of(config)).num_pages


@pytest.fixture
def free_pages(monkeypatch: pytest.MonkeyPatch):
    """Pretend that each rank may take this many pages' bytes."""
    monkeypatch.setattr(capacity, "CPU_SHARE", 1)

    def pretend(pages: float) -> None:
        monkeypatch.setattr(capacity, "_free_bytes_per_rank", lambda mesh: int(pages * PAGE_BYTES))

    return pretend


def test_a_number_that_is_set_is_taken(free_pages):
    free_pages(8)
    assert chosen(config_of(num_pages=7)) == 7


def test_a_number_that_does_not_fit_is_refused(free_pages):
    free_pages(8)
    with pytest.raises(ConfigError, match="fit into its free memory") as error:
        chosen(config_of(num_pages=8))
    assert error.value.values["num_pages"] == 8


@pytest.mark.parametrize("dcp, pages", [(1, 4 * 63), (2, 4 * 32), (3, 4 * 21), (8, 4 * 8)])
def test_enough_for_all_sequences_at_full_length(dcp, pages, free_pages):
    free_pages(1000)
    config = config_of(tensor_parallel_size=dcp, decode_context_parallel_size=dcp)
    assert chosen(config) == pages


@pytest.mark.parametrize("free, pages", [(2, 1), (2.9, 1), (8, 7), (101, 96), (128, 112)])
def test_no_more_than_memory_allows(free, pages, free_pages):
    """One page more than usable ones: the scratch page. Rounded, so that programs fit again."""
    free_pages(free)
    assert chosen(config_of()) == pages


@pytest.mark.parametrize("free", [0, 1, 1.9])
def test_no_page_fits(free, free_pages):
    free_pages(free)
    with pytest.raises(ConfigError, match="fit into its free memory") as error:
        chosen(config_of())
    assert error.value.values["page_bytes"] == PAGE_BYTES


def test_ranks_on_the_cpu_share_its_memory():
    """Every rank gets its part of what is free; other processes take and give memory meanwhile."""
    free = [
        capacity._free_bytes_per_rank(decode_mesh(jax.devices()[:ranks], 1)) for ranks in (1, 8)
    ]
    assert 0 < free[1] < free[0] / 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp, dcp", [(1, 1), (1, 3), (2, 2), (4, 2), (1, 8)])
def test_sizes_are_those_of_the_arrays(tp, dcp, dtype):
    shape = dataclasses.replace(SHAPE, num_pages=5, dtype=jnp.dtype(dtype))
    pool = allocate_pool(shape, decode_mesh(jax.devices()[: tp * dcp], dcp))
    shares = {shard.data.nbytes for shard in pool.addressable_shards}
    assert shares == {shape.rank_bytes(tp)}
    assert shape.rank_bytes(tp) == 6 * shape.page_bytes(tp)
    assert shape.page_bytes(tp) * tp * (4 // jnp.dtype(dtype).itemsize) == PAGE_BYTES


def bytes_per_token_and_rank(tiny, **settings) -> float:
    """From the arrays of a running engine; the scratch page is not counted."""
    engine = engine_of(tiny, **settings, num_pages=12, max_num_seqs=1)
    stats, shards = engine.stats(), engine.runner.pools[KV].addressable_shards
    assert stats["kv_bytes_per_rank"] == max(shard.data.nbytes for shard in shards)
    assert len({shard.data.shape for shard in shards}) == 1
    engine.close()
    return stats["kv_bytes_per_rank"] / 13 * 12 / stats["kv_tokens_capacity"]


@pytest.mark.parametrize("tp, dcp, share", [(1, 3, 3), (2, 2, 4), (4, 1, 2)])
def test_a_rank_holds_its_share_of_the_bytes(tiny, tp, dcp, share):
    """Tokens are split over dcp, the two KV heads over tp (four ranks hold two copies of each)."""
    sharded = bytes_per_token_and_rank(
        tiny, tensor_parallel_size=tp * dcp, decode_context_parallel_size=dcp
    )
    assert bytes_per_token_and_rank(tiny) == share * sharded


def test_a_prompt_that_does_not_fit_one_device_is_served_by_three(tiny):
    """The same pages per rank, three times the tokens."""
    prompt = random_tokens("long", 100)
    settings = {"num_pages": 8, "max_num_seqs": 1}  # 8 · 8 tokens on one device
    one = engine_of(tiny, **settings)
    with pytest.raises(ContextLengthError, match="64 tokens"):
        one.add(request_of("a", prompt, max_tokens=20))
    three = engine_of(tiny, **settings, tensor_parallel_size=3, decode_context_parallel_size=3)
    assert one.stats()["kv_bytes_per_rank"] == three.stats()["kv_bytes_per_rank"]
    served = serve(three, [request_of("a", prompt, max_tokens=20)])["a"]
    roomy = engine_of(tiny, max_num_seqs=1)
    assert served.tokens == serve(roomy, [request_of("a", prompt, max_tokens=20)])["a"].tokens
    for engine in (one, three, roomy):
        engine.close()
