"""Folders of models with a latent cache: what opens has exactly the tensors of its model."""

import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dcpjax.errors import CheckpointError
from dcpjax.models.checkpoint import fingerprint, open_checkpoint
from dcpjax.models.weights import random_weights
from tests.models.tiny_glm import GLM, V3, V32, write_config, write_model

GLM_52 = Path(__file__).parent.parent / "assets" / "glm-5.2" / "config.json"
DRAFT = "model.layers.4."


def rewrite(folder, tensors):
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def without_drafts(tensors):
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(DRAFT)}


@pytest.mark.parametrize("values", [GLM, V32, V3], ids=["glm", "v32", "v3"])
def test_everything_is_read_as_it_is_stored(tmp_path, values):
    tensors = write_model(tmp_path, values)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.dtype == "float32"
    assert checkpoint.config.num_draft_layers == 1
    assert checkpoint.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor)


def test_names_and_shapes(tmp_path):
    shapes = open_checkpoint(str(write_config(tmp_path)), weights=False).shapes
    attention_and_norms, indexer, dense, experts = 9, 5, 3, 2 + 3 * 4 + 3
    assert len(shapes) == 3 + 5 * attention_and_norms + 4 * indexer + dense + 4 * experts + 4
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (23, 20)
    assert shapes["model.layers.1.mlp.experts.3.down_proj.weight"] == (20, 7)
    assert shapes["model.layers.1.mlp.shared_experts.up_proj.weight"] == (14, 20)
    assert shapes["model.layers.1.self_attn.kv_b_proj.weight"] == (42, 12)
    assert shapes["model.layers.3.self_attn.indexer.wq_b.weight"] == (16, 14)
    assert "model.layers.2.self_attn.indexer.wq_b.weight" not in shapes  # shared
    assert shapes[f"{DRAFT}self_attn.indexer.k_norm.bias"] == (8,)
    assert shapes[f"{DRAFT}eh_proj.weight"] == (20, 40)
    assert shapes[f"{DRAFT}mlp.gate.e_score_correction_bias"] == (4,)


def test_no_shared_expert_and_no_draft_layer(tmp_path):
    folder = write_config(tmp_path, GLM | {"n_shared_experts": 0, "num_nextn_predict_layers": 0})
    shapes = open_checkpoint(str(folder), weights=False).shapes
    assert not any("shared_experts" in name or name.startswith(DRAFT) for name in shapes)


def test_glm_52_has_as_many_parameters_as_published():
    whole = open_checkpoint(str(GLM_52), weights=False)
    model = open_checkpoint(str(GLM_52), weights=False, draft_layers=False)
    assert sum(map(math.prod, whole.shapes.values())) == pytest.approx(753.3e9, abs=0.05e9)
    assert sum(map(math.prod, model.shapes.values())) == pytest.approx(743.4e9, abs=0.05e9)


def test_copies_that_a_draft_layer_may_carry_are_not_read(tmp_path):
    tensors = write_model(tmp_path)
    copies = {
        f"{DRAFT}embed_tokens.weight": tensors["model.embed_tokens.weight"],
        f"{DRAFT}shared_head.head.weight": tensors["lm_head.weight"],
        f"{DRAFT}self_attn.rotary_emb.inv_freq": np.ones(3, np.float32),
    }
    checkpoint = open_checkpoint(rewrite(tmp_path, tensors | copies))
    assert checkpoint.shapes.keys() == tensors.keys()
    for name in copies:
        with pytest.raises(CheckpointError, match="no such tensor"):
            checkpoint.read(name)


def test_a_draft_layer_is_opened_on_demand(tmp_path):
    tensors = write_model(tmp_path)
    for wanted in (None, True):
        checkpoint = open_checkpoint(str(tmp_path), draft_layers=wanted)
        assert checkpoint.config.num_draft_layers == 1
        assert checkpoint.shapes.keys() == tensors.keys()
    for weights in (True, False):
        checkpoint = open_checkpoint(str(tmp_path), draft_layers=False, weights=weights)
        assert checkpoint.config.num_draft_layers == 0
        assert checkpoint.shapes.keys() == without_drafts(tensors).keys()
        with pytest.raises(CheckpointError):
            checkpoint.read(f"{DRAFT}enorm.weight")


