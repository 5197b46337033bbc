"""Which values the integers of a program can have, from the declared ranges of its inputs.

Abstract interpretation: every instruction is evaluated once on intervals instead of numbers, a
loop's body until its intervals stand still. What is found holds for all ranks and all inputs within
the declared ranges; an instruction that is not understood gives all values of its type.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from neuron.lint import arithmetic, movement, reductions
from neuron.lint.graph import Computation, Graph, Instruction, dimensions, integer_literal
from neuron.lint.interval import (
    Interval,
    exact,
    fit,
    has_interval,
    join,
    simplify,
    whole,
    wrap,
)
from neuron.lint.loops import Trip, body, condition, find_step, find_trip
from neuron.lint.narrowing import branches
from neuron.program import Program, TensorSpec

Value = Interval | tuple[Any, ...] | None
"""An array's interval, a tuple's values, or None: not of integers, or not understood."""
Values = dict[int, Value]

_PASSES = 3
"""Runs of a loop's body before what still grows becomes all values of its type."""


def find_ranges(program: Program, graph: Graph) -> "Ranges":
    """The intervals of all instructions of a program."""
    ranges = Ranges(graph)
    shapes = [parameter.shape for parameter in graph.parameters]
    if [dimensions(shape) for shape in shapes] == [spec.shape for spec in program.inputs]:
        pairs = zip(program.inputs, shapes, strict=True)
        arguments = [spec_interval(spec, shape) for spec, shape in pairs]
    else:
        arguments = [_default(shape) for shape in shapes]
    ranges.evaluate(graph.entry, arguments)
    return ranges


def spec_interval(spec: TensorSpec, shape: Any) -> Value:
    """The interval of an input as its specification declares it."""
    if not has_interval(shape) or not spec.size:
        return _default(shape)
    bounds = whole(shape)
    low, high = (np.full(spec.size, b.item(), np.int64) for b in (bounds.low, bounds.high))
    for part in spec.ranges:
        low[part.start : part.stop], high[part.start : part.stop] = part.low, part.high
    return simplify(Interval(low.reshape(spec.shape), high.reshape(spec.shape)))


class Ranges:
    """The intervals found so far, by instruction."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._found: Values = {}

    def of(self, instruction: Instruction) -> Interval | None:
        """An instruction's interval, over all places and runs it is evaluated in."""
        value = self._found.get(instruction.id)
        if isinstance(value, Interval):
            return value
        return whole(instruction.shape) if has_interval(instruction.shape) else None

    def all_of(self, instruction: Instruction) -> list[Interval]:
        """The intervals of an array or of the arrays of a tuple, those without one left out."""
        value = self._found.get(instruction.id, _default(instruction.shape))
        parts = value if isinstance(value, tuple) else (value,)
        return [part for part in parts if isinstance(part, Interval)]

    def evaluate(self, computation: Computation, arguments: Sequence[Value]) -> Value:
        """A computation's result for these arguments."""
        values: Values = {}
        for instruction in computation.instructions:
            if instruction.opcode == "parameter":
                value = arguments[instruction.parameter_number]
            else:
                value = self._evaluate(instruction, values)
            if value is None:
                value = _default(instruction.shape)
            values[instruction.id] = value
            known = self._found.get(instruction.id)
            self._found[instruction.id] = value if known is None else _join(known, value)
        return values[computation.root_id]

    def _evaluate(self, instruction: Instruction, values: Values) -> Value:
        opcode = instruction.opcode
        operands = [values[number] for number in instruction.operand_ids]
        if opcode in _STRUCTURAL:
            return _STRUCTURAL[opcode](instruction, operands)
        if opcode == "while":
            return self._while(instruction, operands[0])
        if opcode == "call":
            return self.evaluate(self.graph.called(instruction)[0], operands)
        if reductions.can_reduce(opcode):
            return reductions.reduce(self.graph, instruction, operands)
        if not has_interval(instruction.shape):
            return None
        if opcode == "compare":
            return _compare(instruction, operands)
        if opcode == "select":
            operands[1:] = branches(self.graph, instruction, values)
        found = _array(self.graph, instruction, operands)
        return simplify(found) if found is not None else None

    def _while(self, loop: Instruction, start: Value) -> Value:
        if not isinstance(start, tuple):
            start = tuple(_default(shape) for shape in loop.shape.tuple_shapes)
        trip = find_trip(self.graph, loop)
        shapes = loop.shape.tuple_shapes
        steps = [find_step(self.graph, loop, index) for index in range(len(start))]
        is_fixed = [step == 0 or (step is not None and trip is not None) for step in steps]
        state = tuple(
            _counted(shape, value, step, trip) if fixed else value
            for shape, value, step, fixed in zip(shapes, start, steps, is_fixed, strict=True)
        )
        state = self._settle(loop, state, is_fixed)
        end = tuple(
            _after(shape, first, value, step, trip)
            for shape, first, value, step in zip(shapes, start, state, steps, strict=True)
        )
        self.evaluate(condition(self.graph, loop), [_join(state, end)])
        return end

    def _settle(
        self, loop: Instruction, state: tuple[Value, ...], is_fixed: Sequence[bool]
    ) -> tuple[Value, ...]:
        """What the body may be given in any run, from what it is given in the first."""
        shapes, passes = loop.shape.tuple_shapes, 0
        while True:
            result = self.evaluate(body(self.graph, loop), [state])
            assert isinstance(result, tuple)
            grown = tuple(
                old if fixed else _join(old, new)
                for old, new, fixed in zip(state, result, is_fixed, strict=True)
            )
            is_same = [_equal(old, new) for old, new in zip(state, grown, strict=True)]
            if all(is_same):
                return state
            passes += 1
            state = tuple(
                new if same or passes < _PASSES else _default(shape)
                for shape, new, same in zip(shapes, grown, is_same, strict=True)
            )


