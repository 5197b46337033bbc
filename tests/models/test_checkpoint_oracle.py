"""Checkpoints written by transformers, and a real GGUF file, against transformers' own tensors."""

import numpy as np
import pytest

from dcpjax.models.catalog import bring_model
from dcpjax.models.checkpoint import open_checkpoint

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
load_gguf_checkpoint = pytest.importorskip(
    "transformers.modeling_gguf_pytorch_utils"
).load_gguf_checkpoint

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama tied": ("LlamaConfig", {"tie_word_embeddings": True, "eos_token_id": [2, 3]}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "bos_token_id": 1}),
}


@pytest.fixture(params=CONFIGS)
def model(request):
    kind, settings = CONFIGS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SHAPE, **settings)
    return transformers.AutoModelForCausalLM.from_config(config)


def assert_same_tensors(checkpoint, model):
    state = model.state_dict()
    for name in checkpoint.shapes:
        expected = state[name]
        read = np.array(checkpoint.read(name), np.float32)
        np.testing.assert_array_equal(read, expected.float().numpy(), err_msg=name)
    tied = {"lm_head.weight"} if checkpoint.config.tie_word_embeddings else set()
    assert set(state) - tied == set(checkpoint.shapes)


def assert_same_config(ours, theirs):
    rope = theirs.rope_parameters
    eos = theirs.eos_token_id
    assert (
        ours.vocab_size,
        ours.hidden_size,
        ours.intermediate_size,
        ours.num_layers,
        ours.num_heads,
        ours.num_kv_heads,
        ours.max_position_embeddings,
        ours.rope_theta,
        ours.tie_word_embeddings,
        ours.bos_token_id,
    ) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.max_position_embeddings,
        rope["rope_theta"],
        theirs.tie_word_embeddings,
        theirs.bos_token_id,
    )
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert list(ours.eos_token_ids) == (eos if isinstance(eos, list) else [eos] * (eos is not None))
    kind = ours.rope_scaling.kind if ours.rope_scaling else "default"
    assert kind == rope["rope_type"]


def test_saved_models_open_as_they_were(model, tmp_path):
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.dtype == "float32"
    assert_same_config(checkpoint.config, model.config)
    assert_same_tensors(checkpoint, model)


def test_shards_and_bfloat16_open_as_they_were(model, tmp_path):
    model = model.to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.dtype == "bfloat16"
    assert_same_tensors(checkpoint, model)


def test_smollm2_is_what_transformers_makes_of_the_file():
    path = bring_model("smollm2-135m")
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):  # names only; from_pretrained itself would want accelerate
        empty = transformers.AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
    checkpoint = open_checkpoint("smollm2-135m")
    assert_same_config(checkpoint.config, config)
    assert checkpoint.shapes.keys() == tensors.keys() - {"lm_head.weight"}
    for name in checkpoint.shapes:
        np.testing.assert_array_equal(checkpoint.read(name), tensors[name].numpy(), err_msg=name)
