"""Folders with safetensors: what opens has exactly the tensors of its model, bit for bit."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dcpjax.config import LlamaConfig
from dcpjax.errors import CheckpointError
from dcpjax.models.checkpoint import expected_tensors, open_checkpoint

CONFIG = LlamaConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=10,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    has_qkv_bias=True,
)
VALUES = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def random_tensors(dtype=np.float32):
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal(shape).astype(dtype)
        for name, shape in expected_tensors(CONFIG).items()
    }


def write_folder(folder, tensors, **changes):
    (folder / "config.json").write_text(json.dumps(VALUES | changes))
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return str(folder)


def write_shards(folder, tensors, num_shards=3):
    write_folder(folder, {})
    weight_map = {}
    for index in range(num_shards):
        shard = dict(list(tensors.items())[index::num_shards])
        name = f"model-{index + 1:05}-of-{num_shards:05}.safetensors"
        save_file(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder, weight_map):
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def assert_equal_tensors(checkpoint, tensors):
    assert checkpoint.shapes == {name: value.shape for name, value in tensors.items()}
    for name, value in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == value.dtype
        np.testing.assert_array_equal(read, value)


def test_names_and_shapes_of_a_layer():
    shapes = expected_tensors(CONFIG)
    assert len(shapes) == 2 * 12 + 3
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (10, 8)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (16, 8)
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == (8,)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (8, 16)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (8, 12)
    assert "model.layers.0.self_attn.q_norm.weight" not in shapes


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_one_file(tmp_path, dtype):
    tensors = random_tensors(dtype)
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors))
    assert checkpoint.dtype == np.dtype(dtype).name
    assert checkpoint.path == tmp_path
    assert_equal_tensors(checkpoint, tensors)


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_shards(tmp_path, num_shards):
    tensors = random_tensors()
    write_shards(tmp_path, tensors, num_shards)
    assert_equal_tensors(open_checkpoint(str(tmp_path)), tensors)


def test_threads_may_read_at_once(tmp_path):
    tensors = random_tensors()
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors))
    with ThreadPoolExecutor(8) as pool:
        names = list(tensors) * 8
        for name, read in zip(names, pool.map(checkpoint.read, names), strict=True):
            np.testing.assert_array_equal(read, tensors[name])


def test_what_is_read_cannot_change_the_file(tmp_path):
    checkpoint = open_checkpoint(write_folder(tmp_path, random_tensors()))
    with pytest.raises(ValueError, match="read-only"):
        checkpoint.read("model.norm.weight")[0] = 1


@pytest.mark.parametrize("has_head", [True, False])
def test_tied_models_may_carry_a_head(tmp_path, has_head):
    tensors = random_tensors()
    head = tensors.pop("lm_head.weight")
    extra = {"lm_head.weight": head} if has_head else {}
    path = write_folder(tmp_path, tensors | extra, tie_word_embeddings=True)
    checkpoint = open_checkpoint(path)
    assert_equal_tensors(checkpoint, tensors)
    with pytest.raises(CheckpointError, match="lm_head"):
        checkpoint.read("lm_head.weight")


def test_rotary_buffers_are_harmless(tmp_path):
    tensors = random_tensors()
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    assert_equal_tensors(open_checkpoint(write_folder(tmp_path, tensors | buffer)), tensors)


def test_without_weights_the_config_is_enough(tmp_path):
    checkpoint = open_checkpoint(write_folder(tmp_path, {}, torch_dtype="bfloat16"), weights=False)
    assert checkpoint.shapes == expected_tensors(CONFIG)
    assert checkpoint.dtype == "bfloat16"
    with pytest.raises(CheckpointError, match="without its weights"):
        checkpoint.read("model.norm.weight")


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("weights", [False, True])
def test_special_tokens_are_in_the_vocabulary(tmp_path, key, weights):
    """Of 10 tokens. A token of more than 31 bits would end the engine in a later step."""
    open_checkpoint(write_folder(tmp_path, random_tensors(), **{key: 9}), weights=weights)
    for token in (10, 2**31, 2**63):
        folder = write_folder(tmp_path, {}, **{key: token})
        with pytest.raises(CheckpointError, match=f"token_ids=.{token}.*vocab_size=10"):
            open_checkpoint(folder, weights=weights)


def test_all_wrong_tensors_are_named_at_once(tmp_path):
    tensors = random_tensors()
    del tensors["model.norm.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((12, 8), np.float32)
    tensors["lm_head.weight"] = np.ones((8, 10), np.float32)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(write_folder(tmp_path, tensors))
    assert caught.value.values == {
        "missing": "1: model.norm.weight",
        "unknown": "1: model.layers.2.mlp.up_proj.weight",
        "wrong_shape": "1: lm_head.weight (8, 10) instead of (10, 8)",
    }


def test_long_lists_are_counted(tmp_path):
    tensors = {"model.norm.weight": np.ones(8, np.float32)}
    with pytest.raises(CheckpointError, match="26: .* and 18 more"):
        open_checkpoint(write_folder(tmp_path, tensors))


def test_a_cut_file_is_refused_wherever_it_ends(tmp_path):
    path = write_folder(tmp_path, random_tensors())
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for length in [0, 7, 8, 100, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="whole and readable"):
            open_checkpoint(path)


def test_other_stored_types_are_refused(tmp_path):
    tensors = random_tensors() | {"model.norm.weight": np.ones(8, np.int8)}
    with pytest.raises(CheckpointError, match="'I8'"):
        open_checkpoint(write_folder(tmp_path, tensors))


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=re.escape("model.safetensors.index.json")):
        open_checkpoint(write_folder(tmp_path, {}))


def test_missing_shards_are_named(tmp_path):
    write_shards(tmp_path, random_tensors())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="absent=\\['model-00002-of-00003.safetensors'\\]"):
        open_checkpoint(str(tmp_path))


def test_shards_outside_the_folder_are_refused(tmp_path):
    weight_map = write_shards(tmp_path, random_tensors())
    write_index(tmp_path, weight_map | {"model.norm.weight": "../model.safetensors"})
    with pytest.raises(CheckpointError, match=r"\.\./model"):
        open_checkpoint(str(tmp_path))


def test_tensors_are_where_the_index_says(tmp_path):
    weight_map = write_shards(tmp_path, random_tensors())
    write_index(tmp_path, weight_map | {"model.absent.weight": "model-00001-of-00003.safetensors"})
    with pytest.raises(CheckpointError, match="model.absent.weight"):
        open_checkpoint(str(tmp_path))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    tensors = random_tensors()
    weight_map = write_shards(tmp_path, tensors)
    save_file(tensors, tmp_path / "all.safetensors")
    write_index(tmp_path, weight_map | {"model.norm.weight": "all.safetensors"})
    with pytest.raises(CheckpointError, match="in one file"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "content", ["", "{", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}']
)
def test_a_broken_index_is_refused(tmp_path, content):
    write_folder(tmp_path, {})
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="weight_map"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["", "no-such-model", "README.md"])
def test_what_is_no_model_is_refused_with_the_known_names(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("{}")
    with pytest.raises(CheckpointError, match="smollm2-135m"):
        open_checkpoint(name)
