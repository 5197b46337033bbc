"""config.json becomes a ModelConfig, or what it has that is not understood is named."""

import json
import math

import pytest

from dcpjax.config import LlamaConfig, RopeScaling
from dcpjax.errors import CheckpointError, ConfigError
from dcpjax.models.huggingface import read_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
LLAMA3_ROPE = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def read(tmp_path):
    def read_values(values, generation=None):
        (tmp_path / "config.json").write_text(json.dumps(values))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_config(tmp_path)

    return read_values


def test_llama(read):
    config, dtype = read(LLAMA)
    assert dtype == "bfloat16"
    assert config == LlamaConfig(
        architecture="LlamaForCausalLM",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
    )


def test_architectures_differ_in_biases_and_norms(read):
    flags = [
        (config.has_qkv_bias, config.has_qk_norm)
        for config, _ in (read(LLAMA), read(QWEN2), read(QWEN3 | {"head_dim": 4}))
    ]
    assert flags == [(False, False), (True, False), (False, True)]


@pytest.mark.parametrize(
    "values, head_dim",
    [
        (LLAMA, 4),
        (LLAMA | {"head_dim": None}, 4),
        (LLAMA | {"head_dim": 8}, 8),
        (QWEN3, 128),  # Qwen3's default does not follow from the other widths
    ],
)
def test_head_size(read, values, head_dim):
    assert read(values)[0].head_dim == head_dim


def test_every_head_has_its_own_keys_unless_said_otherwise(read):
    values = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert read(values)[0].num_kv_heads == 4
    with pytest.raises(CheckpointError, match="num_key_value_heads"):
        read(values | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})


@pytest.mark.parametrize(
    "settings, theta, scaling",
    [
        ({}, 10000.0, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 10000.0, RopeScaling("linear", 2.0)),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}},
            7.0,
            RopeScaling("linear", 2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3_ROPE},
            5e5,
            RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | LLAMA3_ROPE},
            5e5,
            RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rotary_settings_old_and_new(read, settings, theta, scaling):
    config, _ = read(LLAMA | settings)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    "settings, shown",
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "beta": 1}}, "beta"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None"),
        ({"rope_scaling": ["linear"]}, "linear"),
        ({"rope_scaling": {"type": ["linear"]}}, "linear"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 3.0},
            },
            "rope_parameters",
        ),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor': 0.5"),
        ({"rope_interleaved": True}, "'rope_interleaved': True"),
    ],
)
def test_other_rotary_settings_are_refused(read, settings, shown):
    with pytest.raises(CheckpointError, match=shown):
        read(LLAMA | settings)


@pytest.mark.parametrize(
    "values, shown",
    [
        (LLAMA | {"hidden_act": "gelu"}, "'hidden_act': 'gelu'"),
        (LLAMA | {"mlp_bias": True}, "'mlp_bias': True"),
        (LLAMA | {"attention_bias": True}, "'attention_bias': True"),
        (LLAMA | {"sliding_window": 4096}, "'sliding_window': 4096"),
        (QWEN2 | {"sliding_window": 9, "use_sliding_window": True}, "'sliding_window': 9"),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (QWEN2 | {"layer_types": 7}, "'layer_types': 7"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "'bits': 4"),
        (LLAMA | {"logit_scale": 0.5}, "'logit_scale': 0.5"),
        (LLAMA | {"rule": "a key named as an argument"}, "'rule'"),
        (LLAMA | {"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        (LLAMA | {"architectures": None}, "architectures=None"),
        (LLAMA | {"hidden_size": "16"}, "hidden_size='16'"),
        (LLAMA | {"hidden_size": 16.5}, "hidden_size=16.5"),
        (LLAMA | {"vocab_size": True}, "vocab_size=True"),
        (LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads=3"),
        (LLAMA | {"eos_token_id": "2"}, "eos_token_id=\\['2'\\]"),
        (LLAMA | {"eos_token_id": True}, "eos_token_id=\\[True\\]"),
        (LLAMA | {"bos_token_id": -1}, "bos_token_id=\\[-1\\]"),
        (LLAMA | {"rms_norm_eps": math.nan}, "rms_norm_eps=nan"),
        (LLAMA | {"rope_theta": math.inf}, "rope_theta=inf"),
        (LLAMA | {"vocab_size": math.nan}, "vocab_size=nan"),
        (LLAMA | {"vocab_size": 10**400}, "finite number"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": math.nan}}, "factor=nan"),
        (LLAMA | {"torch_dtype": "float8"}, "float8"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "'tie_word_embeddings': 'yes'"),
    ],
)
def test_what_is_not_understood_is_named_with_its_value(read, values, shown):
    with pytest.raises(CheckpointError, match=shown):
        read(values)


def test_all_unknown_settings_are_named_at_once(read):
    with pytest.raises(CheckpointError) as caught:
        read(LLAMA | {"one": 1, "two": 2})
    assert caught.value.values == {"settings": {"one": 1, "two": 2}}


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "rms_norm_eps", "num_hidden_layers"])
def test_what_is_needed_is_asked_for(read, key):
    with pytest.raises(CheckpointError, match=key):
        read({name: value for name, value in LLAMA.items() if name != key})


def test_windows_that_are_switched_off_are_fine(read):
    off = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 1}
    assert read(QWEN2 | off | {"layer_types": ["full_attention"] * 2})[0].num_layers == 2


def test_impossible_shapes_are_refused(read):
    with pytest.raises(ConfigError, match="multiple"):
        read(LLAMA | {"num_key_value_heads": 3})
    with pytest.raises(ConfigError, match="num_heads"):
        read(LLAMA | {"num_attention_heads": 0, "num_key_value_heads": 1, "head_dim": 4})


@pytest.mark.parametrize(
    "settings",
    [
        {"head_dim": 0},
        {"max_position_embeddings": -1},
        {"rope_theta": 0},
        {"rms_norm_eps": 0},
        {"rms_norm_eps": -1e-5},
        {"rope_scaling": {"type": "llama3"} | LLAMA3_ROPE | {"low_freq_factor": 4.0}},
    ],
)
def test_impossible_values_are_refused(read, settings):
    with pytest.raises(ConfigError):
        read(LLAMA | settings)


@pytest.mark.parametrize(
    "own, generation, merged",
    [
        (None, None, ()),
        (2, None, (2,)),
        ([2, 3], {"eos_token_id": 4}, (2, 3, 4)),
        (2, {"eos_token_id": [4, 2]}, (2, 4)),
        (None, {"eos_token_id": [7]}, (7,)),
        (2, {}, (2,)),
    ],
)
def test_end_tokens_are_merged(read, own, generation, merged):
    assert read(LLAMA | {"eos_token_id": own}, generation)[0].eos_token_ids == merged


def test_bos_token(read):
    assert read(LLAMA | {"bos_token_id": 1})[0].bos_token_id == 1
    assert read(LLAMA | {"bos_token_id": None})[0].bos_token_id is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_files_are_refused_by_path(tmp_path, content, name):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"/{name}"):
        read_config(tmp_path)


def test_a_missing_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="config.json"):
        read_config(tmp_path)
