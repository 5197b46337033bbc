"""Intensities and crossovers of the sources, to the printed digits."""

import json
from pathlib import Path

import pytest

from dcpjax.errors import ConfigError
from dcpjax.planner.hardware import find_device
from dcpjax.planner.models import find_model
from dcpjax.planner.roofline import (
    attention_bytes,
    attention_flops,
    attention_intensity,
    index_read_crossover,
    indexer_crossover,
    model_intensity,
)

VECTOR = Path(__file__).resolve().parents[1] / "vectors" / "mla_intensity.json"
CASES = json.loads(VECTOR.read_text())["cases"]
GLM = find_model("glm-5.3")


@pytest.mark.parametrize("case", [c for c in CASES if c["inputs"]["what"] == "intensity"])
def test_intensities_of_the_vector(case):
    given = case["inputs"]
    found = attention_intensity(
        given["heads"], given["topk"], given["d_qk"], given["d_v"], given["kv_bytes_per_token"]
    )
    assert round(found) == case["expected"]["flop_per_byte"]
    assert round(model_intensity(GLM, given["heads"])) == case["expected"]["flop_per_byte"]


def test_the_ridge_of_the_vector():
    case = next(c for c in CASES if c["inputs"]["what"] == "ridge")
    assert round(find_device("h200").ridge) == case["expected"]["flop_per_byte"] == 206


def test_footnotes_of_seed_c():
    """1.35 MB a query, 35.7 MFLOPs over 1.37 MB, 285 MFLOPs over 1.49 MB, 2,176 bytes a head."""
    assert round(2048 * 660 / 1e6, 2) == 1.35
    assert round(attention_flops(8, 2048, 576, 512) / 1e6, 1) == 35.7
    assert round(attention_bytes(8, 2048, 576, 512, 656) / 1e6, 2) == 1.37
    assert round(attention_flops(64, 2048, 576, 512) / 1e6) == 285
    assert round(attention_bytes(64, 2048, 576, 512, 656) / 1e6, 2) == 1.49
    one_head = [attention_bytes(heads, 2048, 576, 512, 656) for heads in (1, 2)]
    assert one_head[1] - one_head[0] == 2176
    assert attention_flops(1, 1, 576, 512) == 2176


def test_under_dcp_queries_and_outputs_weigh_more():
    """Facts C3: 64 heads over 8 ranks, 116."""
    assert round(model_intensity(GLM, 64, ranks=8)) == 116


def test_the_indexer_overtakes_sparse_attention():
    """Seed C: at about 32K tokens under TP8, at about 256K where no rank repeats it."""
    tp8, pcp8 = indexer_crossover(GLM, heads=8), indexer_crossover(GLM, heads=64, ranks=8)
    assert round(tp8 / 1000) == 32
    assert pcp8 == pytest.approx(8 * tp8)
    assert pcp8 == pytest.approx(256 * 1024, rel=0.02)


@pytest.mark.parametrize(
    "name, thousands", [("glm-5.2", 37.8), ("glm-5.1", 10.2), ("deepseek-v3.2", 10.2)]
)
def test_index_reads_exceed_sparse_reads(name, thousands):
    assert round(index_read_crossover(find_model(name)) / 1000, 1) == thousands


def test_a_model_without_sparse_attention_has_none_of_these():
    with pytest.raises(ConfigError, match="sparse latent attention"):
        index_read_crossover(find_model("llama-3-8b"))
