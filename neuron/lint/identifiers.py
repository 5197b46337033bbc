"""Rules about numbers and fields that an older XLA has to read."""

from collections.abc import Iterator

from neuron.lint.model import Context, Found, Rule

MAX_ID = 2**31 - 1


def _sparse_ids(context: Context) -> Iterator[Found]:
    """The first instruction whose id is not its place in the module, from 0 or from 1."""
    instructions = [i for c in context.module.computations for i in c.instructions]
    first = 0 if instructions and instructions[0].id == 0 else 1
    for expected, instruction in enumerate(instructions, start=first):
        if instruction.id != expected:
            yield instruction, {"id": instruction.id, "expected": expected}
            return


def _unknown_ids(context: Context) -> Iterator[Found]:
    """Operands that are not in the same computation, computations that are not in the module."""
    computations = {computation.id for computation in context.module.computations}
    if context.module.entry_computation_id not in computations:
        yield None, {"entry_computation_id": context.module.entry_computation_id}
    for computation in context.module.computations:
        known = {i.id for i in computation.instructions}
        if computation.root_id not in known:
            yield None, {"computation": computation.name, "root_id": computation.root_id}
        for i in computation.instructions:
            used = {*i.operand_ids, *i.control_predecessor_ids}
            if missing := (used - known) | (set(i.called_computation_ids) - computations):
                yield i, {"unknown": sorted(missing)}


def _new_groups(context: Context) -> Iterator[Found]:
    for computation in context.module.computations:
        for i in computation.instructions:
            for field in ("collective_device_list", "mesh_axes_replica_group_list"):
                if i.HasField(field):
                    yield i, {"field": field}


_SOURCE = "Neuron SDK 2.31 compiler with JAX 0.9 and later; pytorch/xla issue 9685"
ID_RULES = (
    Rule(
        "dense-ids",
        f"instruction ids count from 0 or 1 without a gap, below {MAX_ID}",
        "Check failed: unique_id_ < 2147483647",
        _SOURCE,
        _sparse_ids,
    ),
    Rule(
        "known-ids",
        "operands are in the same computation, called computations in the module",
        "NCC_EVRF064",
        "Neuron SDK, compiler/error-codes",
        _unknown_ids,
    ),
)
"""Those without which no other rule can be looked at."""
RULES = (
    Rule(
        "legacy-groups",
        "replica groups are explicit, in field 49 of an instruction, not in 87 or 93",
        "one group of all ranks instead of the program's groups",
        "HLO of JAX 0.6 and later, which the compiler's XLA does not know",
        _new_groups,
    ),
)
