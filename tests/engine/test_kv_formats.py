"""What ``kv_cache_dtype`` makes of a model's pools, and what it is refused for."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from dcpjax.cache.parts import INDEXER, LATENT, CachePart
from dcpjax.cache.scaled_rows import Fp8KeyPages, Fp8LatentRows, scaled_format
from dcpjax.config import EngineConfig, GlmConfig, IndexerConfig, LlamaConfig
from dcpjax.engine.blueprint import Blueprint
from dcpjax.errors import ConfigError, UnsupportedCombination

GLM = GlmConfig(
    architecture="GlmMoeDsaForCausalLM",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=3,
    num_heads=8,
    q_lora_rank=8,
    kv_lora_rank=512,
    qk_nope_head_dim=8,
    qk_rope_head_dim=64,
    v_head_dim=8,
    max_position_embeddings=64,
    indexer=IndexerConfig(num_heads=16, head_dim=128, top_k=8, full_layers=(0,)),
)
LLAMA = LlamaConfig(
    architecture="LlamaForCausalLM",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position_embeddings=64,
)


def blueprint(model, kv_cache_dtype: str = "fp8_ds_mla", fp8: str = "float8_e4m3fn") -> Blueprint:
    config = EngineConfig("tiny", kv_cache_dtype=kv_cache_dtype, block_size=64)
    return Blueprint(config, model, "cpu", "bfloat16", fp8)


def test_a_latent_token_takes_656_bytes():
    shape = blueprint(GLM).pool_shapes(4).by_part[LATENT]
    assert shape.row_format == Fp8LatentRows(512, 64)
    assert shape.storage_dtype == jnp.uint8
    assert shape.page_bytes(1) == 3 * 64 * 656
    plain = blueprint(GLM, "fp8").pool_shapes(4).by_part[LATENT]
    assert plain.page_bytes(1) == 3 * 64 * 576


def test_indexer_keys_have_pages_of_their_own_kind():
    part = CachePart(INDEXER, (0,), 1, 128)
    assert scaled_format(part, GLM, "float8_e4m3fn") == Fp8KeyPages(128)


def test_models_without_latents_are_refused():
    with pytest.raises(UnsupportedCombination, match="caches keys and values") as caught:
        blueprint(LLAMA).pool_shapes(4)
    assert caught.value.values == {
        "kv_cache_dtype": "fp8_ds_mla",
        "architecture": "LlamaForCausalLM",
    }


def test_models_that_read_whole_pages_are_refused():
    with pytest.raises(UnsupportedCombination, match="needs a model with an indexer") as caught:
        blueprint(replace(GLM, indexer=None)).pool_shapes(4)
    assert caught.value.values["kv_cache_dtype"] == "fp8_ds_mla"


def test_devices_with_another_8_bit_float_are_refused():
    with pytest.raises(UnsupportedCombination, match="does not have") as caught:
        blueprint(GLM, fp8="float8_e4m3").pool_shapes(4)
    assert caught.value.values == {"kv_cache_dtype": "fp8_ds_mla", "device_fp8": "float8_e4m3"}
    assert blueprint(GLM, "fp8", "float8_e4m3").pool_shapes(4)


def test_latents_that_do_not_come_in_tiles_are_refused():
    with pytest.raises(ConfigError, match="multiple of 128") as caught:
        blueprint(replace(GLM, kv_lora_rank=192)).pool_shapes(4)
    assert caught.value.values["kv_lora_rank"] == 192
