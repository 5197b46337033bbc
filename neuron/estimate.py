"""What a program will ask of the compiler and of the memory, before either is there.

Instructions, as neuronx-cc counts them, work on tiles of 128 partitions by 512 elements:

    dot          batch · ceil(M / 128) · ceil(K / 128) · ceil(N / 512)
    moved rows   ceil(rows / 128) · ceil(row elements / 512)      gathers, scatters, dynamic slices
    the rest     ceil(elements / (128 · 512)) of the largest operand or the result

A loop's body counts as often as it runs, as the compiler unrolls it. It is the number of an ideal
compiler, good for seeing that a program is far below its limit or far beyond.

Memory is inputs, outputs that share none of it, and the most bytes of intermediate arrays that are
alive at the same time in the order of the instructions. Updates are made in place, and what only
looks at or repeats another array takes nothing. Fusions take less.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from neuron.lint import Context, Found, Rule
from neuron.lint.graph import Computation, Graph, Instruction, num_bytes, num_elements
from neuron.lint.loops import body, find_trip
from neuron.program import Program

PARTITIONS = 128
FREE = 512
MAX_INSTRUCTIONS = 5_000_000

_VIEWS = {"bitcast", "reshape", "get-tuple-element", "tuple", "opt-barrier"}
_IN_PLACE = {"dynamic-update-slice", "scatter", "while"}
_NO_MEMORY = {*_VIEWS, *_IN_PLACE, "parameter", "constant", "broadcast", "iota"}
_NO_WORK = {*_VIEWS, "parameter", "constant"}
_ROWS = {"gather": 0, "dynamic-slice": 0, "scatter": 3, "dynamic-update-slice": 2}
"""What is moved: the result (0) or an operand (from 1)."""


@dataclass(frozen=True)
class Estimate:
    """What one rank needs.

    Attributes:
        instructions: of the compiled program.
        parameter_bytes: of all inputs.
        output_bytes: of outputs that do not share an input's memory.
        temporary_bytes: of intermediate arrays, at most at one time.
    """

    instructions: int
    parameter_bytes: int
    output_bytes: int
    temporary_bytes: int

    @property
    def hbm_bytes(self) -> int:
        """High-bandwidth memory of a logical core."""
        return self.parameter_bytes + self.output_bytes + self.temporary_bytes


def estimate(program: Program) -> Estimate:
    """The estimate of one program."""
    graph = Graph(program.module)
    return Estimate(
        instructions=_instructions(graph, graph.entry),
        parameter_bytes=sum(num_bytes(parameter.shape) for parameter in graph.parameters),
        output_bytes=_output_bytes(graph),
        temporary_bytes=_temporary_bytes(graph, graph.entry),
    )


def _many_instructions(context: Context) -> Iterator[Found]:
    count = estimate(context.program).instructions
    if count > MAX_INSTRUCTIONS:
        yield None, {"instructions": count, "limit": MAX_INSTRUCTIONS}


def _much_memory(context: Context) -> Iterator[Found]:
    needed = estimate(context.program).hbm_bytes
    limit = context.target.hbm_bytes_per_core(context.lnc)
    if needed > limit:
        yield None, {"bytes": needed, "limit": limit}


_CODES = "Neuron SDK, compiler/error-codes"
LIMITS = (
    Rule(
        "instruction-count",
        f"a program takes at most {MAX_INSTRUCTIONS:,} instructions, by estimate",
        "NCC_EVRF007, NCC_EBVF030, NCC_EXTP004",
        _CODES,
        _many_instructions,
    ),
    Rule(
        "hbm-bytes",
        "inputs, outputs and intermediate arrays fit into a core's memory, by estimate",
        "NCC_EVRF009, NCC_EOOM001, NCC_EOOM002, NCC_EXSP001",
        _CODES,
        _much_memory,
    ),
)
"""The rules about what is estimated."""


def _instructions(graph: Graph, computation: Computation) -> int:
    return sum(_weight(graph, instruction) for instruction in computation.instructions)


def _weight(graph: Graph, instruction: Instruction) -> int:
    """Tiles that an instruction works on."""
    if instruction.opcode in _NO_WORK:
        return 0
    if instruction.opcode == "while":
        trip = find_trip(graph, instruction)
        runs = 1 if trip is None else trip.count
        return runs * _instructions(graph, body(graph, instruction))
    operands = [operand.shape for operand in graph.operands(instruction)]
    if instruction.opcode == "dot":
        return _dot_tiles(instruction, operands[0])
    if instruction.opcode in _ROWS:
        moved = [instruction.shape, *operands][_ROWS[instruction.opcode]]
        return _row_tiles(list(moved.dimensions))
    shapes = [instruction.shape, *operands]
    arrays = [leaf for shape in shapes for leaf in (shape.tuple_shapes or [shape])]
    return -(-max(num_elements(array) for array in arrays) // (PARTITIONS * FREE))


def _dot_tiles(dot: Instruction, left: Any) -> int:
    numbers = dot.dot_dimension_numbers
    of_left = list(left.dimensions)
    batch = math.prod(of_left[axis] for axis in numbers.lhs_batch)
    inner = math.prod(of_left[axis] for axis in numbers.lhs_contracting)
    rows = math.prod(of_left) // max(batch * inner, 1)
    columns = num_elements(dot.shape) // max(batch * rows, 1)
    return batch * -(-rows // PARTITIONS) * -(-inner // PARTITIONS) * -(-columns // FREE)


def _row_tiles(dimensions: list[int]) -> int:
    """An axis of rows, of which 128 are moved at a time."""
    *outer, width = dimensions or [1]
    return -(-math.prod(outer) // PARTITIONS) * -(-width // FREE)


def _output_bytes(graph: Graph) -> int:
    entries = graph.module.input_output_alias.entries
    aliased = {tuple(alias.output_shape_index) for alias in entries}
    outputs = graph.outputs.items()
    return sum(num_bytes(output.shape) for index, output in outputs if index not in aliased)


def _temporary_bytes(graph: Graph, computation: Computation) -> int:
    """The most bytes of arrays that this computation makes and still needs."""
    outputs = {graph.resolve(output).id for output in graph.outputs.values()}
    last_use = _last_uses(graph, computation)
    ends: dict[int, int] = {}  # place of an instruction -> bytes that nobody needs after it
    alive = most = 0
    for place, instruction in enumerate(computation.instructions):
        inner = body(graph, instruction) if instruction.opcode == "while" else None
        size = 0 if _takes_nothing(instruction, outputs) else num_bytes(instruction.shape)
        alive += size
        most = max(most, alive + (_temporary_bytes(graph, inner) if inner is not None else 0))
        end = last_use[instruction.id]
        ends[end] = ends.get(end, 0) + size
        alive -= ends.pop(place, 0)
    return most


def _takes_nothing(instruction: Instruction, outputs: set[int]) -> bool:
    return instruction.opcode in _NO_MEMORY or instruction.id in outputs


def _last_uses(graph: Graph, computation: Computation) -> dict[int, int]:
    """Place of the last instruction that needs each one's memory, also through views of it."""
    places = {i.id: place for place, i in enumerate(computation.instructions)}
    last: dict[int, int] = {}
    for instruction in reversed(computation.instructions):
        last[instruction.id] = max(
            [places[instruction.id]]
            + [
                last[user.id] if user.opcode in _VIEWS | _IN_PLACE else places[user.id]
                for user in graph.users[instruction.id]
            ]
        )
    return last
