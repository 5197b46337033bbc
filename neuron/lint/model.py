"""What a rule is, what it finds, and what it is given to look at."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from neuron.lint.graph import Graph, Instruction
from neuron.lint.ranges import Ranges, find_ranges
from neuron.program import Program
from neuron.targets import Target

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Context:
    """One program and what it is compiled for.

    Attributes:
        lnc: physical cores of a rank.
        operators: opcodes that the installed compiler lists; None where that is not known.
    """

    program: Program
    target: Target
    lnc: int
    operators: frozenset[str] | None = None

    @property
    def module(self) -> Any:
        return self.program.module

    @cached_property
    def graph(self) -> Graph:
        return Graph(self.program.module)

    @cached_property
    def ranges(self) -> Ranges:
        return find_ranges(self.program, self.graph)


Found = tuple[Instruction | None, dict[str, Any]]
"""Where a rule is broken, None for the whole module, and the values that break it."""


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: also its name in reports.
        sentence: what holds in a program that keeps it.
        prevents: the compiler's error code, or what happens at run time.
        source: where it is written.
        find: the places where it is broken.
    """

    name: str
    sentence: str
    prevents: str
    source: str
    find: Callable[[Context], Iterable[Found]]
    severity: Severity = "error"


@dataclass(frozen=True)
class Finding:
    """A rule that a program breaks.

    Attributes:
        instruction: its name, empty where the rule is about the whole module.
        line: ``path:line`` of the code that it comes from, where that is known.
    """

    rule: Rule
    instruction: str
    values: dict[str, Any]
    line: str | None

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.values.items())
        where = self.instruction or "module"
        return f"{self.line or where}: {self.rule.name}: {self.rule.sentence} ({where}: {shown})"
