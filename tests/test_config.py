"""Settings are checked by their annotations and ranges before anything is allocated."""

import dataclasses
import math
from typing import Any, Literal

import pytest

from dcpjax.config import (
    EngineConfig,
    KVTransferConfig,
    LlamaConfig,
    RopeScaling,
    SpeculativeConfig,
    has_type,
)
from dcpjax.errors import ConfigError, UnsupportedCombination

MODEL: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
LLAMA3: dict[str, Any] = {"kind": "llama3", "factor": 8.0}


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(EngineConfig)])
def test_every_setting_has_the_type_of_its_annotation(name: str) -> None:
    wrong = [1.5, b"x", [], {}, object()] + ["no such choice"] * (
        name not in ("model", "master_addr")
    )
    for value in wrong:
        with pytest.raises(ConfigError, match=f"^{name} is"):
            EngineConfig(**{"model": "m", name: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": -1},
        {"seed": 2**63},
        {"seed": True},
        {"block_size": True},
        {"num_pages": 0},
        {"enable_prefix_caching": 1},
        {"enable_prefix_caching": "no"},
        {"model": ""},
    ],
)
def test_values_outside_their_range(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"^{name} is") as caught:
        EngineConfig(**{"model": "m", **settings})
    assert caught.value.values == settings


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"nnodes": 0}, "nnodes is at least 1"),
        ({"nnodes": 2, "node_rank": 2}, r"node_rank is in \[0, nnodes\)"),
        ({"node_rank": 1}, r"node_rank is in \[0, nnodes\)"),
        ({"nnodes": 2, "node_rank": -1}, r"node_rank is in \[0, nnodes\)"),
        ({"master_addr": ""}, "master_addr is not empty"),
        ({"master_port": 0}, "master_port is a port"),
        ({"master_port": -5}, r"know, in \[1, 65535\]"),
        ({"master_port": 65536}, "master_port is a port"),
        ({"nnodes": 3}, "the number of ranks is a multiple of nnodes"),
    ],
)
def test_processes_that_make_no_engine(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        EngineConfig("m", tensor_parallel_size=4, **settings)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"kv_transfer_config": KVTransferConfig("kv_consumer")}, "kv_role='kv_consumer'"),
        ({"kv_transfer_config": KVTransferConfig("kv_both")}, "kv_role='kv_both'"),
        (
            {"kv_transfer_config": KVTransferConfig("kv_producer", "MooncakeConnector")},
            "kv_connector='MooncakeConnector'",
        ),
        (
            {"kv_transfer_config": KVTransferConfig("kv_producer", "InProcessConnector")},
            "kv_connector='InProcessConnector'",
        ),
        ({"step_form": "static"}, "step_form"),
        ({"device": "neuron"}, "device"),
    ],
)
def test_what_several_processes_cannot_do_names_both_settings(
    setting: dict[str, Any], name: str
) -> None:
    EngineConfig("m", tensor_parallel_size=2, **setting)
    with pytest.raises(UnsupportedCombination, match="nnodes") as caught:
        EngineConfig("m", tensor_parallel_size=2, nnodes=2, **setting)
    assert name in str(caught.value)
    with pytest.raises(UnsupportedCombination) as other:
        EngineConfig("m", tensor_parallel_size=2, nnodes=2, node_rank=1, **setting)
    assert str(other.value) == str(caught.value), "every process says the same"


