"""Models with a latent cache, written by transformers, against transformers' own tensors."""

import numpy as np
import pytest

from dcpjax.models.checkpoint import open_checkpoint

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers")

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
INDEXER = {"index_topk": 8, "index_head_dim": 10, "index_n_heads": 3}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
CONFIGS = {
    "glm": ("GlmMoeDsa", INDEXER | {"index_topk_freq": 2, "index_skip_topk_offset": 3}),
    "glm layers": (
        "GlmMoeDsa",
        INDEXER
        | {
            "indexer_types": ["full", "shared", "full", "shared", "shared"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense"],
        },
    ),
    "v32": ("DeepseekV32", INDEXER),
    "v3": ("DeepseekV3", {"rope_parameters": YARN, "rope_interleave": False}),
}


@pytest.fixture(params=CONFIGS)
def model(request):
    kind, settings = CONFIGS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **settings)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def unfused(state):
    """transformers holds the experts of a layer as one tensor and stores them one by one."""
    tensors = {}
    for name, value in state.items():
        prefix, found, kind = name.partition("experts.gate_up_proj")
        if found:
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                tensors[f"{prefix}experts.{expert}.gate_proj.weight"] = gate
                tensors[f"{prefix}experts.{expert}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(value):
                tensors[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down
        else:
            tensors[name] = value
    return tensors


def test_saved_models_open_as_they_were(model, tmp_path):
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config.num_draft_layers == 0  # transformers does not save that layer
    state = unfused(model.state_dict())
    assert set(state) == set(checkpoint.shapes)
    for name, tensor in state.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor.numpy(), err_msg=name)


def test_configs_mean_the_same(model, tmp_path):
    model.save_pretrained(tmp_path)
    ours, theirs = open_checkpoint(str(tmp_path)).config, model.config
    attention = model.model.layers[0].self_attn
    assert ours.softmax_scale == pytest.approx(attention.scaling)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.is_rope_interleaved == getattr(theirs, "rope_interleave", True)
    for index, layer in enumerate(model.model.layers):
        assert ours.has_indexer(index) == (getattr(layer.self_attn, "indexer", None) is not None)
        assert ours.has_experts(index) == hasattr(layer.mlp, "experts")
    experts = ours.experts
    assert (experts.scale, experts.is_normalised) == (2.5, True)
    assert (experts.num_groups, experts.groups_per_token, experts.num_per_token) == (2, 1, 2)
