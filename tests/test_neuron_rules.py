"""The constraints that Neuron's documentation states, on its own examples."""

import dataclasses

import pytest

from dcpjax.config import EngineConfig, LlamaConfig, broken_neuron_rules
from dcpjax.errors import ConfigError, MeshError

MODEL = LlamaConfig("LlamaForCausalLM", 64, 16, 32, 1, 32, 8, 4, 64)  # 32 query, 8 KV heads
PREFILL = EngineConfig(
    "model",
    tensor_parallel_size=8,
    decode_context_parallel_size=4,
    cp_kv_cache_interleave_size=16,
    block_size=16,
)
DECODE = dataclasses.replace(PREFILL, tensor_parallel_size=16, decode_context_parallel_size=2)


def heads(q_heads, kv_heads):
    return dataclasses.replace(MODEL, num_heads=q_heads, num_kv_heads=kv_heads)


def broken(config, model, **keywords):
    errors = broken_neuron_rules(config, model, **keywords)
    assert all(isinstance(error, MeshError) for error in errors)
    return {error.rule: error.values for error in errors}


@pytest.mark.parametrize("transfers_kv", [False, True])
@pytest.mark.parametrize(
    "config, model", [(DECODE, MODEL), (PREFILL, heads(32, 2)), (PREFILL, heads(8, 1))]
)
def test_the_documented_shapes_break_no_rule(config, model, transfers_kv):
    assert broken(config, model, transfers_kv=transfers_kv) == {}


def test_tp_8_dcp_4_needs_few_kv_heads():
    assert broken(PREFILL, MODEL) == {
        "tp is larger than kv_heads": {"tp": 8, "kv_heads": 8},
        "dcp is at most tp // kv_heads": {"dcp": 4, "tp": 8, "kv_heads": 8},
    }


def test_ranks_of_one_kv_head_are_enough_for_dcp():
    assert broken(PREFILL, heads(32, 4)) == {
        "dcp is at most tp // kv_heads": {"dcp": 4, "tp": 8, "kv_heads": 4}
    }


def test_the_query_heads_of_a_kv_head_split_over_dcp():
    assert broken(DECODE, heads(40, 8)) == {
        "q_heads // kv_heads is a multiple of dcp": {"q_heads": 40, "kv_heads": 8, "dcp": 2}
    }


@pytest.mark.parametrize("interleave, is_broken", [(1, True), (8, True), (16, False)])
def test_a_transferred_cache_is_sharded_by_page(interleave, is_broken):
    config = dataclasses.replace(DECODE, cp_kv_cache_interleave_size=interleave)
    assert broken(config, MODEL) == {}
    assert bool(broken(config, MODEL, transfers_kv=True)) == is_broken


def test_without_dcp_no_rule_applies():
    config = EngineConfig("model", tensor_parallel_size=2)
    assert broken(config, MODEL, transfers_kv=True) == {}


@pytest.mark.parametrize(
    "setting, rule",
    [
        ({"decode_context_parallel_size": 3}, "is a multiple of decode_context_parallel_size"),
        ({"cp_kv_cache_interleave_size": 6}, "cp_kv_cache_interleave_size divides block_size"),
    ],
)
def test_the_rules_of_every_engine_are_refused_with_the_settings(setting, rule):
    with pytest.raises(ConfigError, match=rule):
        dataclasses.replace(DECODE, **setting)


def test_an_error_shows_rule_and_values():
    (error,) = broken_neuron_rules(DECODE, heads(40, 8))
    assert str(error) == (
        "q_heads // kv_heads is a multiple of dcp (q_heads=40, kv_heads=8, dcp=2)"
    )