def test_a_draft_layer_whose_tensors_are_all_left_out_is_not_there(tmp_path):
    tensors = without_drafts(write_model(tmp_path))
    path = rewrite(tmp_path, tensors)
    for wanted in (None, False):
        checkpoint = open_checkpoint(path, draft_layers=wanted)
        assert checkpoint.config.num_draft_layers == 0
        assert checkpoint.shapes.keys() == tensors.keys()
    with pytest.raises(CheckpointError, match=rf"missing='35: {DRAFT}enorm.weight"):
        open_checkpoint(path, draft_layers=True)


@pytest.mark.parametrize("wanted", [None, True, False])
@pytest.mark.parametrize("name", ["eh_proj.weight", "mlp.experts.2.up_proj.weight"])
def test_a_part_of_a_draft_layer_is_refused_by_name(tmp_path, wanted, name):
    tensors = write_model(tmp_path)
    del tensors[DRAFT + name]
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(rewrite(tmp_path, tensors), draft_layers=wanted)
    assert caught.value.values == {"missing": f"1: {DRAFT}{name}"}


@pytest.mark.parametrize("weights", [True, False])
def test_a_draft_layer_that_the_config_does_not_name_is_not_opened(tmp_path, weights):
    tensors = write_model(tmp_path, GLM | {"num_nextn_predict_layers": 0})
    with pytest.raises(CheckpointError, match="draft layer"):
        open_checkpoint(str(tmp_path), draft_layers=True, weights=weights)
    stray = {f"{DRAFT}enorm.weight": np.ones(20, np.float32)}
    with pytest.raises(CheckpointError, match=f"unknown='1: {DRAFT}enorm.weight"):
        open_checkpoint(rewrite(tmp_path, tensors | stray))


@pytest.mark.parametrize(
    "change, shown",
    [
        (("model.layers.2.self_attn.indexer.wk.weight", (8, 20)), "unknown='1:"),
        (("model.layers.0.mlp.gate.weight", (4, 20)), "unknown='1:"),
        (("model.layers.1.mlp.experts.4.up_proj.weight", (7, 20)), "unknown='1:"),
        (("model.layers.1.mlp.gate.weight", (5, 20)), r"\(5, 20\) instead of \(4, 20\)"),
    ],
    ids=["shared indexer", "dense router", "fifth expert", "shape"],
)
def test_tensors_are_those_of_the_layer(tmp_path, change, shown):
    tensors = write_model(tmp_path)
    name, shape = change
    with pytest.raises(CheckpointError, match=shown):
        open_checkpoint(rewrite(tmp_path, tensors | {name: np.ones(shape, np.float32)}))


@pytest.mark.parametrize("values", [GLM, V3], ids=["glm", "v3"])
def test_the_fingerprint_sees_config_norm_and_last_keys(tmp_path, values):
    tensors = write_model(tmp_path, values)
    first = fingerprint(open_checkpoint(str(tmp_path)))
    assert fingerprint(open_checkpoint(str(tmp_path))) == first
    without_drafts = fingerprint(open_checkpoint(str(tmp_path), draft_layers=False))
    assert without_drafts == first, "an engine without drafts reads the same KV"
    found = {first}
    sample = ("model.norm.weight", "model.layers.3.self_attn.kv_a_proj_with_mqa.weight")
    for name in sample:
        found.add(fingerprint(open_checkpoint(rewrite(tmp_path, tensors | {name: -tensors[name]}))))
    assert len(found) == 3


def test_random_weights_are_sensible_ones(tmp_path):
    """Norms pass on, biases change nothing, and a product keeps the size of its input."""
    random = random_weights(open_checkpoint(str(write_config(tmp_path)), weights=False), seed=3)
    for name, shape in random.shapes.items():
        tensor = random.read(name)
        assert (tensor.shape, tensor.dtype) == (shape, np.float32)
        np.testing.assert_array_equal(tensor, random.read(name))
        if name.endswith(("norm.weight", "bias")):
            assert np.all(tensor == (1 if name.endswith("weight") else 0)), name
        else:
            assert 0.5 < np.square(tensor).mean() * shape[-1] < 2, name
    other = random_weights(open_checkpoint(str(tmp_path), weights=False), seed=4)
    router = "model.layers.1.mlp.gate.weight"
    assert not np.array_equal(random.read(router), other.read(router))
