"""config.json of models with a latent cache becomes a GlmConfig, or what is wrong is named."""

from pathlib import Path

import pytest

from dcpjax.config import ExpertsConfig, GlmConfig, IndexerConfig, YarnScaling
from dcpjax.errors import CheckpointError, ConfigError
from dcpjax.models.huggingface import read_config
from tests.models.tiny_glm import GLM, V3, V32, write_config

GLM_52 = Path(__file__).parent.parent / "assets" / "glm-5.2" / "config.json"
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


@pytest.fixture
def read(tmp_path):
    return lambda values: read_config(write_config(tmp_path, values))


def without(values, *keys):
    return {key: value for key, value in values.items() if key not in keys}


def test_every_width(read):
    config, dtype = read(GLM | {"eos_token_id": [2, 3]})
    assert dtype == "float32"
    assert config == GlmConfig(
        architecture="GlmMoeDsaForCausalLM",
        vocab_size=67,
        hidden_size=20,
        intermediate_size=23,
        num_layers=4,
        num_heads=3,
        q_lora_rank=14,
        kv_lora_rank=12,
        qk_nope_head_dim=5,
        qk_rope_head_dim=6,
        v_head_dim=9,
        max_position_embeddings=64,
        experts=ExpertsConfig(
            layers=(1, 2, 3), num_experts=4, num_per_token=2, width=7, num_shared=2, scale=2.5
        ),
        indexer=IndexerConfig(num_heads=2, head_dim=8, top_k=4, full_layers=(0, 1, 3)),
        num_draft_layers=1,
        eos_token_ids=(2, 3),
    )


def test_architectures_differ_in_their_indexers(read):
    glm, v32, v3 = (read(values)[0] for values in (GLM, V32, V3))
    assert glm.indexer.is_rope_interleaved and not v32.indexer.is_rope_interleaved
    assert v3.indexer is None
    assert glm.is_rope_interleaved and v32.is_rope_interleaved and v3.is_rope_interleaved
    turned = V32 | {"indexer_rope_interleave": True, "rope_interleave": False}
    config, _ = read(turned)
    assert config.indexer.is_rope_interleaved and not config.is_rope_interleaved


def test_glm_52():
    config, dtype = read_config(GLM_52)
    assert dtype == "bfloat16"
    assert config.indexer.full_layers == (0, 1, *range(2, 78, 4))
    assert len(config.indexer.full_layers) == 21
    assert config.experts.layers == tuple(range(3, 78))
    assert config.qk_rope_head_dim == 64  # not head_dim, which says 192
    assert config.latent_width == 576
    assert (config.rope_theta, config.rope_scaling) == (8e6, None)
    assert config.softmax_scale == 256**-0.5
    assert config.indexer.shares_with_drafts
    assert config.has_indexer(78) and config.has_experts(78)


PERIODIC = {"index_topk_freq": 4, "index_skip_topk_offset": 3, "num_hidden_layers": 8}


@pytest.mark.parametrize(
    "settings, full",
    [
        ({"index_topk_freq": None}, (0, 1, 2, 3)),
        ({"index_topk_freq": 1}, (0, 1, 2, 3)),
        ({"index_topk_freq": 3}, (0, 1)),  # counted from layer 1 on, as the default offset says
        (PERIODIC, (0, 1, 2, 6)),
        ({"index_topk_pattern": "FSFS"}, (0, 2)),
        ({"index_topk_pattern": ["F", "F", "S", "F"]}, (0, 1, 3)),
        ({"index_topk_pattern": ["full", "shared", "shared", "shared"]}, (0,)),
        ({"indexer_types": ["full", "shared", "full", "full"]}, (0, 2, 3)),
        ({"indexer_types": ["full"] * 4, "index_topk_pattern": "FSSS"}, (0, 1, 2, 3)),
    ],
)
def test_layers_with_an_indexer(read, settings, full):
    assert read(GLM | settings)[0].indexer.full_layers == full


@pytest.mark.parametrize(
    "settings, experts",
    [
        ({}, (1, 2, 3)),
        ({"first_k_dense_replace": 0}, (0, 1, 2, 3)),
        ({"first_k_dense_replace": 3}, (3,)),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}, (0, 2)),
    ],
)
def test_layers_with_experts(read, settings, experts):
    assert read(GLM | settings)[0].experts.layers == experts


@pytest.mark.parametrize("dense", [4, 9])
def test_models_without_experts(read, dense):
    assert read(GLM | {"first_k_dense_replace": dense})[0].experts is None


@pytest.mark.parametrize("key", ["n_shared_experts", "num_nextn_predict_layers"])
def test_what_may_be_none_at_all(read, key):
    for values in (GLM | {key: 0}, GLM | {key: None}, without(GLM, key)):
        config, _ = read(values)
        assert (config.experts.num_shared, config.num_draft_layers).count(0) == 1


@pytest.mark.parametrize(
    "settings, theta, scaling",
    [
        ({}, 10000.0, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
        (
            {"rope_theta": 5e5, "rope_scaling": YARN},
            5e5,
            YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 7.0,
                    "factor": 2.0,
                    "original_max_position_embeddings": 8,
                }
            },
            7.0,
            YarnScaling(2.0, 8),
        ),
    ],
)
def test_rotary_settings(read, settings, theta, scaling):
    config, _ = read(V3 | settings)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize("formats", [{}, {"scale_fmt": "ue8m0"}, {"scale_fmt": "float"}])
def test_block_scaled_weights_are_of_a_bfloat16_model(read, formats):
    skipped = {"modules_to_not_convert": ["lm_head"]}
    values = without(GLM, "dtype") | {"quantization_config": FP8 | formats | skipped}
    assert read(values) == (read(GLM)[0], "bfloat16")


