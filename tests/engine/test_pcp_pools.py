"""What PCP ranks hold: arrays, placements, memory regions and the planner's numbers are one."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import pytest

from dcpjax.cache import widths
from dcpjax.cache.parts import DRAFT_PARTS, INDEXER, KV, LATENT
from dcpjax.cache.pool import Pools, PoolShapes, allocate_pools
from dcpjax.config import EngineConfig
from dcpjax.engine import capacity as engine_capacity
from dcpjax.engine.blueprint import Blueprint
from dcpjax.engine.capacity import choose_num_pages
from dcpjax.engine.kv_parts import rank_memory
from dcpjax.mesh import pcp_mesh
from dcpjax.models.huggingface import read_config
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.memory import deployment_parts, page_bytes
from dcpjax.planner.models import find_model
from dcpjax.transfer.memory import RankMemory
from tests.golden.tiny import write_tiny_model
from tests.models.tiny_glm import GLM, write_config

PAGE = 4
FREE_BYTES = 400_000
LAYERS = {LATENT: 9, INDEXER: 5, KV: 2} | dict.fromkeys(DRAFT_PARTS, 1)
"""Of neither a multiple of the ranks; of the indexer's keys fewer than eight ranks."""
CASES = [  # model, tp, pcp, dcp, residency
    ("glm", 1, 2, 1, "replicated"),
    ("glm", 2, 3, 1, "replicated"),
    ("glm", 1, 2, 2, "sharded"),
    ("glm", 1, 8, 8, "sharded"),
    ("glm", 2, 4, 4, "sharded"),
    ("glm", 2, 2, 4, "sharded"),
    ("glm", 1, 2, 1, "layer_split"),
    ("glm", 1, 8, 1, "layer_split"),
    ("glm", 2, 4, 1, "layer_split"),
    ("gqa", 1, 3, 1, "replicated"),
    ("gqa", 2, 2, 2, "sharded"),
    ("gqa", 1, 2, 1, "layer_split"),
    ("gqa", 4, 2, 1, "layer_split"),
]


@dataclass(frozen=True)
class Held:
    """The pools of an engine without its weights, and what describes them."""

    blueprint: Blueprint
    deployment: Deployment
    shapes: PoolShapes
    pools: Pools
    devices: list[Any] = field(default_factory=list)

    def shares(self, part: str) -> list[jax.Array]:
        """By rank."""
        by_device = {shard.device: shard.data for shard in self.pools[part].addressable_shards}
        return [by_device[device] for device in self.devices]

    def regions(self, part: str) -> list[RankMemory]:
        shape = self.shapes.by_part[part]
        return [
            rank_memory(shape, share, share.unsafe_buffer_pointer()) for share in self.shares(part)
        ]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def held(request, tmp_path, monkeypatch) -> Held:
    name, tp, pcp, dcp, residency = request.param
    folder = folder_of(tmp_path, name)
    config = EngineConfig(
        str(folder),
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        prefill_kv=residency,
        block_size=PAGE,
        cp_kv_cache_interleave_size=PAGE,
    )
    blueprint = Blueprint(config, read_config(folder)[0], "cpu", "float32")
    mesh = pcp_mesh(jax.devices()[: tp * pcp], pcp, config.weight_dcp)
    monkeypatch.setattr(engine_capacity, "_free_bytes_per_rank", lambda mesh: FREE_BYTES)
    monkeypatch.setattr(engine_capacity, "CPU_SHARE", 1)
    shapes = choose_num_pages(blueprint.pool_shapes(1), config, 10**6, mesh)
    deployment = Deployment(
        tp=tp,
        pcp=pcp,
        dcp=dcp,
        prefill_kv=residency,
        page_size=PAGE,
        cache_dtype="float32",
        draft_tokens=name == "glm",
    )
    pools = allocate_pools(shapes, mesh)
    return Held(blueprint, deployment, shapes, pools, list(mesh.devices.flat))


def folder_of(folder: Path, name: str) -> Path:
    if name == "glm":
        return write_config(folder, GLM | {"num_hidden_layers": LAYERS[LATENT]})
    return write_tiny_model(folder / name, name)


