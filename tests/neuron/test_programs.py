"""The engine's steps as programs of one rank: their shapes, groups, aliases and bytes."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dcpjax.config import EngineConfig, KVTransferConfig
from dcpjax.errors import ConfigError, UnsupportedCombination
from dcpjax.layout import decode_groups, prefill_groups
from neuron.errors import TargetError
from neuron.program import Program
from neuron.programs import Deployment, build_programs
from neuron.targets import find_target
from tests.neuron.models import write_config

SHAPES = {
    "llama-70b": ((32, 4), (16, 2)),
    "qwen3-235b-attention": ((32, 4), (16, 2), (32, 8)),
    "smollm2": ((9, 3),),
}
CASES = [(model, *shape) for model, shapes in SHAPES.items() for shape in shapes]


def deployment(model: str, tp: int, dcp: int, **settings: Any) -> Deployment:
    defaults = {
        "device": "neuron",
        "dtype": "bfloat16",
        "block_size": 32,
        "cp_kv_cache_interleave_size": 32,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "max_model_len": 8192,
        "prefill_gather": "q",
    }
    config = EngineConfig(
        model,
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        **{**defaults, **settings},
    )
    return Deployment(config, find_target("trn2"))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request, tmp_path_factory) -> tuple[int, int, list[Program]]:
    model, tp, dcp = request.param
    path = write_config(model, tmp_path_factory.mktemp("configs"))
    return tp, dcp, build_programs(deployment(path, tp, dcp), all_buckets=False)


def instructions(program: Program) -> list[Any]:
    return [i for computation in program.module.computations for i in computation.instructions]


def test_every_kind_of_program_is_there(case):
    assert [program.kind for program in case[2]] == [
        "decode",
        "segment",
        "prefill",
        "page_gather",
        "page_scatter",
    ]


def test_collectives_are_gathers_and_scatters_over_the_ranks_groups(case):
    tp, dcp, programs = case
    expected = {
        "dcp": {tuple(map(int, group)) for group in decode_groups(tp, dcp)},
        "all": {tuple(range(tp))},
        "tp": {tuple(range(first, tp, dcp)) for first in range(dcp)},
    }
    for program in programs:
        found = [i for i in instructions(program) if i.replica_groups]
        assert {i.opcode for i in found} <= {"all-gather", "reduce-scatter"}
        for instruction in found:
            groups = {tuple(group.replica_ids) for group in instruction.replica_groups}
            assert groups in expected.values()
    kinds = {
        program.kind for program in programs if any(i.replica_groups for i in instructions(program))
    }
    assert kinds == {"decode", "segment", "prefill"}


def test_the_pool_is_updated_in_place(case):
    for program in case[2]:
        aliases = program.module.input_output_alias.entries
        names = [program.inputs[alias.parameter_number].name for alias in aliases]
        assert names == ([] if program.kind == "page_gather" else ["pool"])
        for alias in aliases:
            (output,) = alias.output_shape_index or (0,)
            given, made = program.inputs[alias.parameter_number], program.outputs[output]
            assert (given.shape, given.dtype) == (made.shape, made.dtype)


def test_weights_are_few_parameters_and_no_constants(case):
    for program in case[2]:
        assert len(program.inputs) < 128
        assert len(program.to_bytes()) < 1 << 20


def test_a_rank_holds_its_share(case):
    tp, dcp, programs = case
    inputs = {spec.name: spec for spec in programs[0].inputs}
    assert inputs["rank_ids"].shape == (1,)
    heads = inputs["pool"].shape[2]
    assert heads == 1 or heads * tp // dcp == max(tp // dcp, heads * tp // dcp)
    assert inputs["pool"].dtype == "bfloat16"


def test_ranges_cover_the_packed_input(case):
    for program in case[2][:3]:
        (packed,) = (spec for spec in program.inputs if spec.name == "packed")
        assert [piece.start for piece in packed.ranges][0] == 0
        for before, after in zip(packed.ranges, packed.ranges[1:], strict=False):
            assert before.stop == after.start
        assert packed.ranges[-1].stop == packed.size


@pytest.mark.parametrize(("tp", "dcp", "kv_heads"), [(8, 4, 2), (16, 2, 8)])
def test_prefill_groups_are_those_of_the_document(tmp_path, tp, dcp, kv_heads):
    """TP=8/DCP=4 and TP=16/DCP=2: the ranks that share a sequence's tokens are a stride apart."""
    path = Path(write_config("llama-70b", tmp_path))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_key_value_heads": kv_heads}))
    transfer = KVTransferConfig("kv_producer", "NeuronNixlConnector")
    settings = {"max_num_batched_tokens": 512, "num_pages": 256, "max_num_seqs": 1}
    order = {"kv_transfer_config": transfer, "apply_prefill_dcp": True}
    built = build_programs(deployment(str(path), tp, dcp, **settings, **order), all_buckets=False)
    (prefill,) = (program for program in built if program.kind == "prefill")
    found = {
        tuple(tuple(group.replica_ids) for group in i.replica_groups)
        for i in instructions(prefill)
        if i.replica_groups
    }
    tp_groups, kv_groups = prefill_groups(tp, dcp)
    assert {as_groups(tp_groups), as_groups(kv_groups)} <= found
    assert as_groups(kv_groups)[0] == tuple(range(0, tp, tp // dcp))


def as_groups(groups: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, group)) for group in groups)


LOWER = """
import sys
from tests.neuron.test_programs import deployment
from neuron.programs import build_programs
for program in build_programs(deployment(sys.argv[1], 32, 4), all_buckets=False):
    sys.stdout.buffer.write(program.to_bytes())
"""


def test_two_builds_are_equal_to_the_byte(tmp_path):
    """In two processes, of which one hashes strings otherwise."""
    path = write_config("llama-70b", tmp_path)
    built = [
        subprocess.run(
            [sys.executable, "-c", LOWER, path],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(built[0]) > 100_000
    assert built[0] == built[1]


@pytest.mark.parametrize("field", ["intermediate_size", "vocab_size"])
def test_sizes_that_are_slips_are_refused_at_once(tmp_path, field):
    path = Path(write_config("llama-70b", tmp_path))
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: 2**63}))
    with pytest.raises(TargetError, match="a core holds its weights"):
        build_programs(deployment(str(path), 32, 4))


def test_sizes_that_do_not_fit_are_refused(tmp_path):
    path = write_config("llama-70b", tmp_path)
    with pytest.raises(TargetError, match="a core holds its weights"):
        build_programs(deployment(path, 4, 1, prefill_gather="none"))
    with pytest.raises(TargetError, match="cores of one trn2 instance"):
        deployment(path, 256, 4)
    with pytest.raises(TargetError, match="logical core size"):
        Deployment(EngineConfig(path), find_target("trn2"), lnc=4)
    with pytest.raises(UnsupportedCombination, match="ag_rs"):
        build_programs(deployment(path, 32, 4, dcp_comm_backend="a2a"))
    with pytest.raises(ConfigError, match="fewer sequences.*max_num_seqs=10000000"):
        build_programs(deployment(path, 32, 4, max_num_seqs=10**7))
    for draft_tokens in (0, -1, 8193):
        few = dataclasses.replace(deployment(path, 32, 4), draft_tokens=draft_tokens)
        with pytest.raises(ConfigError, match=f"draft_tokens={draft_tokens}, max_model_len=8192"):
            build_programs(few)
    with pytest.raises(TargetError, match="a target is one of"):
        find_target("trn9")
