"""What a condition says about the branches of a select.

In ``select(x < 0, x + 8, x)`` the first branch is only taken where x is negative, so with x in
[-8, 7] the result is in [0, 7]; that is how ``x[i]`` treats indices that count from the end.
"""

from typing import Any

from neuron.lint.arithmetic import ELEMENTWISE, flipped, inverted, narrow
from neuron.lint.graph import Graph, Instruction
from neuron.lint.interval import Interval, fit

_Facts = list[tuple[int, str, Interval]]
"""(instruction, direction, bounds): each of its elements compares like that."""
_DEPTH = 3
"""Instructions between a branch and what the condition is about."""


def branches(graph: Graph, select: Instruction, values: dict[int, Any]) -> list[Any]:
    """The intervals of both branches where each is taken."""
    predicate, *operands = graph.operands(select)
    return [
        _restricted(graph, operand, _facts(graph, predicate, holds, values), values, _DEPTH)
        for operand, holds in zip(operands, (True, False), strict=True)
    ]


def _facts(graph: Graph, predicate: Instruction, holds: bool, values: dict[int, Any]) -> _Facts:
    """The comparisons that are true where a predicate holds, or where it does not."""
    if predicate.opcode == "not":
        return _facts(graph, graph.operands(predicate)[0], not holds, values)
    if predicate.opcode == ("and" if holds else "or"):
        parts = graph.operands(predicate)
        return [fact for part in parts for fact in _facts(graph, part, holds, values)]
    if predicate.opcode != "compare":
        return []
    left, right = predicate.operand_ids
    if not (isinstance(values[left], Interval) and isinstance(values[right], Interval)):
        return []
    direction = predicate.comparison_direction
    direction = direction if holds else inverted(direction)
    return [(left, direction, values[right]), (right, flipped(direction), values[left])]


def _restricted(
    graph: Graph, instruction: Instruction, facts: _Facts, values: dict[int, Any], depth: int
) -> Any:
    """An instruction's interval under these facts, which may be about its operands."""
    value = values[instruction.id]
    if not isinstance(value, Interval) or not facts:
        return value
    about = [fact for fact in facts if fact[0] == instruction.id]
    operation = ELEMENTWISE.get(instruction.opcode)
    if not about and depth and operation is not None and instruction.opcode != "select":
        operands = graph.operands(instruction)
        new = [_restricted(graph, operand, facts, values, depth - 1) for operand in operands]
        is_changed = any(x is not values[o.id] for x, o in zip(new, operands, strict=True))
        is_plain = all(isinstance(x, Interval) and x.ndim == value.ndim for x in new)
        return operation(instruction.shape, *fit(*new)) if is_changed and is_plain else value
    for _, direction, bounds in about:
        if bounds.ndim == value.ndim:
            value, bounds = fit(value, bounds)
            value = narrow(value, direction, bounds)
    return value