def _counted(shape: Any, start: Value, step: int | None, trip: Trip | None) -> Value:
    """What an element that moves by a constant step has in any run that happens."""
    if not step or not isinstance(start, Interval) or trip is None:
        return start
    reach = max(trip.count - 1, 0) * step
    return wrap(shape, start.low + min(reach, 0), start.high + max(reach, 0))


def _after(shape: Any, start: Value, state: Value, step: int | None, trip: Trip | None) -> Value:
    """What an element has when the loop has ended."""
    if not step or not isinstance(start, Interval) or trip is None:
        return state
    return wrap(shape, start.low + trip.count * step, start.high + trip.count * step)


def _default(shape: Any) -> Value:
    """All values of the type."""
    if shape.tuple_shapes:
        return tuple(_default(inner) for inner in shape.tuple_shapes)
    return whole(shape) if has_interval(shape) else None


def _join(a: Value, b: Value) -> Value:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(_join(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Interval) and isinstance(b, Interval):
        return simplify(join(*fit(a, b)))
    return None


def _equal(a: Value, b: Value) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Interval) and isinstance(b, Interval):
        return bool(np.all(a.low == b.low) and np.all(a.high == b.high))
    return a is b


def _compare(instruction: Instruction, operands: Sequence[Value]) -> Value:
    left, right = operands
    if not isinstance(left, Interval) or not isinstance(right, Interval):
        return None
    direction = instruction.comparison_direction
    return simplify(arithmetic.compare(direction, *fit(left, right)))


def _array(graph: Graph, instruction: Instruction, operands: Sequence[Value]) -> Interval | None:
    """The interval of an array that is computed or moved from arrays."""
    if 0 in instruction.shape.dimensions:
        return None
    if instruction.opcode in ("constant", "iota"):
        return _created(instruction)
    if not operands or not all(isinstance(operand, Interval) for operand in operands):
        return None
    if operation := arithmetic.ELEMENTWISE.get(instruction.opcode):
        return operation(instruction.shape, *fit(*_as_arrays(instruction, operands)))
    if operation := _MOVES.get(instruction.opcode):
        shapes = [dimensions(operand.shape) for operand in graph.operands(instruction)]
        return operation(instruction, shapes, operands)
    return None


def _as_arrays(instruction: Instruction, operands: Sequence[Any]) -> list[Interval]:
    """Operands with as many axes as the result: select and clamp take scalars beside arrays."""
    ones = (1,) * len(instruction.shape.dimensions)
    return [
        x if x.ndim == len(ones) else Interval(x.low.reshape(ones), x.high.reshape(ones))
        for x in operands
    ]


def _created(instruction: Instruction) -> Interval | None:
    if instruction.opcode == "iota":
        return movement.iota(instruction)
    values = integer_literal(instruction)
    return None if values is None else exact(values)


def _element(instruction: Instruction, operands: Sequence[Value]) -> Value:
    (source,) = operands
    return source[instruction.tuple_index] if isinstance(source, tuple) else None


_STRUCTURAL: dict[str, Callable[[Instruction, Sequence[Value]], Value]] = {
    "tuple": lambda _, operands: tuple(operands),
    "get-tuple-element": _element,
    "copy": lambda _, operands: operands[0],
    "opt-barrier": lambda _, operands: operands[0],
}
_MOVES: dict[str, Callable[[Instruction, Sequence[Sequence[int]], Sequence[Any]], Interval]] = {
    "broadcast": lambda i, _, x: movement.broadcast(i, *x),
    "reshape": lambda i, shapes, x: movement.reshape(shapes[0], dimensions(i.shape), *x),
    "transpose": lambda i, _, x: movement.transpose(i, *x),
    "reverse": lambda i, _, x: movement.reverse(i, *x),
    "slice": lambda i, _, x: movement.slice_(i, *x),
    "concatenate": lambda i, shapes, x: movement.concatenate(i.dimensions[0], shapes, x),
    "pad": lambda i, shapes, x: movement.pad(i, shapes[0], *x),
    "dynamic-slice": lambda i, shapes, x: movement.dynamic_slice(i, shapes[0], x[0], x[1:]),
    "dynamic-update-slice": lambda _, shapes, x: movement.dynamic_update_slice(
        shapes[0], shapes[1], x[0], x[1]
    ),
    "gather": lambda i, shapes, x: movement.gather(i, shapes[0], x[0]),
    "all-gather": lambda i, shapes, x: movement.all_gather(
        i.dimensions[0],
        shapes[0][i.dimensions[0]],
        i.shape.dimensions[i.dimensions[0]],
        *x,
    ),
}
