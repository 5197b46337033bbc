"""HLO as JAX writes it, in the form that neuronx-cc reads.

The compiler has an older XLA inside: it wants instruction ids that are dense and small, and replica
groups in the field that newer releases of XLA have left.
"""

from itertools import count
from typing import Any

import numpy as np

from neuron.hlo import Module
from neuron.inline import inline_calls

_OF_PARTITIONING = (
    "device_assignment",
    "spmd_output_sharding",
    "spmd_parameters_shardings",
    "buffer_donor",
    "frontend_attributes",
)


def normalise(serialized: bytes, name: str, aliases: dict[int, int]) -> Any:
    """The module with dense ids, uniform names, explicit groups and these aliases.

    Args:
        serialized: an HloModuleProto.
        name: the module's new name.
        aliases: {output: parameter} of buffers that are updated in place.
    """
    module = Module.FromString(serialized)
    module.name, module.id = name, 0
    for field in _OF_PARTITIONING:
        module.ClearField(field)
    _renumber(module)
    inline_calls(module)
    _renumber(module)
    for computation in module.computations:
        for instruction in computation.instructions:
            _set_groups(instruction)
            for field in ("sharding", "original_value", "frontend_attributes"):
                instruction.ClearField(field)
    module.ClearField("input_output_alias")
    is_tuple = bool(module.host_program_shape.result.tuple_shapes)
    for output, parameter in sorted(aliases.items()):
        module.input_output_alias.entries.add(
            output_shape_index=[output] if is_tuple else [], parameter_number=parameter, kind=1
        )
    return module


def _renumber(module: Any) -> None:
    """Ids and names that count from one, for computations and for instructions."""
    computations = {c.id: number for number, c in enumerate(module.computations, start=1)}
    numbers = count(1)
    for computation in module.computations:
        new = {i.id: next(numbers) for i in computation.instructions}
        # Operands may be told by the whole id or by its lower half, the place in the computation.
        new |= {old & 0xFFFFFFFF: number for old, number in new.items() if old >> 32}
        for instruction in computation.instructions:
            instruction.id = new[instruction.id]
            instruction.name = f"{instruction.opcode}.{instruction.id}"
            for operands in (instruction.operand_ids, instruction.control_predecessor_ids):
                operands[:] = [new[operand] for operand in operands]
            called = [computations[called] for called in instruction.called_computation_ids]
            instruction.called_computation_ids[:] = called
        computation.root_id = new[computation.root_id]
        computation.id = computations[computation.id]
        computation.name = f"computation.{computation.id}"
    module.entry_computation_id = computations[module.entry_computation_id]
    module.entry_computation_name = f"computation.{module.entry_computation_id}"


def _set_groups(instruction: Any) -> None:
    """Explicit replica groups in the oldest of the fields that XLA has had for them."""
    groups = _groups(instruction)
    if groups is None:
        return
    del instruction.replica_groups[:]
    for group in groups:
        instruction.replica_groups.add(replica_ids=group)
    instruction.ClearField("collective_device_list")
    instruction.ClearField("mesh_axes_replica_group_list")


def _groups(instruction: Any) -> list[list[int]] | None:
    """The groups as newer XLA says them; None where they are said the old way or not at all."""
    if instruction.HasField("mesh_axes_replica_group_list"):
        return _groups_of_axes(instruction.mesh_axes_replica_group_list)
    if not instruction.HasField("collective_device_list"):
        return None
    devices = instruction.collective_device_list
    if devices.HasField("iota_replica_group_list"):
        iota = devices.iota_replica_group_list
        grid = np.arange(np.prod(iota.iota_reshape_dims)).reshape(tuple(iota.iota_reshape_dims))
        grid = grid.transpose(tuple(iota.iota_transpose_perm))
        return grid.reshape(iota.num_replica_groups, -1).tolist()
    return [list(group.replica_ids) for group in devices.replica_groups]


def _groups_of_axes(groups: Any) -> list[list[int]]:
    """Groups of ranks that differ along whole axes of a mesh alone."""
    sizes = tuple(axis.size for axis in groups.mesh.axes)
    ids = list(groups.mesh.device_ids) or range(int(np.prod(sizes)))
    grid = np.asarray(ids).reshape(sizes)
    inner = [axis.mesh_axis_index for axis in groups.axes]
    outer = [axis for axis in range(len(sizes)) if axis not in inner]
    width = int(np.prod([sizes[axis] for axis in inner]))
    return grid.transpose(*outer, *inner).reshape(-1, width).tolist()
