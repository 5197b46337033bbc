"""Bytes of tokens and pages: the sources' numbers to the digit, and the engine's own arrays."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dcpjax.cache import widths
from dcpjax.cache.parts import KV
from dcpjax.cache.pool import allocate_pool
from dcpjax.config import EngineConfig
from dcpjax.engine import capacity as engine_capacity
from dcpjax.engine.blueprint import Blueprint
from dcpjax.engine.capacity import choose_num_pages
from dcpjax.errors import ConfigError, MeshError, UnsupportedCombination
from dcpjax.mesh import decode_mesh
from dcpjax.models.huggingface import read_config
from dcpjax.planner.cache_parts import kv_bytes_per_token, kv_parts
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.hardware import GIB
from dcpjax.planner.memory import (
    MemoryItem,
    capacity,
    page_bytes,
)
from dcpjax.planner.models import find_model
from tests.golden.tiny import write_tiny_model
from tests.golden.tiny_glm import write_tiny_glm

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
MILLION, K32 = 1 << 20, 1 << 15


def test_the_vector_of_kv_bytes():
    case = json.loads((VECTORS / "kv_bytes.json").read_text())["cases"][0]
    wanted = case["expected"]
    parts = {part.name: part for part in kv_parts("glm-5.2")}
    assert parts["latent"].bytes_per_token == wanted["latent_bytes"]
    assert parts["indexer"].bytes_per_token == wanted["index_bytes"]
    assert parts["mtp latent"].total + parts["mtp indexer"].total == wanted["mtp_bytes"]
    assert kv_bytes_per_token("glm-5.2") == wanted["bytes_per_token"] == 54728
    request = case["inputs"]["tokens"] * kv_bytes_per_token("glm-5.2")
    assert round(request / GIB, 2) == wanted["request_gib"]
    assert sum(part.layers for part in parts.values()) == wanted["registered_regions"]


@pytest.mark.parametrize(
    "model, dtype, mtp, wanted",
    [
        ("glm-5.3", "fp8_ds_mla", True, 54728),
        ("glm-5.2", "fp8_ds_mla", False, 78 * 656 + 21 * 132),
        ("glm-5.1", "fp8_ds_mla", True, 79 * (656 + 132)),
        ("glm-5.2", "bfloat16", False, 78 * 1152 + 21 * 256),
        ("glm-5.2", "float32", False, 2 * (78 * 1152 + 21 * 256)),
        ("glm-5.2", "fp8", False, 78 * 576 + 21 * 128),
        ("deepseek-v3", "fp8_ds_mla", False, 61 * 656),
        ("deepseek-v3.2", "fp8_ds_mla", True, 62 * (656 + 132)),
        ("llama-3-8b", "bfloat16", True, 131072),
        ("smollm2-135m", "float32", True, 30 * 3 * 2 * 64 * 4),
    ],
)
def test_bytes_of_a_token(model, dtype, mtp, wanted):
    assert kv_bytes_per_token(model, cache_dtype=dtype, mtp=mtp) == wanted


def test_types_that_a_cache_does_not_have_are_refused():
    with pytest.raises(ConfigError, match="layout of latents"):
        kv_bytes_per_token("qwen3-8b")
    with pytest.raises(ConfigError, match="type of cached values"):
        kv_bytes_per_token("glm-5.2", cache_dtype="int4")
    with pytest.raises(ConfigError, match="multiple of 128"):
        widths.latent_token_bytes(500, 64, "fp8_ds_mla")


# Against the engine: ten shapes

SHAPES = [  # model, tp in all, dcp, page size, cache type
    ("gqa", 1, 1, 8, "float32"),
    ("gqa", 2, 1, 16, "bfloat16"),
    ("gqa", 4, 1, 8, "float32"),
    ("gqa", 4, 2, 8, "bfloat16"),
    ("gqa", 3, 3, 16, "float32"),
    ("mha", 4, 2, 8, "fp8"),
    ("mqa", 8, 8, 8, "float32"),
    ("mqa", 2, 1, 32, "fp8"),
    ("qwen3", 8, 2, 8, "bfloat16"),
    ("qwen3", 6, 3, 4, "float32"),
]


LATENT_SHAPES = [
    ("periodic", 1, 1, 8, "float32"),
    ("periodic", 2, 2, 4, "fp8"),
    ("v32", 4, 2, 8, "fp8"),
    ("v3", 4, 4, 8, "bfloat16"),
]


def blueprint_of(folder: Path, tp: int, dcp: int, page_size: int, dtype: str) -> Blueprint:
    config = EngineConfig(
        str(folder),
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        block_size=page_size,
        kv_cache_dtype=dtype,
        max_num_seqs=2,
    )
    return Blueprint(config, read_config(folder)[0], "cpu", "float32")


@pytest.mark.parametrize("name, tp, dcp, page_size, dtype", SHAPES)
def test_the_engine_s_arrays_are_as_large(name, tp, dcp, page_size, dtype, tmp_path, monkeypatch):
    """Bytes of a rank's share, pages and tokens, from the allocated pool."""
    folder = write_tiny_model(tmp_path, name)
    blueprint = blueprint_of(folder, tp, dcp, page_size, dtype)
    mesh = decode_mesh(jax.devices()[:tp], dcp)
    free = 300_000
    monkeypatch.setattr(engine_capacity, "_free_bytes_per_rank", lambda mesh: free)
    monkeypatch.setattr(engine_capacity, "CPU_SHARE", 1)
    shapes = choose_num_pages(blueprint.pool_shapes(1), blueprint.config, 10**6, mesh)
    shape = shapes.by_part[KV]
    pool = allocate_pool(shape, mesh)

    model = find_model(str(folder))
    deployment = Deployment(tp=tp, dcp=dcp, page_size=page_size, cache_dtype=dtype)
    page = page_bytes(model, deployment)
    num_pages = widths.default_pages(free, page, 1)
    assert shape.num_pages == num_pages > 2
    shares = {shard.data.nbytes for shard in pool.addressable_shards}
    assert shares == {widths.pool_bytes(num_pages, page)}
    tokens = num_pages * deployment.virtual_page
    assert tokens == shape.num_pages * blueprint.config.virtual_page_size


