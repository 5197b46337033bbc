"""The number of programs is told before any of them is compiled."""

import pytest

from dcpjax.config import EngineConfig, SpeculativeConfig
from dcpjax.engine.blueprint import context_buckets
from dcpjax.errors import ConfigError
from neuron.buckets import refuse_too_many
from neuron.programs import Deployment, find_calls
from neuron.targets import find_target
from tests.neuron.models import write_config


def test_too_many_programs_are_refused_with_their_numbers() -> None:
    counts = {"decode": 8, "prefill": 3}
    refuse_too_many(counts, 11)
    with pytest.raises(ConfigError, match="too many") as error:
        refuse_too_many(counts, 10)
    assert error.value.values == {"max_programs": 10, "programs": 11, **counts}


@pytest.mark.parametrize("longest", [1, 2047, 2048, 2049, 8192, 1_000_000])
def test_a_context_is_less_than_twice_what_is_needed(longest: int) -> None:
    buckets = context_buckets(longest)
    assert buckets == tuple(sorted(set(buckets))) and buckets[-1] == longest
    for length in (buckets[0], *(bucket + 1 for bucket in buckets[:-1]), longest):
        (fitting, *_) = (bucket for bucket in buckets if bucket >= length)
        assert fitting <= max(2 * length, buckets[0])


def test_every_context_has_every_block(tmp_path) -> None:
    config = EngineConfig(
        write_config("smollm2", tmp_path),
        device="neuron",
        tensor_parallel_size=9,
        decode_context_parallel_size=3,
        max_num_seqs=4,
        max_model_len=8192,
        max_num_batched_tokens=96,
        num_pages=600,
    )
    calls = find_calls(Deployment(config, find_target("trn2")))
    assert len({call.name for call in calls}) == len(calls)
    contexts = {call.name.split("_")[-1] for call in calls if call.kind == "decode"}
    assert len(contexts) == 3
    for kind, blocks in (("decode", 3), ("segment", 1), ("prefill", 2)):
        assert len([call for call in calls if call.kind == kind]) == blocks * len(contexts), kind


def test_an_engine_that_speculates_has_segments_beside_its_prompts(tmp_path) -> None:
    """And takes rows of as many tokens from the devices, whatever the width of a step."""
    config = EngineConfig(
        write_config("smollm2", tmp_path),
        device="neuron",
        tensor_parallel_size=9,
        decode_context_parallel_size=3,
        max_num_seqs=2,
        max_model_len=2048,
        max_num_batched_tokens=96,
        num_pages=600,
        speculative_config=SpeculativeConfig("ngram", 3),
    )
    calls = find_calls(Deployment(config, find_target("trn2"), draft_tokens=2))
    blocks = {
        kind: {call.name.split("_")[1] for call in calls if call.kind == kind}
        for kind in ("decode", "prefill")
    }
    assert blocks["decode"] == {"1x1+0x0", "1x4+0x0", "2x1+0x0", "2x4+0x0"}
    assert all(name.startswith("2x4+") for name in blocks["prefill"])
    _, _, _, previous, _ = zip(
        *(call.arguments for call in calls if call.kind in ("decode", "prefill")), strict=True
    )
    assert {array.shape for array in previous} == {(3 * 4,)}  # two sequences and a prompt