def test_a_rank_has_what_its_residency_says(held):
    """All, or a part of the layers or of the tokens; of a draft layer all."""
    config = held.blueprint.config
    ranks = config.prefill_context_parallel_size
    assert {part.name for part in held.blueprint.parts} == set(held.pools)
    for part in held.pools:
        is_draft = part in DRAFT_PARTS
        is_split = config.residency == "layer_split" and not is_draft
        is_sharded = config.residency == "sharded" and not is_draft
        layers = -(-LAYERS[part] // ranks) if is_split else LAYERS[part]
        tokens = PAGE if is_sharded else PAGE * config.decode_context_parallel_size
        assert held.shapes.by_part[part].num_pages == held.shapes.num_pages > 2
        for share in held.shares(part):
            assert share.shape[:2] == (held.shapes.num_pages + 1, layers)
            assert share.shape[3] == tokens


def test_placements_say_what_the_arrays_have_room_for(held):
    """Short ranks of a layer split have a layer that they do not use, others none."""
    for part, placement in held.blueprint.placements.items():
        shares = held.shares(part)
        assert placement.num_ranks == len(shares) == held.blueprint.config.num_ranks
        assert placement.layers == LAYERS[part]
        spare = [
            array.shape[1] - share.num_layers
            for array, share in zip(shares, placement.shares, strict=True)
        ]
        assert set(spare) <= {0, 1} and spare[0] == 0
        is_uneven = LAYERS[part] % held.deployment.pcp > 0
        is_split = held.deployment.prefill_kv == "layer_split" and part not in DRAFT_PARTS
        assert (1 in spare) == (is_split and is_uneven)
        for array, share in zip(shares, placement.shares, strict=True):
            assert array.shape[2] == share.num_heads
            assert array.shape[3] == placement.page_size


def test_regions_are_the_arrays_without_their_scratch_page(held):
    for part in held.pools:
        for region, share in zip(held.regions(part), held.shares(part), strict=True):
            pages = held.shapes.num_pages
            assert region.num_pages == pages
            assert region.num_bytes == share.nbytes // (pages + 1) * pages
            assert region.page_stride == share.nbytes // (pages + 1)
            assert region.layer_stride == share.nbytes // (pages + 1) // share.shape[1]


def test_the_planner_expects_these_arrays(held):
    """Pages of its free memory, bytes of each device, and placements."""
    model = find_model(str(held.blueprint.config.model))
    page = page_bytes(model, held.deployment)
    assert held.shapes.num_pages == widths.default_pages(FREE_BYTES, page, 1)
    num_bytes: Counter = Counter()
    for pool in held.pools.values():
        for shard in pool.addressable_shards:
            num_bytes[shard.device] += shard.data.nbytes
    assert set(num_bytes.values()) == {widths.pool_bytes(held.shapes.num_pages, page)}
    assert held.deployment.virtual_page == held.blueprint.config.virtual_page_size
    assert held.deployment.head_groups == held.blueprint.config.head_groups
    planned = {
        part.name.replace("mtp ", "draft_"): held.deployment.part_placement(part, model)
        for part in deployment_parts(model, held.deployment)
    }
    assert planned == held.blueprint.placements


def test_the_planner_s_numbers_tell_residencies_apart(tmp_path):
    """Latents of nine layers and keys of five, by eight ranks; drafts are whole."""
    model = find_model(str(folder_of(tmp_path, "glm")))
    common: dict[str, Any] = {
        "pcp": 8,
        "page_size": PAGE,
        "cache_dtype": "float32",
        "draft_tokens": 1,
    }
    sizes = [
        page_bytes(model, Deployment(**common, **settings)) / tokens
        for settings, tokens in (
            ({}, PAGE),
            ({"dcp": 8, "prefill_kv": "sharded"}, 8 * PAGE),
            ({"prefill_kv": "layer_split"}, PAGE),
        )
    ]
    latent, key = (12 + 6) * 4, 8 * 4
    assert sizes == [
        10 * latent + 6 * key,
        (9 * latent + 5 * key) / 8 + latent + key,
        3 * latent + 2 * key,
    ]