@pytest.mark.parametrize("name, tp, dcp, page_size, dtype", LATENT_SHAPES)
def test_latents_and_keys_take_what_is_planned(name, tp, dcp, page_size, dtype, tmp_path):
    """Bytes of all parts of a rank, from the allocated pools."""
    folder = write_tiny_glm(tmp_path, name)
    shapes = blueprint_of(folder, tp, dcp, page_size, dtype).pool_shapes(5)
    mesh = decode_mesh(jax.devices()[:tp], dcp)
    pools = [allocate_pool(shape, mesh) for shape in shapes.by_part.values()]
    deployment = Deployment(tp=tp, dcp=dcp, page_size=page_size, cache_dtype=dtype)
    page = page_bytes(find_model(str(folder)), deployment)
    held = {sum(pool.addressable_shards[rank].data.nbytes for pool in pools) for rank in range(tp)}
    assert held == {widths.pool_bytes(5, page)}


def test_the_comparison_can_fail(tmp_path):
    """Another type, page size or number of ranks gives another page."""
    model = find_model(str(write_tiny_model(tmp_path, "gqa")))
    base = {"tp": 4, "dcp": 2, "page_size": 8, "cache_dtype": "float32"}
    changes = [{}, {"dcp": 1}, {"page_size": 4}, {"cache_dtype": "fp8"}, {"tp": 2, "dcp": 1}]
    sizes = []
    for change in changes:
        deployment = Deployment(**{**base, **change})
        sizes.append(page_bytes(model, deployment))
    assert sizes[0] == 2 * sizes[2] == 4 * sizes[3]
    assert sizes[0] == sizes[1]  # two groups hold one head each, four hold copies
    assert 1 * sizes[0] == sizes[4]


def test_affordable_pages_leave_room_for_the_scratch_page():
    assert [widths.affordable_pages(free, 10) for free in (0, 9, 10, 19, 20, 100)] == [
        *(-1, -1, 0, 0, 1, 9)
    ]


# Capacity of deployments

DP8 = Deployment(dp=8, draft_tokens=3)
PCP8 = Deployment(pcp=8, draft_tokens=3)
PCP8_DCP8 = Deployment(pcp=8, dcp=8, prefill_kv="sharded", draft_tokens=3)


def test_a_rank_has_about_15_gib_free():
    """Seed C says about 15 GiB of each H200 are left beside the weights."""
    assert 14 * GIB < capacity("glm-5.3", "h200", DP8).free_bytes < 15.5 * GIB