@pytest.mark.parametrize("buffer", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("is_pipelined", [True, False])
def test_several_processes_compute_prompts_that_others_read(
    buffer: Any, is_pipelined: bool
) -> None:
    transfer = KVTransferConfig(
        "kv_producer", kv_buffer_device=buffer, pipelined_sends=is_pipelined
    )
    for rank in range(2):
        EngineConfig(
            "m", tensor_parallel_size=2, nnodes=2, node_rank=rank, kv_transfer_config=transfer
        )


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_seeds(seed: int) -> None:
    assert EngineConfig("m", seed=seed).seed == seed


@pytest.mark.parametrize(("most", "is_refused"), [(31, True), (32, False), (33, False)])
def test_a_step_holds_one_stripe_over_all_ranks(most: int, is_refused: bool) -> None:
    """Widths of prompt blocks are multiples of ranks x interleave: a smaller limit would not
    be kept."""
    settings: dict[str, Any] = {
        "tensor_parallel_size": 4,
        "decode_context_parallel_size": 4,
        "cp_kv_cache_interleave_size": 8,
        "max_num_batched_tokens": most,
    }
    if not is_refused:
        EngineConfig("m", **settings)
        return
    with pytest.raises(ConfigError, match="max_num_batched_tokens is at least") as caught:
        EngineConfig("m", **settings)
    assert {"max_num_batched_tokens", "cp_kv_cache_interleave_size"} <= set(caught.value.values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 0),
        ("num_kv_heads", 0),
        ("num_kv_heads", 3),
        ("head_dim", 0),
        ("head_dim", -2),
        ("head_dim", 3),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", -1),
        ("rope_theta", 0.0),
        ("rope_theta", math.nan),
        ("rope_theta", math.inf),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", math.nan),
    ],
)
def test_models_that_make_no_sense(name: str, value: Any) -> None:
    LlamaConfig(**MODEL)
    with pytest.raises(ConfigError) as caught:
        LlamaConfig(**{**MODEL, name: value})
    assert name in caught.value.values


@pytest.mark.parametrize(
    "change",
    [
        {"factor": 0.5},
        {"factor": math.nan},
        {"factor": math.inf},
        {"low_freq_factor": 4.0},  # as the high one: a division by zero
        {"low_freq_factor": 5.0},
        {"low_freq_factor": 0.0},
        {"high_freq_factor": math.nan},
        {"original_max_position": 0},
    ],
)
def test_rope_scalings_that_make_no_sense(change: dict[str, Any]) -> None:
    RopeScaling(**LLAMA3)
    with pytest.raises(ConfigError):
        RopeScaling(**{**LLAMA3, **change})


@pytest.mark.parametrize(
    ("annotation", "yes", "no"),
    [
        (int, [0, -1], [True, 1.0, "1", None]),
        (float, [0, 1.5, math.inf], [True, "1", None]),
        (bool, [True, False], [0, 1, "no"]),
        (int | None, [None, 3], [False, 3.0]),
        (Literal["a", "b"], ["a"], ["c", "", 1, ["a"], None]),
        (tuple[int, ...], [(), (1, 2)], [[1], (1, "a"), (True,)]),
        (tuple[tuple[int, float], ...], [(), ((1, 2),)], [((1,),), ((1, 2, 3),), (1, 2)]),
    ],
)
def test_types(annotation: Any, yes: list[Any], no: list[Any]) -> None:
    assert [value for value in yes + no if has_type(value, annotation)] == yes


# KV transfer

PRODUCER = {"kv_role": "kv_producer"}


def test_a_kv_transfer_config_may_be_written_as_other_systems_write_it() -> None:
    extra = {"backends": ["LIBFABRIC"], "kv_lease_duration": 7.5}
    settings = {"kv_role": "kv_both", "kv_port": 5600, "kv_connector_extra_config": extra}
    config = EngineConfig.from_settings("m", {"kv_transfer_config": settings}).kv_transfer_config
    assert config == KVTransferConfig(
        "kv_both", kv_port=5600, backends=("LIBFABRIC",), kv_lease_duration=7.5
    )
    assert config.is_producer and config.is_consumer


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, "needs a kv_role: one of kv_producer"),
        ({"kv_role": "both"}, "kv_role is one of"),
        ({**PRODUCER, "kv_connector": "LMCache"}, "kv_connector is one of"),
        ({**PRODUCER, "kv_rank": 0}, "unknown KV transfer setting kv_rank"),
        ({**PRODUCER, "kv_connector_extra_config": []}, None),
        ({**PRODUCER, "kv_connector_extra_config": [1]}, "is an object"),
        ({**PRODUCER, "kv_connector_extra_config": {"ucx": 1}}, "unknown KV transfer setting ucx"),
        ({**PRODUCER, "kv_port": 65536}, "kv_port is in"),
        ({**PRODUCER, "kv_port": "1"}, "kv_port is of type int"),
        ({**PRODUCER, "kv_ip": "0.0.0.0"}, "set advertised_ip where kv_ip is all"),
        ({**PRODUCER, "kv_ip": "0.0.0.0", "advertised_ip": "10.0.0.1"}, None),
        ({**PRODUCER, "kv_lease_duration": 0}, "kv_lease_duration is a finite number above 0"),
        ({**PRODUCER, "heartbeat_interval": 20}, "heartbeat_interval is below kv_lease_extension"),
        ({**PRODUCER, "engine_id": ""}, "engine_id is not empty"),
        ({**PRODUCER, "backends": []}, "backends is not empty"),
        ({**PRODUCER, "backends": "UCX"}, "backends is"),
    ],
)
def test_kv_transfer_settings(settings: dict[str, Any], rule: str | None) -> None:
    if rule is None:
        KVTransferConfig.from_settings(settings)
        return
    with pytest.raises(ConfigError, match=rule):
        EngineConfig.from_settings("m", {"kv_transfer_config": settings})


