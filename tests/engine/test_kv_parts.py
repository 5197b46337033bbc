"""What an engine says of its cache parts is what its pools are."""

import numpy as np
import pytest

from dcpjax.cache.parts import DRAFT_INDEXER, DRAFT_LATENT, INDEXER, LATENT
from dcpjax.config import EngineConfig
from dcpjax.engine.blueprint import Blueprint
from dcpjax.engine.kv_parts import describe_parts, rank_memory
from dcpjax.models.huggingface import read_config
from dcpjax.transfer.part_info import PartInfo
from tests.models.tiny_glm import GLM, write_config

NUM_PAGES, PAGE, RANKS = 5, 8, 4
VALUES = GLM | {"kv_lora_rank": 128}


def described(folder, **settings) -> dict[str, PartInfo]:
    """The parts of an engine of four ranks, whose pools were never allocated."""
    model, dtype = read_config(write_config(folder, VALUES))
    config = EngineConfig.from_settings(
        str(folder),
        {"tensor_parallel_size": RANKS, "block_size": PAGE, "cp_kv_cache_interleave_size": PAGE}
        | settings,
    )
    blueprint = Blueprint(config, model, "cpu", dtype)
    pools = blueprint.pool_shapes(NUM_PAGES)
    regions = {}
    for name, shape in pools.by_part.items():
        pages, layers, heads, *page = shape.array_shape(1)
        share = np.empty((pages, layers, heads // config.head_groups, *page), shape.storage_dtype)
        region = rank_memory(shape, share, address=4096)
        assert region.num_pages == NUM_PAGES
        assert region.page_stride == shape.page_bytes(config.head_groups)
        regions[name] = (region,) * RANKS
    parts = describe_parts(blueprint.parts, pools, blueprint.placements, regions)
    return {part.name: part for part in parts}


@pytest.mark.parametrize("index_kv", ["sharded", "replicated"])
@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_a_replicated_part_has_longer_pages(dcp, index_kv, tmp_path):
    parts = described(tmp_path, decode_context_parallel_size=dcp, index_kv=index_kv)
    assert list(parts) == [LATENT, DRAFT_LATENT, INDEXER, DRAFT_INDEXER]
    for name, part in parts.items():
        is_whole = name in (DRAFT_LATENT, DRAFT_INDEXER) or (name, index_kv) == (
            INDEXER,
            "replicated",
        )
        assert part.placement.page_size == (PAGE * dcp if is_whole else PAGE)
        assert {share.ranks for share in part.placement.shares} == {1 if is_whole else dcp}
        assert {share.num_heads for share in part.placement.shares} == {1}
        assert part.field_bytes == ()
    assert parts[INDEXER].layers == (0, 1, 3) and parts[DRAFT_INDEXER].layers == (4,)
    assert parts[LATENT].token_bytes == (128 + 6) * 4
    assert parts[INDEXER].token_bytes == 8 * 4
    assert parts[LATENT].cache_format != parts[INDEXER].cache_format


def test_a_page_of_scaled_keys_has_the_scales_at_its_end(tmp_path):
    parts = described(
        tmp_path,
        decode_context_parallel_size=4,
        index_kv="replicated",
        kv_cache_dtype="fp8_ds_mla",
    )
    fields = {name: part.field_bytes for name, part in parts.items() if part.field_bytes}
    assert fields == {INDEXER: (8, 4), DRAFT_INDEXER: (8, 4)}
    for name, part in parts.items():
        row = 128 + 4 + 6 * 2 if name in (LATENT, DRAFT_LATENT) else 8 + 4
        assert part.token_bytes == row
        size = part.placement.page_size * row * len(part.layers)
        assert part.regions[0].page_stride == size
        assert part.cache_dtype == "float8_e4m3fn" and "Fp8" in part.cache_format