def test_one_million_tokens_fit_only_where_the_cache_is_sharded():
    """Seed C: a DP8 rank cannot hold one request of 1M tokens, PCP8 alone ends at about 250K."""
    dp, pcp, both = (
        capacity("glm-5.3", "h200", d, context=MILLION) for d in (DP8, PCP8, PCP8_DCP8)
    )
    assert dp.missing_bytes(MILLION) > 0 and "39.0 GiB short" in dp.explain(MILLION)
    assert 250_000 < pcp.tokens < 300_000
    assert both.missing_bytes(MILLION) == 0 and both.num_requests(MILLION) == 1
    # Seed C's 6.7 GiB are an eighth of all; here the draft layer's cache is whole on every rank.
    assert both.rank_token_bytes == (78 * 656 + 21 * 132) / 8 + 656 + 132
    assert round(MILLION * both.rank_token_bytes / GIB, 1) == 7.4
    assert both.tokens >= MILLION > dp.tokens == dp.total_tokens // 8


def test_a_draft_pool_is_whole_on_every_rank():
    """N times the tokens of one layer: a factor N on its bytes for each token a rank holds."""
    without = Deployment(tp=8, dcp=8)
    with_draft = Deployment(tp=8, dcp=8, draft_tokens=3)
    sizes = [page_bytes(find_model("glm-5.2"), d) for d in (without, with_draft)]
    assert sizes == [64 * 53940, 64 * (53940 + 8 * 788)]


def test_capacity_scales_with_the_ranks_that_share_tokens():
    tokens = [capacity("deepseek-v3", "b300", Deployment(tp=8, dcp=n)).tokens for n in (1, 2, 4, 8)]
    assert [round(count / tokens[0], 2) for count in tokens] == [1, 2, 4, 8]


def test_a_layer_split_divides_the_layers():
    whole = capacity("glm-5.2", "h200", Deployment(pcp=8))
    split = capacity("glm-5.2", "h200", Deployment(pcp=8, prefill_kv="layer_split"))
    assert split.rank_token_bytes == 10 * 656 + 3 * 132  # each part of its own: 21 indexers
    assert whole.rank_token_bytes == 78 * 656 + 21 * 132


def test_copies_of_two_layers_are_counted_where_ranks_copy():
    """Of the context, once for the layer that is computed and once for the next."""
    replicated, *copying = (
        capacity("glm-5.2", "h200", deployment, context=K32).used
        for deployment in (
            Deployment(pcp=8),
            Deployment(pcp=8, dcp=8, prefill_kv="sharded"),
            Deployment(pcp=8, prefill_kv="layer_split"),
        )
    )
    more = MemoryItem("temporary copies of a layer", 2 * K32 * (656 + 132))
    assert copying == [(*replicated, more)] * 2


def test_weights_that_do_not_fit_leave_no_page():
    found = capacity("glm-5.2", "h100", Deployment(tp=8))
    assert found.free_bytes < 0 and found.num_pages == 0 and found.tokens == 0
    assert found.missing_bytes(1) > -found.free_bytes


@pytest.mark.parametrize(
    "settings, error, match",
    [
        ({"tp": 0}, ConfigError, "tp is at least 1"),
        ({"draft_tokens": -1}, ConfigError, "draft_tokens"),
        ({"tp": 8, "dcp": 3}, MeshError, "dcp divides tp"),
        ({"pcp": 8, "dcp": 4, "prefill_kv": "sharded"}, MeshError, "1, pcp or tp"),
        ({"pcp": 8, "dcp": 8}, UnsupportedCombination, "sharded"),
        ({"prefill_kv": "layer_split"}, UnsupportedCombination, "needs pcp > 1"),
    ],
)
def test_deployments_that_make_no_sense_are_refused(settings, error, match):
    with pytest.raises(error, match=match):
        Deployment(**settings)


def test_pcp_and_tensor_parallel_ranks_share_tokens_of_latents_alone():
    deployment = Deployment(tp=2, pcp=2, dcp=4, prefill_kv="sharded")
    assert page_bytes(find_model("glm-5.2"), deployment) == 64 * (78 * 656 + 21 * 132)
    with pytest.raises(UnsupportedCombination, match="one latent.*dcp=4, pcp=2"):
        page_bytes(find_model("llama-3.1-70b"), deployment)


def test_heads_and_groups_fit_together():
    with pytest.raises(MeshError, match="one is a multiple of the other"):
        capacity("smollm2-135m", "h100", Deployment(tp=2))


@pytest.mark.parametrize("utilization", [0, -1, 1.1])
def test_utilization_is_a_share(utilization):
    with pytest.raises(ConfigError, match="utilization"):
        capacity("glm-5.2", "h200", utilization=utilization)


def test_pool_values_have_the_types_that_widths_know():
    """Each type of a pool has the itemsize that the planner counts."""
    for name in ("float32", "bfloat16", "float8_e4m3fn", "float8_e4m3"):
        assert jnp.dtype(name).itemsize == widths.value_bytes(name)
