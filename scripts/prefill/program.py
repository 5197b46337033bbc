"""The products of a compiled program, loop by loop."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from dcpjax.engine.hlo_text import Instruction, array_types, read_instructions


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        score_widths: over how many values a loop of a kind multiplies queries and keys; a loop
            with such a product is of this kind.
    """

    instructions: list[Instruction]
    score_widths: Mapping[str, int]

    @classmethod
    def of(cls, text: str, score_widths: Mapping[str, int]) -> "Program":
        return cls(read_instructions(text), score_widths)

    @cached_property
    def entry(self) -> list[Instruction]:
        """Instructions of the program itself, in the order in which they are scheduled."""
        return [one for one in self.instructions if one.is_entry]

    @cached_property
    def _by_computation(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = defaultdict(list)
        for one in self.instructions:
            found[one.computation].append(one)
        return found

    @cached_property
    def _types(self) -> dict[tuple[str, str], str]:
        return {(one.computation, one.name): one.type for one in self.instructions}

    def flops(self, one: Instruction, trips: Mapping[str, int] | None = None) -> float:
        """Of the products in an instruction: two for each pair of values.

        Args:
            trips: runs of each loop of a kind whose length the compiler does not know; without
                them the body of every loop counts once, as compilers count it.
        """
        if one.opcode == "dot":
            return self._dot_flops(one)
        if one.opcode == "while":
            return self._loop_flops(one, trips)
        return self._inner(one.calls, trips) if one.calls else 0.0

    def total(self, trips: Mapping[str, int] | None = None) -> float:
        """FLOPs of the whole program."""
        return sum(self.flops(one, trips) for one in self.entry)

    def loops(self, kind: str, trips: Mapping[str, int]) -> float:
        """FLOPs of all loops of a kind."""
        nothing = dict.fromkeys(self.score_widths, 0)
        return self.total({**nothing, kind: trips[kind]}) - self.total(nothing)

    def _inner(self, computation: str, trips: Mapping[str, int] | None) -> float:
        return sum(self.flops(one, trips) for one in self._by_computation[computation])

    def _loop_flops(self, loop: Instruction, trips: Mapping[str, int] | None) -> float:
        assert loop.body is not None, "a loop has a body"
        if trips is None:
            return self._inner(loop.body, None)
        if loop.trip_count is None:
            kind = self._kind(loop.body)
            return (1 if kind is None else trips[kind]) * self._inner(loop.body, trips)
        # The runs of a loop inside are those of all its own together.
        outside = self._inner(loop.body, dict.fromkeys(trips, 0))
        return loop.trip_count * outside + self._inner(loop.body, trips) - outside

    def _kind(self, computation: str) -> str | None:
        """Of a loop, by its products and those of the loops in it."""
        for one in self._by_computation[computation]:
            width = self._contracted(one) if one.opcode == "dot" else None
            for kind, wanted in self.score_widths.items():
                if width == wanted:
                    return kind
            inner = one.calls or one.body
            if inner and (kind := self._kind(inner)):
                return kind
        return None

    def _dot_flops(self, dot: Instruction) -> float:
        (made,) = array_types(dot.type)
        return 2.0 * math.prod(made.dimensions) * self._contracted(dot)

    def _contracted(self, dot: Instruction) -> int:
        operands = [
            self._types[dot.computation, word]
            for word in dot.words
            if (dot.computation, word) in self._types
        ]
        (left,) = array_types(operands[0])
        return math.prod(left.dimensions[axis] for axis in dot.sizes("lhs_contracting_dims"))
