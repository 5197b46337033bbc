"""What follows from settings and a latent-cache model: bytes of each pool, and what is refused."""

from pathlib import Path
from typing import Any

import jax
import pytest

from dcpjax.cache.parts import DRAFT_INDEXER, DRAFT_LATENT, INDEXER, LATENT
from dcpjax.cache.pool import allocate_pools
from dcpjax.config import EngineConfig
from dcpjax.engine.blueprint import Blueprint
from dcpjax.errors import MeshError, UnsupportedCombination
from dcpjax.mesh import decode_mesh
from dcpjax.models.checkpoint import open_checkpoint
from tests.composition.pairwise import all_choices, pairwise_cover
from tests.golden.tiny import CONFIGS, write_tiny_model
from tests.golden.tiny_glm import write_tiny_glm

GLM_52 = Path(__file__).parent.parent / "assets" / "glm-5.2" / "config.json"
RANK, ROPE, KEY, PAGE, NUM_PAGES = 128, 6, 12, 8, 5
LAYERS, CHOOSING = 4, 3
# Bytes of a latent row, and of an indexer's key.
ROWS: dict[str, tuple[int, int]] = {
    "float32": (4 * (RANK + ROPE), 4 * KEY),
    "bfloat16": (2 * (RANK + ROPE), 2 * KEY),
    "fp8": (RANK + ROPE, KEY),
    "fp8_ds_mla": (RANK + 4 + 2 * ROPE, KEY + 4),  # a float32 scale for 128 values and for a key
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With a draft layer; three of four layers choose, twelve experts."""
    shape = {"kv_lora_rank": RANK, "num_nextn_predict_layers": 1, "n_routed_experts": 12}
    return str(write_tiny_glm(tmp_path_factory.mktemp("glm"), "periodic", **shape))


def blueprint_of(path: str, *, drafts: bool | None = False, **settings: Any) -> Blueprint:
    model = open_checkpoint(path, weights=False, draft_layers=drafts)
    config = EngineConfig.from_settings(path, {"block_size": PAGE, **settings})
    return Blueprint(config, model.config, "cpu", "float32")


def settings_of(mesh: tuple[int, int]) -> dict[str, int]:
    return {
        "tensor_parallel_size": mesh[0] * mesh[1],
        "decode_context_parallel_size": mesh[1],
        "max_num_batched_tokens": 64,
    }


OPTIONS = {
    "mesh": ((1, 1), (1, 3), (2, 2)),
    "index_kv": ("sharded", "replicated"),
    "drafts": (True, False),
    "kv_dtype": tuple(ROWS),
}
CASES = [tuple(c.values()) for c in pairwise_cover(all_choices(OPTIONS, lambda choice: True))]


@pytest.mark.parametrize("mesh, index_kv, drafts, kv_dtype", CASES)
def test_bytes_of_a_rank(mesh, index_kv, drafts, kv_dtype, path):
    """``P · (target + indexer · F + draft · N)`` for a page, F = N where the index is replicated.

    Each group of heads has a copy of everything; the sizes are those of the arrays.
    """
    settings = settings_of(mesh) | {"kv_cache_dtype": kv_dtype, "index_kv": index_kv}
    shapes = blueprint_of(path, drafts=drafts, **settings).pool_shapes(NUM_PAGES)
    pools = allocate_pools(shapes, decode_mesh(jax.devices()[: mesh[0] * mesh[1]], mesh[1]))
    (latent, key), dcp = ROWS[kv_dtype], mesh[1]
    factor = dcp if index_kv == "replicated" else 1
    per_token = {LATENT: LAYERS * latent, INDEXER: CHOOSING * key * factor}
    if drafts:
        per_token |= {DRAFT_LATENT: latent * dcp, DRAFT_INDEXER: key * dcp}
    assert pools.keys() == per_token.keys()
    for name, pool in pools.items():
        sizes = {shard.data.nbytes for shard in pool.addressable_shards}
        assert sizes == {(NUM_PAGES + 1) * PAGE * per_token[name]}, name
    page_bytes = PAGE * sum(per_token.values())
    assert shapes.page_bytes(mesh[0]) == page_bytes
    assert shapes.rank_bytes(mesh[0]) == (NUM_PAGES + 1) * page_bytes


@pytest.mark.parametrize("index_kv", ["sharded", "replicated"])
def test_all_parts_hold_as_many_tokens(index_kv, path):
    """Trap 9: a draft pool without the factor N has room for an Nth of each sequence."""
    dcp = 4
    blueprint = blueprint_of(path, drafts=True, index_kv=index_kv, **settings_of((1, dcp)))
    shapes = blueprint.pool_shapes(NUM_PAGES)
    for part in blueprint.parts:
        holders = 1 if part.is_replicated else dcp  # ranks that share the tokens of a page id
        assert shapes.by_part[part.name].page_size * holders == dcp * PAGE, part.name


@pytest.mark.parametrize("dcp", [1, 4, 8])
@pytest.mark.parametrize("index_kv", ["sharded", "replicated"])
def test_a_token_of_glm_52(dcp, index_kv):
    """54,728 bytes on one device: 78 layers, 21 of which choose, and the draft layer."""
    blueprint = blueprint_of(
        str(GLM_52),
        drafts=True,
        kv_cache_dtype="fp8_ds_mla",
        index_kv=index_kv,
        **settings_of((1, dcp)),
    )
    factor = dcp if index_kv == "replicated" else 1
    per_token = 78 * 656 + 21 * 132 * factor + (656 + 132) * dcp
    assert blueprint.pool_shapes(1).page_bytes(1) == PAGE * per_token
    assert dcp > 1 or per_token == 54_728


# What is refused


def test_queries_of_a_latent_cache_are_not_gathered(path):
    blueprint = blueprint_of(path, prefill_gather="q", **settings_of((1, 2)))
    with pytest.raises(UnsupportedCombination, match="latent cache") as error:
        _ = blueprint.sharding
    assert error.value.values == {"prefill_gather": "q", "architecture": "GlmMoeDsaForCausalLM"}


@pytest.mark.parametrize("ranks, is_fine", [(1, True), (3, True), (4, True), (5, False)])
def test_the_ranks_divide_the_experts(ranks, is_fine, path):
    blueprint = blueprint_of(path, **settings_of((1, ranks)))
    if is_fine:
        assert blueprint.sharding.ranks == ranks
        return
    with pytest.raises(MeshError, match="divides the number of experts") as error:
        _ = blueprint.sharding
    assert error.value.values == {"num_experts": 12, "ranks": ranks}


@pytest.mark.parametrize("model", ["v3", "gqa"])
def test_an_index_of_a_model_without_one(model, tmp_path):
    write = write_tiny_model if model in CONFIGS else write_tiny_glm
    path = str(write(tmp_path, model))
    assert not blueprint_of(path, **settings_of((1, 2))).has_whole_index
    blueprint = blueprint_of(path, index_kv="replicated", **settings_of((1, 2)))
    for asked in ("parts", "sharding"):
        with pytest.raises(UnsupportedCombination, match="index_kv='replicated'") as error:
            getattr(blueprint, asked)
        assert error.value.values["index_kv"] == "replicated"
        assert error.value.values["architecture"] == blueprint.model.architecture


@pytest.mark.parametrize("drafts", [True, False])
def test_speculation_needs_the_draft_layer(drafts, path):
    speculation = {"method": "mtp", "num_speculative_tokens": 3}
    blueprint = blueprint_of(path, drafts=drafts, speculative_config=speculation)
    if drafts:
        assert blueprint.step_shapes.decode_widths == (4,)
        return
    with pytest.raises(UnsupportedCombination, match="draft layer") as error:
        _ = blueprint.step_shapes
    assert error.value.values == {"method": "mtp", "architecture": "GlmMoeDsaForCausalLM"}
