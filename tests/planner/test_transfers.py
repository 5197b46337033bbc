"""Transfer costs rest on real plans: bytes, descriptors and the sources' numbers."""

from dataclasses import replace

import numpy as np
import pytest

from dcpjax.errors import UnsupportedCombination
from dcpjax.planner.cache_parts import kv_bytes_per_token
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.hardware import find_device
from dcpjax.planner.models import find_model
from dcpjax.planner.transfers import naive_bytes, transfer_cost

GLM, H200 = find_model("glm-5.2"), find_device("h200")
SPLIT = Deployment(pcp=8, prefill_kv="layer_split", cache_dtype="fp8")
DCP4 = Deployment(tp=4, dcp=4, cache_dtype="fp8")
K32 = 32768


def latent_only(value: float) -> float:
    """The sources count 576 bytes a token and layer, and no indexer."""
    return value * 78 * 576 / kv_bytes_per_token(GLM, cache_dtype="fp8", mtp=False)


def test_the_reshard_of_seed_a():
    """32K tokens: 1.47 GB in all, 368 MB to each of 4 ranks, 5.88 GB if each got everything."""
    cost = transfer_cost(GLM, SPLIT, DCP4, K32)
    assert round(latent_only(cost.num_bytes) / 1e9, 2) == 1.47
    assert round(latent_only(cost.busiest_target_bytes) / 1e6) == 368
    assert round(latent_only(naive_bytes(cost, 4)) / 1e9, 2) == pytest.approx(5.88, abs=0.011)
    assert np.count_nonzero(cost.bytes_by_path) == 8 * 4


def test_500k_tokens_of_seed_a():
    cost = transfer_cost(GLM, SPLIT, DCP4, 512_000)
    assert round(latent_only(cost.num_bytes) / 1e9) == 23


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 255, 256, 257, 1000])
def test_every_token_moves_once(tokens):
    cost = transfer_cost(GLM, SPLIT, DCP4, tokens)
    assert cost.num_bytes == tokens * kv_bytes_per_token(GLM, cache_dtype="fp8", mtp=False)


def test_a_draft_s_cache_goes_to_every_rank():
    source, target = replace(SPLIT, draft_tokens=3), replace(DCP4, draft_tokens=3)
    bytes_more = (
        transfer_cost(GLM, source, target, K32).num_bytes
        - transfer_cost(GLM, SPLIT, DCP4, K32).num_bytes
    )
    assert bytes_more == 4 * K32 * (576 + 128)


def test_a_single_rank_is_the_bottleneck():
    """Facts C3: 1M tokens into one NIC take 8 times as long as into eight, about 1.2 s."""
    source = Deployment(pcp=8, dcp=8, prefill_kv="sharded")
    one = transfer_cost(GLM, source, Deployment(), 1 << 20)
    eight = transfer_cost(GLM, source, Deployment(tp=8, dcp=8), 1 << 20)
    assert one.wire_seconds(H200) == pytest.approx(8 * eight.wire_seconds(H200), rel=0.01)
    assert one.wire_seconds(H200) == pytest.approx(1.23, abs=0.02)
    assert one.seconds(H200) > one.wire_seconds(H200) + one.posting_seconds()


def test_equal_layouts_merge_into_one_piece_per_path_and_part():
    """With neighbouring pages; scattered ones are a piece each."""
    same = transfer_cost(GLM, DCP4, DCP4, K32)
    assert same.num_descriptors == 2 * 4
    assert same.scattered_descriptors == 2 * K32 // 64
    assert same.seconds(H200, scattered=True) > same.seconds(H200)


def test_values_and_scales_of_a_page_that_is_cut_are_a_piece_each():
    """Of the draft layer's keys alone: pages of the sharded ones have the same tokens."""
    pieces = {}
    for dtype in ("fp8", "fp8_ds_mla"):
        sides = [Deployment(tp=8, dcp=n, draft_tokens=3, cache_dtype=dtype) for n in (8, 4)]
        pieces[dtype] = transfer_cost(GLM, *sides, K32).scattered_descriptors
    page = 4 * 64
    assert pieces["fp8_ds_mla"] - pieces["fp8"] == 8 * K32 // page


def test_heads_of_tensor_parallel_engines_are_split():
    model = find_model("llama-3.1-70b")
    cost = transfer_cost(model, Deployment(tp=4), Deployment(tp=8), 4096)
    assert cost.num_bytes == 4096 * kv_bytes_per_token(model, cache_dtype="bfloat16")
    assert np.count_nonzero(cost.bytes_by_path) == 8


def test_engines_with_other_values_are_refused():
    with pytest.raises(UnsupportedCombination, match="same parts"):
        transfer_cost(GLM, SPLIT, replace(DCP4, cache_dtype="bfloat16"), 64)
    with pytest.raises(UnsupportedCombination, match="same parts"):
        transfer_cost(GLM, SPLIT, replace(DCP4, draft_tokens=1), 64)
