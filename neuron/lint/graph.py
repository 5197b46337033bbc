"""A module's instructions by id, with the shapes, users and literals that rules ask for."""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from neuron.hlo import ElementType, entry

Instruction = Any
Computation = Any

_LITERALS = {
    ElementType.PRED: ("preds", "bool"),
    ElementType.S8: ("s8s", "int8"),
    ElementType.S16: ("s16s", "int16"),
    ElementType.S32: ("s32s", "int32"),
    ElementType.U8: ("u8s", "uint8"),
    ElementType.U16: ("u16s", "uint16"),
    ElementType.U32: ("u32s", "uint32"),
}
_FLOATS = {
    ElementType.F16,
    ElementType.BF16,
    ElementType.F32,
    ElementType.F64,
    ElementType.F8E5M2,
    ElementType.F8E4M3FN,
    ElementType.F8E4M3,
    ElementType.F8E3M4,
}
_BITS = {
    ElementType.PRED: 8,
    ElementType.S16: 16,
    ElementType.U16: 16,
    ElementType.F16: 16,
    ElementType.BF16: 16,
    ElementType.S32: 32,
    ElementType.U32: 32,
    ElementType.F32: 32,
    ElementType.S64: 64,
    ElementType.U64: 64,
    ElementType.F64: 64,
    ElementType.C64: 64,
    ElementType.C128: 128,
}


class Graph:
    """Look-ups in one module whose instruction ids are unique."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.computations: dict[int, Computation] = {c.id: c for c in module.computations}
        self._instructions = {i.id: i for c in module.computations for i in c.instructions}
        self._owners = {i.id: c.id for c in module.computations for i in c.instructions}

    def __iter__(self) -> Iterator[Instruction]:
        """All instructions, callees before their callers."""
        return iter(self._instructions.values())

    def __getitem__(self, number: int) -> Instruction:
        return self._instructions[number]

    @cached_property
    def entry(self) -> Computation:
        return entry(self.module)

    @cached_property
    def parameters(self) -> list[Instruction]:
        """The program's inputs in their order."""
        found = [i for i in self.entry.instructions if i.opcode == "parameter"]
        return sorted(found, key=lambda i: i.parameter_number)

    @cached_property
    def outputs(self) -> dict[tuple[int, ...], Instruction]:
        """What the program's outputs are, by their indices in its result, which may be no tuple."""
        result = self.root(self.entry)
        if result.shape.element_type != ElementType.TUPLE:
            return {(): result}
        operands = self.operands(result) if result.opcode == "tuple" else []
        return {(index,): operand for index, operand in enumerate(operands)}

    @cached_property
    def users(self) -> dict[int, list[Instruction]]:
        """Those that have an instruction as an operand, by its id."""
        found: dict[int, list[Instruction]] = {number: [] for number in self._instructions}
        for instruction in self:
            for operand in instruction.operand_ids:
                found[operand].append(instruction)
        return found

    @cached_property
    def callers(self) -> dict[int, list[Instruction]]:
        """Those that call a computation, by its id."""
        found: dict[int, list[Instruction]] = {number: [] for number in self.computations}
        for instruction in self:
            for called in instruction.called_computation_ids:
                found[called].append(instruction)
        return found

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self[number] for number in instruction.operand_ids]

    def called(self, instruction: Instruction) -> list[Computation]:
        return [self.computations[number] for number in instruction.called_computation_ids]

    def computation_of(self, instruction: Instruction) -> Computation:
        return self.computations[self._owners[instruction.id]]

    def root(self, computation: Computation) -> Instruction:
        """The instruction whose value a computation returns."""
        return self[computation.root_id]

    def of(self, *opcodes: str) -> Iterator[Instruction]:
        """The instructions with one of these opcodes."""
        return (i for i in self if i.opcode in opcodes)

    def resolve(self, instruction: Instruction) -> Instruction:
        """What an instruction's value is before it went through tuples and copies."""
        while True:
            if instruction.opcode in ("copy", "bitcast"):
                (instruction,) = self.operands(instruction)
                continue
            if instruction.opcode != "get-tuple-element":
                return instruction
            source = self.resolve(self.operands(instruction)[0])
            if source.opcode != "tuple":
                return instruction
            instruction = self.operands(source)[instruction.tuple_index]


def dimensions(shape: Any) -> tuple[int, ...]:
    """The lengths of an array's axes."""
    return tuple(shape.dimensions)


def leaves(shape: Any) -> Iterator[Any]:
    """The arrays' shapes of a shape that may be a tuple's."""
    if shape.element_type != ElementType.TUPLE:
        yield shape
    for inner in shape.tuple_shapes:
        yield from leaves(inner)


def is_integer(shape: Any) -> bool:
    """Whether an array's elements are integers; predicates are none."""
    name = type_name(shape)
    return name[0] in "su" and name[1:].isdigit()


def is_float(shape: Any) -> bool:
    return shape.element_type in _FLOATS


def type_name(shape: Any) -> str:
    """XLA's name of the element type, e.g. ``bf16``; ``type 99`` if it is not known."""
    known = {kind.value for kind in ElementType}
    number = shape.element_type
    return ElementType(number).name.lower() if number in known else f"type {number}"


def element_bits(shape: Any) -> int:
    """Bits that an element takes in memory."""
    return _BITS.get(shape.element_type, 8)


def num_elements(shape: Any) -> int:
    return math.prod(shape.dimensions)


def num_bytes(shape: Any) -> int:
    """Bytes of an array or of all arrays of a tuple. Tokens have none."""
    arrays = (leaf for leaf in leaves(shape) if leaf.element_type != ElementType.TOKEN)
    return sum(num_elements(leaf) * element_bits(leaf) // 8 for leaf in arrays)


def shape_text(shape: Any) -> str:
    """A shape as HLO's text has it, e.g. ``f32[8,6]``."""
    if shape.element_type == ElementType.TUPLE:
        return f"({', '.join(map(shape_text, shape.tuple_shapes))})"
    return f"{type_name(shape)}[{','.join(map(str, shape.dimensions))}]"


def integer_literal(instruction: Instruction) -> np.ndarray | None:
    """The values of a constant of at most 32-bit integers or predicates; None of others."""
    known = _LITERALS.get(instruction.shape.element_type)
    if instruction.opcode != "constant" or known is None:
        return None
    field, dtype = known
    data = getattr(instruction.literal, field)
    values = np.frombuffer(data, dtype) if isinstance(data, bytes) else np.array(data, dtype)
    return values.astype(np.int64).reshape(dimensions(instruction.shape))


def replica_groups(instruction: Instruction, num_ranks: int) -> list[tuple[int, ...]]:
    """A collective's groups; none written means one of all ranks."""
    groups = [tuple(group.replica_ids) for group in instruction.replica_groups]
    return groups or [tuple(range(num_ranks))]
