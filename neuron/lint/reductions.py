"""Intervals of operations that call a computation on pairs of elements."""

import math
from collections.abc import Sequence
from typing import Any

from neuron.hlo import ElementType
from neuron.lint import movement
from neuron.lint.arithmetic import maximum, minimum
from neuron.lint.graph import Graph, Instruction, dimensions
from neuron.lint.interval import Interval, collapse, constant, has_interval, join, simplify, wrap

_FOLLOWED = ("add", "minimum", "maximum")
_OF_PREDICATES = {"and": "minimum", "or": "maximum"}
_CHOOSING = ("minimum", "maximum", "select", "parameter")


def can_reduce(opcode: str) -> bool:
    """Whether :func:`reduce` is for this opcode."""
    return opcode in ("reduce", "scatter", "sort", "custom-call")


def reduce(graph: Graph, instruction: Instruction, operands: Sequence[Any]) -> Any:
    """The result's interval, a tuple of them, or None."""
    if instruction.opcode == "custom-call":
        return _top_k(graph, instruction)
    if 0 in instruction.shape.dimensions:
        return None
    if instruction.opcode == "sort":
        return _unpacked([_sorted(instruction, x) for x in operands])
    if instruction.opcode == "scatter":
        return _scatter(graph, instruction, operands)
    combiner = combiner_of(graph, instruction)
    if instruction.shape.element_type == ElementType.PRED:
        combiner = _OF_PREDICATES.get(combiner or "", combiner)
    if combiner in _FOLLOWED:
        shape = dimensions(graph.operands(instruction)[0].shape)
        return _reduced(combiner, instruction, shape, operands)
    if is_choosing(graph, instruction):
        count = len(operands) // 2
        pairs = zip(operands[:count], operands[count:], strict=True)
        return _unpacked([_chosen(instruction, x, start) for x, start in pairs])
    return None


def combiner_of(graph: Graph, instruction: Instruction) -> str | None:
    """The opcode that combines two scalars, or None if it is more than one instruction."""
    called = graph.called(instruction)
    if not called:
        return None
    root = graph.root(called[0])
    operands = graph.operands(root)
    is_plain = len(operands) == 2 and all(i.opcode == "parameter" for i in operands)
    return root.opcode if is_plain and root.opcode != "tuple" else None


def is_choosing(graph: Graph, instruction: Instruction) -> bool:
    """Whether each result of a pair is one of the pair, like that of an argmax."""
    root = graph.root(graph.called(instruction)[0])
    roots = graph.operands(root) if root.opcode == "tuple" else [root]
    return all(_chooses(graph, one, index, len(roots)) for index, one in enumerate(roots))


def _chooses(graph: Graph, instruction: Instruction, index: int, count: int) -> bool:
    if instruction.opcode == "parameter":
        return instruction.parameter_number % count == index
    if instruction.opcode not in _CHOOSING:
        return False
    operands = graph.operands(instruction)
    return all(_chooses(graph, one, index, count) for one in operands[-2:])


def _reduced(combiner: str, instruction: Instruction, shape: Sequence[int], operands: Any) -> Any:
    x, start = operands
    if not isinstance(x, Interval) or 0 in shape:
        return None
    axes = tuple(instruction.dimensions)
    low, high = start.bounds
    first = constant(low, high, x.ndim - len(axes))
    if combiner == "add":
        # Every order of adding gives the same modulo the type's size: only the sum has to fit.
        shared = math.prod(shape[axis] for axis in axes if x.low.shape[axis] == 1)
        total = Interval(x.low.sum(axes) * shared, x.high.sum(axes) * shared)
        found = wrap(instruction.shape, total.low + first.low, total.high + first.high)
    elif combiner == "maximum":
        found = maximum(instruction.shape, Interval(x.low.max(axes), x.high.max(axes)), first)
    else:
        found = minimum(instruction.shape, Interval(x.low.min(axes), x.high.min(axes)), first)
    return simplify(found)


def _chosen(instruction: Instruction, x: Any, start: Any) -> Any:
    """One of the elements along the reduced axes, or what the reduction starts with."""
    if not isinstance(x, Interval) or not isinstance(start, Interval):
        return None
    axes = tuple(instruction.dimensions)
    found = Interval(x.low.min(axes), x.high.max(axes))
    return simplify(join(found, constant(*start.bounds, found.ndim)))


def _sorted(instruction: Instruction, x: Any) -> Any:
    """Elements change places along one axis."""
    return collapse(x, instruction.dimensions) if isinstance(x, Interval) else None


def _scatter(graph: Graph, instruction: Instruction, operands: Sequence[Any]) -> Any:
    x, _, updates = operands if len(operands) == 3 else (None, None, None)
    if not isinstance(x, Interval) or not isinstance(updates, Interval):
        return None
    return movement.scatter(x, updates) if is_choosing(graph, instruction) else None


def _top_k(graph: Graph, instruction: Instruction) -> Any:
    """The places of AwsNeuronTopK's values lie along the last axis of its operand."""
    if instruction.custom_call_target != "AwsNeuronTopK" or not instruction.shape.tuple_shapes:
        return None
    length = graph.operands(instruction)[0].shape.dimensions[-1]
    return tuple(
        constant(0, length - 1, len(shape.dimensions)) if has_interval(shape) else None
        for shape in instruction.shape.tuple_shapes
    )


def _unpacked(values: list[Any]) -> Any:
    """A single result is an array, several are a tuple."""
    return values[0] if len(values) == 1 else tuple(values)
