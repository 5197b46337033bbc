"""Rules about indices: proven in range, as Neuron reads and writes wherever they point."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from neuron.lint.graph import Instruction, dimensions
from neuron.lint.interval import Interval
from neuron.lint.model import Context, Found, Rule

_Start = tuple[int, str, Interval | None]
"""An operand's axis, what its start index is called, and where that lies."""


def _out_of_range(
    opcode: str, starts: Callable[[Context, Instruction], Iterator[_Start]]
) -> Callable[[Context], Iterator[Found]]:
    def find(context: Context) -> Iterator[Found]:
        for i in context.graph.of(opcode):
            source = dimensions(context.graph.operands(i)[0].shape)
            sizes = _SIZES[opcode](context, i)
            for axis, name, interval in starts(context, i):
                limit = source[axis] - sizes[axis]
                bounds = interval.bounds if interval is not None else None
                if bounds is None or bounds[0] < 0 or bounds[1] > limit:
                    yield i, {"index": name, "found": bounds, "allowed": (0, limit)}

    return find


def _scalar_starts(context: Context, instruction: Instruction) -> Iterator[_Start]:
    """One operand for each axis."""
    first = 1 if instruction.opcode == "dynamic-slice" else 2
    for axis, operand in enumerate(context.graph.operands(instruction)[first:]):
        yield axis, operand.name, context.ranges.of(operand)


def _column_starts(context: Context, instruction: Instruction) -> Iterator[_Start]:
    """One column of a matrix of indices for each axis that is indexed."""
    indices = context.graph.operands(instruction)[1]
    if instruction.opcode == "gather":
        numbers = instruction.gather_dimension_numbers
        axes = numbers.start_index_map
    else:
        numbers = instruction.scatter_dimension_numbers
        axes = numbers.scatter_dims_to_operand_dims
    if 0 in indices.shape.dimensions or 0 in instruction.shape.dimensions:
        return
    interval = context.ranges.of(indices)
    for column, axis in enumerate(axes):
        name = f"{indices.name}, column {column}" if len(axes) > 1 else indices.name
        yield axis, name, _column(interval, numbers.index_vector_dim, column)


def _column(interval: Interval | None, axis: int, column: int) -> Interval | None:
    """The bounds of one column; an axis beyond the last means a single one."""
    if interval is None or axis == interval.ndim or interval.low.shape[axis] == 1:
        return interval
    return Interval(interval.low.take([column], axis), interval.high.take([column], axis))


def _update_sizes(context: Context, instruction: Instruction) -> Any:
    return context.graph.operands(instruction)[1].shape.dimensions


def _window_sizes(context: Context, instruction: Instruction) -> list[int]:
    """How much of each axis of the operand an update covers."""
    numbers = instruction.scatter_dimension_numbers
    operand, _, updates = context.graph.operands(instruction)[:3]
    single = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
    window = iter([updates.shape.dimensions[axis] for axis in numbers.update_window_dims])
    rank = np.arange(len(operand.shape.dimensions)).tolist()
    return [1 if axis in single else next(window) for axis in rank]


_SIZES: dict[str, Callable[[Context, Instruction], Any]] = {
    "gather": lambda _, i: i.gather_slice_sizes,
    "scatter": _window_sizes,
    "dynamic-slice": lambda _, i: i.dynamic_slice_sizes,
    "dynamic-update-slice": _update_sizes,
}
_OOB = "NRT_EXEC_OOB"
_ISSUE = "aws-neuron-sdk issue 1335"
RULES = (
    Rule(
        "gather-index",
        "a gather's indices are in range for all inputs that are declared",
        f"{_OOB}; NCC_EVRF031, NCC_EVRF056",
        _ISSUE,
        _out_of_range("gather", _column_starts),
    ),
    Rule(
        "scatter-index",
        "a scatter's indices are in range for all inputs that are declared",
        f"{_OOB}; NCC_EVRF031, NCC_EVRF056",
        _ISSUE,
        _out_of_range("scatter", _column_starts),
    ),
    Rule(
        "slice-index",
        "a dynamic slice lies in its operand for all inputs that are declared",
        _OOB,
        _ISSUE,
        _out_of_range("dynamic-slice", _scalar_starts),
    ),
    Rule(
        "update-index",
        "a dynamic update lies in its operand for all inputs that are declared",
        _OOB,
        _ISSUE,
        _out_of_range("dynamic-update-slice", _scalar_starts),
    ),
)