@pytest.mark.parametrize("chosen", [None, 4])
def test_where_kv_is_transferred_whole_pages_stay_together(chosen: int | None) -> None:
    ranks = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    settings: dict[str, Any] = {**ranks, "block_size": 8, "cp_kv_cache_interleave_size": chosen}
    assert EngineConfig.from_settings("m", settings).interleave == (chosen or 1)
    settings["kv_transfer_config"] = PRODUCER
    assert EngineConfig.from_settings("m", settings).interleave == (chosen or 8)


def test_the_prefill_order_of_ranks_is_for_producers() -> None:
    additional = {"additional_config": {"apply_prefill_dcp": True}}
    producer = {**additional, "kv_transfer_config": PRODUCER}
    assert EngineConfig.from_settings("m", producer).apply_prefill_dcp
    for settings in (additional, {**additional, "kv_transfer_config": {"kv_role": "kv_both"}}):
        with pytest.raises(UnsupportedCombination, match="apply_prefill_dcp.*kv_producer"):
            EngineConfig.from_settings("m", settings)


# Speculation

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}
SYNTHETIC = {**NGRAM, "rejection_sample_method": "synthetic"}


def speculation(settings: dict[str, Any]) -> SpeculativeConfig:
    config = EngineConfig.from_settings("m", {"speculative_config": settings}).speculative_config
    assert config is not None
    return config


def test_a_speculative_config_is_an_object() -> None:
    config = speculation(NGRAM)
    assert config == SpeculativeConfig("ngram", 3) and config.width == 4
    assert (config.shortest_lookup, config.longest_lookup) == (2, 4)


@pytest.mark.parametrize(
    ("lookup", "sizes"),
    [
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_max": 9}, (2, 9)),
        ({"prompt_lookup_min": 1}, (1, 4)),
        ({"prompt_lookup_min": 6}, (6, 6)),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 3}, (3, 3)),
    ],
)
def test_lookups(lookup: dict[str, int], sizes: tuple[int, int]) -> None:
    config = speculation(NGRAM | lookup)
    assert (config.shortest_lookup, config.longest_lookup) == sizes


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, "needs a method: one of ngram, mtp"),
        ({"method": "ngram"}, "needs num_speculative_tokens"),
        ({**NGRAM, "method": "eagle"}, "method is one of ngram, mtp"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens is at least 1"),
        ({**NGRAM, "num_speculative_tokens": 2.0}, "num_speculative_tokens is of type int"),
        ({**NGRAM, "model": "x"}, "unknown speculation setting model"),
        ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_min is at least 1"),
        (
            {**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min is at most prompt_lookup_max",
        ),
        ({**NGRAM, "method": "mtp", "prompt_lookup_max": 3}, "belong to the method 'ngram'"),
        (SYNTHETIC, "given together with"),
        ({**NGRAM, "synthetic_acceptance_length": 2.0}, "given together with"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 0.9}, "at least 1, no draft"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 4.1}, "at most num_speculative_tokens"),
        ({**SYNTHETIC, "synthetic_acceptance_length": math.nan}, "at least 1, no draft"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 4}, None),
    ],
)
def test_speculation_settings(settings: dict[str, Any], rule: str | None) -> None:
    if rule is None:
        speculation(settings)
        return
    with pytest.raises(ConfigError, match=rule):
        speculation(settings)
