"""A report says what is in a program."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from neuron.errors import RuleError
from neuron.hlo import entry
from neuron.report import report
from neuron.report_text import size_text
from neuron.targets import find_target
from tests.neuron.lint.programs import AXIS, program, spec

F32 = np.float32
TRN2 = find_target("trn2")
ALL = (0, 1, 2, 3)


def exchanging():
    """One all-gather, a loop with two more, and a buffer that is updated in place."""

    def run(x, pool):
        whole = lax.all_gather(x, AXIS, tiled=True)

        def body(_, y):
            return y + lax.all_gather(y[:8], AXIS, tiled=True)

        return lax.fori_loop(0, 2, body, whole), pool + 1.0

    return program(run, spec((8,), F32), spec((4,), F32), aliases={1: 1})


def test_a_report_counts_what_there_is():
    found = report(exchanging(), TRN2)
    assert (found.name, found.kind, found.num_ranks, found.target) == ("small", "decode", 4, "trn2")
    assert found.opcodes["all-gather"] == 2
    assert found.opcodes["while"] == 1
    assert list(found.opcodes.values()) == sorted(found.opcodes.values(), reverse=True)
    assert set(found.dtypes) == {"f32", "s32", "pred"}
    assert found.num_parameters == 2
    assert found.estimate.parameter_bytes == 4 * (8 + 4)
    assert (found.aliases.count, found.aliases.num_bytes) == (1, 16)
    assert found.hbm_limit == TRN2.hbm_bytes_per_core(2)
    assert found.findings == () and found.errors == []


def test_collectives_of_a_loop_count_as_often_as_they_run():
    (gathers,) = report(exchanging(), TRN2).collectives
    assert (gathers.kind, gathers.count, gathers.groups) == ("all-gather", 3, (ALL,))
    assert gathers.group_size == 4
    assert gathers.num_bytes == 3 * 4 * 32


def test_collectives_over_other_groups_are_told_apart():
    def run(x):
        return lax.all_gather(x, AXIS), lax.psum_scatter(x, AXIS, tiled=True)

    small = program(run, spec((8,), F32))
    second = next(i for i in entry(small.module).instructions if i.opcode == "reduce-scatter")
    del second.replica_groups[:]
    for group in ([0, 1], [2, 3]):
        second.replica_groups.add(replica_ids=group)
    found = report(small, TRN2)
    assert {(one.kind, one.groups) for one in found.collectives} == {
        ("all-gather", (ALL,)),
        ("reduce-scatter", ((0, 1), (2, 3))),
    }
    assert found.num_group_sets == 2


def test_a_report_as_json_survives_json():
    small = program(
        lambda x, i: (jnp.argmax(x), lax.dynamic_slice(x, (i,), (3,))),
        spec((8,), F32),
        spec((), np.int32),
    )
    shown = report(small, TRN2).to_json()
    again = json.loads(json.dumps(shown))
    assert again["passes"] is False
    assert {f["rule"]: f["severity"] for f in again["findings"]} == {
        "slice-index": "error",
        "variadic-reduce": "warning",
        "small-integer-reduce": "warning",
    }
    (planted,) = [f for f in again["findings"] if f["rule"] == "slice-index"]
    assert planted["values"]["allowed"] == [0, 5]
    assert planted["line"].rsplit(":", 1)[0].endswith("test_report.py")


def test_warnings_alone_pass():
    found = report(program(jnp.argmax, spec((8,), F32)), TRN2)
    assert found.findings and not found.errors
    assert found.to_json()["passes"] is True


def test_limits_are_rules_too():
    elements = TRN2.hbm_bytes_per_core(2) // 4 + 1
    found = report(program(lambda x: x, spec((elements,), F32), aliases={0: 0}), TRN2)
    assert [finding.rule.name for finding in found.errors] == ["hbm-bytes"]


def test_a_program_whose_ids_are_wrong_has_no_report():
    small = exchanging()
    entry(small.module).instructions[-1].operand_ids[0] = 10**6
    with pytest.raises(RuleError, match="operands are in the same computation"):
        report(small, TRN2)


@pytest.mark.parametrize(
    "num_bytes, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (2**30, "1.00 GiB"),
        (2**60, "1048576.00 TiB"),
    ],
)
def test_sizes_have_the_largest_unit_that_fits(num_bytes, text):
    assert size_text(num_bytes) == text
