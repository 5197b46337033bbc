"""For every rule a program that breaks it and a twin that does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from neuron.hlo import ElementType, entry
from neuron.lint import RULES, lint
from neuron.program import Program
from neuron.targets import find_target
from tests.neuron.lint.programs import AXIS, program, spec

F32, S32, U32 = np.float32, np.int32, np.uint32
VECTOR, MATRIX = spec((8,), F32), spec((8, 8), F32)
INDEX = spec((), S32, 0, 7)
TRN2, TRN3 = find_target("trn2"), find_target("trn3")


def broken(small: Program, target: Any = TRN2, **settings: Any) -> set[str]:
    """Names of the rules that a program breaks."""
    return {finding.rule.name for finding in lint(small, target, **settings)}


def simple() -> Program:
    """Breaks no rule: to be changed by hand where JAX makes no such program."""
    return program(lambda x, y: (x @ y, x + y), MATRIX, MATRIX, aliases={1: 0})


def gathering(num_ranks: int = 4) -> Program:
    """One all-gather over all ranks."""
    return program(lambda x: lax.all_gather(x, AXIS), VECTOR, num_ranks=num_ranks)


def find(small: Program, opcode: str) -> Any:
    """The first instruction with this opcode."""
    computations = small.module.computations
    return next(i for c in computations for i in c.instructions if i.opcode == opcode)


def edited(small: Program, which: str, **fields: Any) -> Program:
    """The program with fields of one instruction set."""
    instruction = find(small, which)
    for name, value in fields.items():
        setattr(instruction, name, value)
    return small


def retyped(small: Program, opcode: str, kind: ElementType) -> Program:
    find(small, opcode).shape.element_type = kind
    return small


def regrouped(small: Program, groups: list[list[int]], opcode: str = "all-gather") -> Program:
    instruction = find(small, opcode)
    del instruction.replica_groups[:]
    for group in groups:
        instruction.replica_groups.add(replica_ids=group)
    return small


def top_k_call(
    *, k: str = "2", dtype: Any = F32, results: tuple[int, ...] = (2,), target: str = ""
) -> Program:
    """A program whose dot has become a custom call for the k largest of each row."""
    small = program(lambda x: (jnp.max(x, axis=1),), spec((8, 40000), dtype))
    call = find(small, "reduce")
    call.opcode, call.custom_call_target = "custom-call", target or "AwsNeuronTopK"
    call.backend_config = k.encode()
    del call.operand_ids[1:]
    del call.called_computation_ids[:]
    call.ClearField("shape")
    call.shape.element_type = ElementType.TUPLE
    for kind in (ElementType.F32, ElementType.S32):
        call.shape.tuple_shapes.add(element_type=kind, dimensions=[8, *results])
    return small


def sorting(comparator: str) -> Program:
    small = program(lambda x: lax.sort(x), VECTOR)
    for computation in small.module.computations:
        for instruction in computation.instructions:
            if instruction.id == computation.root_id and instruction.opcode == "compare":
                instruction.comparison_direction = comparator
    return small


def permuting(*pairs: tuple[int, int]) -> Program:
    return program(lambda x: lax.ppermute(x, AXIS, pairs), VECTOR)


def looping(*, is_static: bool) -> Program:
    def run(x: Any, limit: Any) -> Any:
        def body(i: Any, y: Any) -> Any:
            return y + 1.0

        return lax.fori_loop(0, 5 if is_static else limit, body, x)

    return program(run, VECTOR, INDEX)


def with_groups(count: int) -> Program:
    """So many all-gathers, over groups that all differ."""

    def run(x: Any) -> Any:
        return tuple(lax.all_gather(x + float(n), AXIS) for n in range(count))

    small = program(run, VECTOR, num_ranks=2 * count)
    gathers = [i for i in entry(small.module).instructions if i.opcode == "all-gather"]
    for number, gather in enumerate(gathers):
        others = [rank for rank in range(1, 2 * count) if rank != number + 1]
        pairs = [[0, number + 1], *([a, b] for a, b in zip(others[::2], others[1::2], strict=True))]
        del gather.replica_groups[:]
        for pair in pairs:
            gather.replica_groups.add(replica_ids=pair)
    return small


def renumbered(first: int, gap: int = 1) -> Program:
    """Ids that begin elsewhere or leave some out."""
    small = simple()
    for computation in small.module.computations:
        new = {i.id: first + gap * (i.id - 1) for i in computation.instructions}
        computation.root_id = new[computation.root_id]
        for instruction in computation.instructions:
            instruction.id = new[instruction.id]
            instruction.operand_ids[:] = [new[operand] for operand in instruction.operand_ids]
    return small


def grouped_by(field: str | None) -> Program:
    small = gathering()
    if field:
        getattr(find(small, "all-gather"), field).SetInParent()
    return small


def dangling() -> Program:
    small = simple()
    find(small, "dot").operand_ids[0] = 10**6
    return small


def aliased(*pairs: tuple[int, int]) -> Program:
    small = simple()
    del small.module.input_output_alias.entries[:]
    for output, parameter in pairs:
        small.module.input_output_alias.entries.add(
            output_shape_index=[output], parameter_number=parameter
        )
    return small


def dilated(dilation: int) -> Program:
    def run(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(x, kernel, (1,), "VALID", rhs_dilation=(dilation,))

    return program(run, spec((1, 1, 16), F32), spec((1, 1, 2), F32))


def dynamic(*, is_dynamic: bool) -> Program:
    small = simple()
    find(small, "add").shape.is_dynamic_dimension.extend([is_dynamic, False])
    return small


def undeclared() -> Program:
    small = simple()
    x, y = small.inputs
    return Program("small", "decode", 4, small.module, (x, spec((4, 4), F32)), small.outputs)


def sums_of(dtype: Any, *bounds: int) -> Program:
    return program(lambda x: jnp.sum(x, dtype=x.dtype), spec((8,), dtype, *bounds))


def taken(high: int) -> Program:
    def run(x: Any, i: Any) -> Any:
        return x.at[i].get(mode="promise_in_bounds", wrap_negative_indices=False)

    return program(run, MATRIX, spec((3,), S32, 0, high))


def written(mode: str, high: int = 7) -> Program:
    return program(
        lambda x, i, y: x.at[i].set(y, mode=mode),
        MATRIX,
        spec((3,), S32, 0, high),
        spec((3, 8), F32),
    )


def sliced(low: int, high: int) -> Program:
    return program(lambda x, i: lax.dynamic_slice(x, (i,), (3,)), VECTOR, spec((), S32, low, high))


def updated(low: int, high: int) -> Program:
    return program(
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i,)),
        VECTOR,
        spec((3,), F32),
        spec((), S32, low, high),
    )


def scattered(dtype: Any, *, is_sum: bool) -> Program:
    def run(x: Any, y: Any, i: Any) -> Any:
        at = x.at[i]
        return (
            at.add(y, mode="promise_in_bounds") if is_sum else at.set(y, mode="promise_in_bounds")
        )

    return program(run, spec((8,), dtype), spec((3,), dtype), spec((3,), S32, 0, 7))


def reduce_scattered(dtype: Any) -> Program:
    return program(lambda x: lax.psum_scatter(x, AXIS, tiled=True), spec((8,), dtype))


def summed(dtype: Any) -> Program:
    return program(lambda x: lax.psum(x, AXIS), spec((8,), dtype))


def multiplied(dtype: Any) -> Program:
    return program(lambda x, y: x @ y, spec((8, 8), dtype), spec((8, 8), dtype))


def constant_of(length: int) -> Program:
    """JAX makes such arrays inputs of the shard_map, so the constant is made longer by hand."""
    small = program(lambda x: x + F32(0.5), VECTOR)
    find(small, "constant").shape.dimensions[:] = [length]
    return small


def many_inputs(count: int) -> Program:
    return program(lambda *x: [one + 1.0 for one in x], *[VECTOR] * count)


def key_bits(implementation: str) -> Program:
    def run(seed: Any) -> Any:
        key = jax.random.wrap_key_data(seed, impl=implementation)
        return jax.random.bits(key, (8,))

    width = {"threefry2x32": 2, "rbg": 4}[implementation]
    return program(run, spec((width,), U32))


def mixed(*, rotates: bool) -> Program:
    def run(x: Any, y: Any) -> Any:
        bits = lax.shift_right_logical(x, U32(19))
        return y ^ (((x << U32(13)) | bits) if rotates else bits)

    return program(run, spec((8,), U32), spec((8,), U32))


def listed(small: Program) -> set[str]:
    return {i.opcode for i in entry(small.module).instructions}


Make = Callable[[], Program]
CASES: dict[str, tuple[Make, Make]] = {
    "dense-ids": (lambda: renumbered(2**31 - 3), lambda: renumbered(0)),
    "known-ids": (dangling, simple),
    "legacy-groups": (
        lambda: grouped_by("mesh_axes_replica_group_list"),
        lambda: grouped_by(None),
    ),
    "custom-call-target": (lambda: top_k_call(target="Sharding"), top_k_call),
    "top-k-size": (
        lambda: top_k_call(k="16385", results=(16385,)),
        lambda: top_k_call(k="16384", results=(16384,)),
    ),
    "top-k-dtype": (lambda: top_k_call(dtype=S32), top_k_call),
    "top-k-axis": (lambda: top_k_call(results=(3,)), top_k_call),
    "no-top-k": (
        lambda: program(lambda x: lax.top_k(x, 2)[0], VECTOR),
        lambda: program(lambda x: lax.sort(x)[-2:], VECTOR),
    ),
    "sort-comparator": (lambda: sorting("NE"), lambda: sorting("LT")),
    "no-conditional": (
        lambda: program(lambda x, i: lax.cond(i > 3, jnp.sin, jnp.cos, x), VECTOR, INDEX),
        lambda: program(lambda x, i: jnp.where(i > 3, jnp.sin(x), jnp.cos(x)), VECTOR, INDEX),
    ),
    "no-host": (lambda: edited(simple(), "add", opcode="outfeed"), simple),
    "no-threefry": (lambda: key_bits("threefry2x32"), lambda: mixed(rotates=False)),
    "no-rng": (lambda: edited(simple(), "add", opcode="rng"), simple),
    "rng-algorithm": (
        lambda: edited(key_bits("rbg"), "rng-bit-generator", rng_algorithm=1),
        lambda: key_bits("rbg"),
    ),
    "no-reduce-precision": (
        lambda: program(lambda x: lax.reduce_precision(x, 5, 10), VECTOR),
        lambda: program(lambda x: x.astype(jnp.float16).astype(F32), VECTOR),
    ),
    "no-rank-id": (
        lambda: program(lambda x: x + lax.axis_index(AXIS).astype(F32), VECTOR),
        lambda: program(lambda x, rank: x + rank.astype(F32), VECTOR, INDEX),
    ),
    "no-fft": (
        lambda: program(lambda x: jnp.fft.rfft(x).real, VECTOR),
        lambda: program(lambda x, y: x @ y, MATRIX, MATRIX),
    ),
    "no-linear-algebra": (lambda: edited(simple(), "dot", opcode="triangular-solve"), simple),
    "no-calls": (lambda: edited(simple(), "dot", opcode="async-done"), simple),
    "no-reduce-window": (
        lambda: program(jnp.cumsum, VECTOR),
        lambda: program(lambda x: jnp.tril(jnp.ones((8, 8), F32)) @ x, VECTOR),
    ),
    "arithmetic-shift": (
        lambda: program(lambda x: x >> np.int8(1), spec((8,), np.int8)),
        lambda: program(lambda x: x >> S32(1), spec((8,), S32)),
    ),
    "convolution-dilation": (lambda: dilated(2), lambda: dilated(1)),
    "integer-power": (
        lambda: retyped(program(lambda x: x**x, VECTOR), "power", ElementType.S64),
        lambda: program(lambda x: x**x, VECTOR),
    ),
    "variadic-reduce": (
        lambda: program(jnp.argmax, VECTOR),
        lambda: program(jnp.max, VECTOR),
    ),
    "no-64-bit": (lambda: retyped(simple(), "add", ElementType.F64), simple),
    "u64-constant": (
        lambda: retyped(constant_of(4), "constant", ElementType.U64),
        lambda: constant_of(4),
    ),
    "no-complex": (
        lambda: program(lambda x: lax.complex(x, x), VECTOR),
        lambda: program(lambda x: jnp.stack([x, x]), VECTOR),
    ),
    "no-fnuz": (
        lambda: retyped(simple(), "add", ElementType.F8E4M3FNUZ),
        lambda: retyped(simple(), "add", ElementType.F8E5M2),
    ),
    "e4m3fn": (
        lambda: program(lambda x: x.astype(jnp.float8_e4m3fn), VECTOR),
        lambda: program(lambda x: x.astype(jnp.float8_e4m3), VECTOR),
    ),
    "listed-dtypes": (
        lambda: program(lambda x: x.astype(jnp.uint16), spec((8,), S32)),
        lambda: program(lambda x: x.astype(jnp.uint8), spec((8,), S32)),
    ),
    "float-products": (lambda: multiplied(S32), lambda: multiplied(F32)),
    "float-all-reduce": (lambda: summed(S32), lambda: summed(F32)),
    "float-reduce-scatter": (lambda: reduce_scattered(S32), lambda: reduce_scattered(F32)),
    "integer-scatter": (
        lambda: scattered(S32, is_sum=True),
        lambda: scattered(S32, is_sum=False),
    ),
    "integer-reduce": (lambda: sums_of(S32, 0, 2**22), lambda: sums_of(S32, 0, 2**21)),
    "small-integer-reduce": (lambda: sums_of(S32, 0, 2**21), lambda: sums_of(F32)),
    "static-shapes": (lambda: dynamic(is_dynamic=True), lambda: dynamic(is_dynamic=False)),
    "trip-count": (lambda: looping(is_static=False), lambda: looping(is_static=True)),
    "constant-size": (lambda: constant_of(2**18), lambda: constant_of(2**18 - 1)),
    "parameter-count": (lambda: many_inputs(128), lambda: many_inputs(127)),
    "declared-inputs": (undeclared, simple),
    "alias-shape": (
        lambda: retyped(simple(), "parameter", ElementType.BF16),
        simple,
    ),
    "alias-once": (lambda: aliased((0, 1), (1, 1)), lambda: aliased((0, 1), (1, 0))),
    "collective-kind": (lambda: summed(F32), lambda: reduce_scattered(F32)),
    "permute-ring": (
        lambda: permuting((0, 1), (1, 2), (2, 3)),
        lambda: permuting((0, 1), (1, 0), (2, 3), (3, 2)),
    ),
    "group-size": (
        lambda: regrouped(gathering(), [[0, 1, 2], [3]]),
        lambda: regrouped(gathering(), [[0, 2], [1, 3]]),
    ),
    "group-cover": (
        lambda: regrouped(gathering(), [[0, 1], [1, 2]]),
        lambda: regrouped(gathering(), [[0, 1], [3, 2]]),
    ),
    "group-symmetry": (
        lambda: regrouped(gathering(128), [[0, 65], *([n, n + 65] for n in range(1, 63))]),
        lambda: regrouped(gathering(128), [[n, n + 64] for n in range(64)]),
    ),
    "group-sets": (lambda: with_groups(17), lambda: with_groups(16)),
    "gather-index": (lambda: taken(8), lambda: taken(7)),
    "scatter-index": (lambda: written("drop", 8), lambda: written("drop")),
    "slice-index": (lambda: sliced(0, 6), lambda: sliced(0, 5)),
    "update-index": (lambda: updated(0, 6), lambda: updated(0, 5)),
}
OTHERWISE = {"e4m3", "operator-list"}
"""Rules that ask for more than a program; their tests are below."""


@pytest.mark.parametrize("name", CASES)
def test_a_planted_violation_is_found_and_its_twin_passes(name: str):
    planted, twin = CASES[name]
    assert name in broken(planted())
    assert name not in broken(twin())


def test_every_rule_has_a_case():
    names = [rule.name for rule in RULES]
    assert sorted(names) == sorted({*CASES, *OTHERWISE})


def test_every_rule_says_what_it_is():
    for rule in RULES:
        assert rule.sentence and rule.prevents and rule.source, rule.name


def test_the_8_bit_floats_of_a_target_pass_on_no_other():
    older, newer = CASES["e4m3fn"][1], CASES["e4m3fn"][0]
    assert "e4m3" not in broken(older(), TRN2)
    assert "e4m3" in broken(older(), TRN3)
    assert "e4m3fn" not in broken(newer(), TRN3)


def test_a_recorded_operator_list_has_all_opcodes():
    small = simple()
    opcodes = listed(small)
    assert "operator-list" not in broken(small, operators=opcodes)
    (finding,) = lint(small, TRN2, operators=opcodes - {"dot"})
    assert (finding.rule.name, finding.values) == ("operator-list", {"opcode": "dot"})


def test_a_good_program_breaks_nothing():
    assert lint(simple(), TRN2) == []
    assert lint(simple(), TRN3) == []


def test_instances_are_smaller_with_one_core_a_rank():
    """With LNC 1 an instance has 128 ranks, so groups of 64 apart stay on it."""
    small = CASES["group-symmetry"][0]()
    assert "group-symmetry" in broken(small, lnc=2)
    assert "group-symmetry" not in broken(small, lnc=1)


def test_a_finding_names_rule_instruction_values_and_line():
    (finding,) = lint(sliced(0, 6), TRN2)
    assert finding.rule.name == "slice-index"
    assert finding.values == {"index": finding.values["index"], "found": (0, 6), "allowed": (0, 5)}
    assert finding.line is not None
    path, line = finding.line.rsplit(":", 1)
    text = Path(__file__).read_text().splitlines()[int(line) - 1]
    assert path.endswith("test_rules.py")
    assert "lax.dynamic_slice(x, (i,), (3,))" in text
    assert str(finding).startswith(f"{finding.line}: slice-index: ")


def test_wrong_ids_are_the_only_findings():
    """Nothing can be looked up by them."""
    planted = dangling()
    find(planted, "add").opcode = "outfeed"
    assert broken(planted) == {"known-ids"}
