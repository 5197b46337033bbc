"""Compiled programs as XLA prints them: instructions, and the arrays that they make.

Of a scheduled program, instructions stand in the order in which they begin.
"""

import math
import re
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[\w\-]+)"
    r"\((?P<operands>[^)]*)(?P<attributes>.*)"
)
_NAME = re.compile(r"[\w.\-]+")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*\w*)\[(?P<dimensions>[\d,]*)\]")
_BITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        type: of its output, with layout.
        is_root: its output is that of its computation.
        words: of the operand list; some are names of instructions.
        attributes: everything behind the operands.
        is_entry: it is of the computation that the program begins with.
    """

    computation: str
    name: str
    type: str
    opcode: str
    is_root: bool
    words: tuple[str, ...]
    attributes: str = ""
    is_entry: bool = False

    def makes(self, dimensions: str) -> bool:
        """Whether its output, or a part of it, has these dimensions; the type may be another."""
        return dimensions in self.type

    @property
    def calls(self) -> str | None:
        """The computation of a fusion or a call."""
        found = _CALLS.search(self.attributes)
        return found[1] if found else None

    @property
    def body(self) -> str | None:
        """The computation that a loop repeats."""
        found = _BODY.search(self.attributes)
        return found[1] if found else None

    @property
    def trip_count(self) -> int | None:
        """How often a loop runs, where the compiler knows it."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    def sizes(self, attribute: str) -> tuple[int, ...]:
        """The numbers of an attribute such as ``dimensions={0,1}``; none where it is missing."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return _numbers(found[1]) if found else ()


@dataclass(frozen=True)
class ArrayType:
    """An array that an instruction makes."""

    dtype: str
    dimensions: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        bits = _BITS.search(self.dtype)
        return math.prod(self.dimensions) * (int(bits[0]) // 8 if bits else 1)  # "pred"


def read_instructions(text: str) -> list[Instruction]:
    """All instructions of a program, in the order in which they stand."""
    found, computation, is_entry = [], "", False
    for line in text.splitlines():
        if opening := _COMPUTATION.match(line):
            computation, is_entry = opening["name"], opening["entry"] is not None
        elif parsed := _INSTRUCTION.match(line):
            found.append(
                Instruction(
                    computation,
                    parsed["name"],
                    parsed["type"],
                    parsed["opcode"],
                    parsed["root"] is not None,
                    tuple(_NAME.findall(parsed["operands"])),
                    parsed["attributes"],
                    is_entry,
                )
            )
    return found


def array_types(type_text: str) -> list[ArrayType]:
    """The arrays of an output: one, or the members of a tuple."""
    return [
        ArrayType(found["dtype"], _numbers(found["dimensions"]))
        for found in _ARRAY.finditer(type_text)
    ]


def _numbers(listed: str) -> tuple[int, ...]:
    return tuple(int(number) for number in listed.split(",") if number)
