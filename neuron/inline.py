"""HLO without calls: each is replaced by the body of what it calls."""

from itertools import count
from typing import Any


def inline_calls(module: Any) -> None:
    """Put the called computations in place of every ``call``, and drop those no longer used.

    Ids must be unique in the module, and callees come before their callers, as XLA writes them.
    """
    numbers = count(1 + max(i.id for c in module.computations for i in c.instructions))
    bodies = {computation.id: computation for computation in module.computations}
    for computation in module.computations:
        if any(instruction.opcode == "call" for instruction in computation.instructions):
            _inline(computation, bodies, numbers)
    used = _reachable(module, bodies)
    kept = [_copy(c) for c in module.computations if c.id in used]
    del module.computations[:]
    module.computations.extend(kept)


def _inline(computation: Any, bodies: dict[int, Any], numbers: "count[int]") -> None:
    """Inline the calls of one computation, whose callees have none any more."""
    instead: dict[int, int] = {}  # a call's id -> the id of its value
    instructions = []
    for instruction in computation.instructions:
        item = _copy(instruction)
        _replace_operands(item, instead)
        if item.opcode != "call":
            instructions.append(item)
            continue
        (called,) = item.called_computation_ids
        body, value = _body(bodies[called], list(item.operand_ids), numbers)
        for inlined in body:
            if not inlined.metadata.stack_frame_id:  # JAX drops those of what it traced before
                inlined.metadata.CopyFrom(item.metadata)
        instructions += body
        instead[item.id] = value
    computation.root_id = instead.get(computation.root_id, computation.root_id)
    del computation.instructions[:]
    computation.instructions.extend(instructions)


def _body(callee: Any, operands: list[int], numbers: "count[int]") -> tuple[list[Any], int]:
    """The callee's instructions with new ids, over these operands; the id of its result."""
    new: dict[int, int] = {}
    instructions = []
    for instruction in callee.instructions:
        if instruction.opcode == "parameter":
            new[instruction.id] = operands[instruction.parameter_number]
            continue
        item = _copy(instruction)
        _replace_operands(item, new)
        item.id = new[instruction.id] = next(numbers)
        instructions.append(item)
    return instructions, new[callee.root_id]


def _replace_operands(instruction: Any, new: dict[int, int]) -> None:
    for operands in (instruction.operand_ids, instruction.control_predecessor_ids):
        operands[:] = [new.get(operand, operand) for operand in operands]


def _reachable(module: Any, bodies: dict[int, Any]) -> set[int]:
    """Ids of the computations that the entry computation needs."""
    found, waiting = set(), [module.entry_computation_id]
    while waiting:
        if (current := waiting.pop()) not in found:
            found.add(current)
            for instruction in bodies[current].instructions:
                waiting += instruction.called_computation_ids
    return found


def _copy(message: Any) -> Any:
    new = type(message)()
    new.CopyFrom(message)
    return new
