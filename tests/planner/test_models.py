"""Shapes of models: what config files say, and parameters that add up to the models' names."""

import json
from pathlib import Path

import pytest

from dcpjax.errors import CheckpointError, ConfigError
from dcpjax.planner.data import read_data
from dcpjax.planner.models import find_model, index_layers, known_models
from dcpjax.planner.parameters import (
    attention_parameters,
    count_parameters,
    expert_parameters,
    indexer_parameters,
    weight_bytes,
)

VECTORS = Path(__file__).resolve().parents[1] / "vectors"

BILLIONS = {
    "glm-5.2": 743.4,
    "deepseek-v3": 671.0,
    "qwen3-0.6b": 0.6,
    "qwen3-8b": 8.2,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1,
    "llama-3-8b": 8.0,
    "llama-3.1-70b": 70.6,
    "llama-3.1-405b": 405.8,
    "smollm2-360m": 0.4,
    "smollm2-1.7b": 1.7,
}


@pytest.mark.parametrize("name, billions", BILLIONS.items())
def test_parameters_are_those_of_the_name(name, billions):
    assert round(count_parameters(find_model(name)).total / 1e9, 1) == billions


def test_parts_of_glm():
    """Facts B1: 165.0 M attention a layer, 9.37 M an indexer, 9.703 B experts; 753.3 B with MTP."""
    model = find_model("glm-5.2")
    assert round(attention_parameters(model) / 1e6, 1) == 165.0
    assert round(indexer_parameters(model) / 1e6, 2) == 9.37
    assert round(expert_parameters(model.hidden_size, model.experts) / 1e9, 3) == 9.703
    parameters = count_parameters(model)
    assert round((parameters.total + parameters.mtp) / 1e9, 1) == 753.3


def test_weights_of_a_rank_of_eight_with_expert_parallelism():
    """Facts B1: experts 84.4 GiB, attention 12.0, embedding and head 3.5, draft layer 1.4."""
    weights = weight_bytes(find_model("glm-5.2"), tp=1, expert_ranks=8, mtp=True)
    gib = 1 << 30
    assert weights.experts / gib == pytest.approx(84.4, rel=0.01)  # with shared experts and routers
    assert weights.attention / gib == pytest.approx(12.0, rel=0.02)  # with indexers
    assert round(weights.embedding / gib, 1) == 3.5
    assert round(weights.mtp / gib, 1) == 1.4


def test_ranks_share_every_weight():
    """Two ranks hold all of them, tensor parallel; less the rounding of a division."""
    model = find_model("qwen3-8b")
    whole = weight_bytes(model, tp=1, expert_ranks=1, mtp=False)
    half = weight_bytes(model, tp=2, expert_ranks=2, mtp=False)
    assert 2 * half.total == whole.total
    assert whole.total == 2 * count_parameters(model).total


def test_index_layers_are_those_of_the_vector():
    case = json.loads((VECTORS / "index_layers.json").read_text())["cases"][0]
    assert list(index_layers(*case["inputs"].values())) == case["expected"]["layers"]
    assert find_model("glm-5.2").index_layers == case["expected"]["count"]
    assert find_model("glm-5.1").index_layers == 78
    assert find_model("deepseek-v3").index_layers == 0


def test_every_known_model_says_where_it_comes_from():
    for name in known_models():
        model = find_model(name)
        assert model.source and model.kind in ("datasheet", "reported")
        assert model == find_model(name.upper())


def test_a_config_file_a_folder_and_its_contents_are_the_same(tmp_path: Path):
    config = read_data("models")["glm-5.2"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = [find_model(source) for source in (str(tmp_path), str(tmp_path / "config.json"))]
    for shape in (*shapes, find_model(config)):
        assert shape.latent == find_model("glm-5.2").latent
        assert shape.indexer == find_model("glm-5.2").indexer


def test_layers_with_an_indexer_may_be_listed():
    config = dict(read_data("models")["glm-5.2"]["config"])
    config["indexer_types"] = ["full", "shared", "full"]
    assert find_model(config).indexer.layers == (0, 2)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"model_type": "mamba"}, "knows the model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank"),
        ({"vocab_size": True}, "vocab_size"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(change, match):
    with pytest.raises(CheckpointError, match=match):
        find_model({**read_data("models")["glm-5.2"]["config"], **change})


@pytest.mark.parametrize("text, match", [("{", "JSON file"), ("[]", "JSON object")])
def test_a_broken_file_is_refused(text, match, tmp_path: Path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=match):
        find_model(str(tmp_path))


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="known name") as error:
        find_model("glm-9")
    assert "glm-5.2" in error.value.values["known"]