@pytest.mark.parametrize(
    "quantization, shown",
    [
        (FP8 | {"quant_method": "awq"}, "'quant_method': 'awq'"),
        (FP8 | {"weight_block_size": [64, 128]}, r"'weight_block_size': \[64, 128\]"),
        (without(FP8, "weight_block_size"), "'weight_block_size': None"),
        (FP8 | {"activation_scheme": "static"}, "'activation_scheme': 'static'"),
        (FP8 | {"fmt": "e5m2"}, "'fmt': 'e5m2'"),
        (FP8 | {"scale_fmt": "e5m3"}, "'scale_fmt': 'e5m3'"),
        (FP8 | {"expert_dtype": "fp4"}, "'expert_dtype': 'fp4'"),
        (FP8 | {"bits": 4}, "'bits': 4"),
        ({}, "'quant_method': None"),
        ("fp8", "'found': 'fp8'"),
    ],
)
def test_other_quantisations_are_refused(read, quantization, shown):
    with pytest.raises(CheckpointError, match=shown):
        read(GLM | {"quantization_config": quantization})


@pytest.mark.parametrize(
    "values, shown",
    [
        (GLM | {"scoring_func": "softmax"}, "'scoring_func': 'softmax'"),
        (GLM | {"topk_method": "greedy"}, "'topk_method': 'greedy'"),
        (GLM | {"attention_bias": True}, "'attention_bias': True"),
        (GLM | {"moe_layer_freq": 2}, "'moe_layer_freq': 2"),
        (GLM | {"hidden_act": "gelu"}, "'hidden_act': 'gelu'"),
        (GLM | {"moe_router_dtype": "bfloat16"}, "'moe_router_dtype': 'bfloat16'"),
        (GLM | {"model_type": "llama"}, "'model_type': 'llama'"),
        (GLM | {"swiglu_limit": 10.0}, "'swiglu_limit': 10.0"),
        (GLM | {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        (V3 | {"index_topk": 4}, "'index_topk': 4"),
        (V3 | {"layer_types": ["full_attention"] * 4}, "'layer_types'"),
        (GLM | {"q_lora_rank": None}, "q_lora_rank=None"),
        (without(GLM, "q_lora_rank"), "q_lora_rank=None"),
        (GLM | {"num_key_value_heads": 1}, "'num_key_value_heads': 3"),
        (GLM | {"qk_head_dim": 10}, "'qk_head_dim': 11"),
        (GLM | {"rope_interleave": 1}, "rope_interleave=1"),
        (GLM | {"indexer_rope_interleave": "yes"}, "indexer_rope_interleave='yes'"),
        (GLM | {"norm_topk_prob": None}, "norm_topk_prob=None"),
        (GLM | {"index_topk_freq": 0}, "index_topk_freq=0"),
        (GLM | {"index_topk_pattern": "FSF"}, "num_hidden_layers=4"),
        (GLM | {"index_topk_pattern": "FSFX"}, "FSFX"),
        (GLM | {"index_topk_pattern": 4}, "index_topk_pattern=4"),
        (GLM | {"indexer_types": ["full"] * 5}, "num_hidden_layers=4"),
        (GLM | {"mlp_layer_types": ["dense", "moe", "moe", "moe"]}, "'moe'"),
        (GLM | {"rope_scaling": YARN | {"type": "linear"}}, "linear"),
        (GLM | {"rope_scaling": YARN | {"attention_factor": 2.0}}, "attention_factor"),
        (GLM | {"rope_scaling": YARN | {"truncate": False}}, "truncate"),
        (GLM | {"rope_scaling": without(YARN, "factor")}, "factor=None"),
        (GLM | {"rope_scaling": without(YARN, "mscale")}, "given together"),
        (GLM | {"rope_scaling": YARN | {"mscale": 0}}, "given together"),
        (GLM | {"rope_scaling": YARN | {"mscale": 2, "mscale_all_dim": 0}}, "given together"),
    ],
)
def test_what_is_not_understood_is_named_with_its_value(read, values, shown):
    with pytest.raises(CheckpointError, match=shown):
        read(values)


@pytest.mark.parametrize("key", ["kv_lora_rank", "index_topk", "n_routed_experts", "n_group"])
def test_what_is_needed_is_asked_for(read, key):
    with pytest.raises(CheckpointError, match=key):
        read(without(GLM, key))


@pytest.mark.parametrize(
    "settings, shown",
    [
        ({"indexer_types": ["shared", "full", "full", "full"]}, r"full_layers=\(1, 2, 3\)"),
        ({"index_topk_pattern": "SSSS"}, r"full_layers=\(\)"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, r"full_layers=\(1, 3\)"),
        ({"n_group": 3}, "num_experts=4, num_groups=3"),
        ({"n_group": 2, "topk_group": 3}, "groups_per_token=3, num_groups=2"),
        ({"n_group": 2, "num_experts_per_tok": 3}, "num_per_token=3"),
        ({"n_group": 4}, "group_size=1"),
        ({"n_shared_experts": -1}, "num_shared=-1"),
        ({"num_nextn_predict_layers": 2}, "num_draft_layers=2"),
        ({"num_nextn_predict_layers": -1}, "num_draft_layers=-1"),
        ({"first_k_dense_replace": -1}, "num_layers=4"),
        ({"index_head_dim": 4}, "index_head_dim=4"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim=5"),
    ],
)
def test_impossible_shapes_are_refused(read, settings, shown):
    with pytest.raises(ConfigError, match=shown):
        read(GLM | settings)
