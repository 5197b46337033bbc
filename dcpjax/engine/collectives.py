"""The collectives of a compiled step, read from the program itself: what every rank must run alike.

A rank that left one out, or ran them in another order, would let all others wait for ever. So none
may stand where a value of the step decides whether it runs, or how often.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dcpjax.engine.hlo_text import Instruction, array_types, read_instructions
from dcpjax.errors import AuditError

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=(\{(?:\{[\d,]*\},?)*\}|\[[^\s]*?\](?:<=\[[\d,]*\])?"
    r"(?:T\([\d,]*\))?)"
)
_CALLED = re.compile(r"(?:to_apply|calls|body|condition|\w+_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: one of KINDS.
        shapes: type and extents of each result, of one rank.
        groups: which ranks take part, as the program writes it.
        repeats: how often it runs, in loops of constant length.
        depends_on: "" or the instruction around it by which a value of the step decides.
    """

    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    groups: str
    repeats: int = 1
    depends_on: str = ""

    @property
    def num_ranks(self) -> int:
        """Of a group."""
        by_count = re.match(r"\[\d+,(\d+)\]", self.groups)
        if by_count is not None:
            return int(by_count[1])
        first = re.match(r"\{\{([\d,]*)\}", self.groups)
        assert first is not None, f"groups of a form that is not known: {self.groups}"
        return len(first[1].split(","))


def collectives_of(program: str) -> tuple[Collective, ...]:
    """The collectives of a compiled program in the order in which they run.

    Args:
        program: its text, ``compiled.as_text()``.
    """
    computations: dict[str, list[Instruction]] = {}
    for one in read_instructions(program):
        computations.setdefault(one.computation, []).append(one)
    (entry,) = {body[0].computation for body in computations.values() if body[0].is_entry}
    return tuple(_walk(computations, entry))


def check_collectives(program: str, name: str) -> tuple[Collective, ...]:
    """The collectives of a program, none of which depends on a value of the step.

    Raises:
        AuditError: one does.
    """
    found = collectives_of(program)
    for one in found:
        if one.depends_on:
            raise AuditError(
                "a collective runs whatever the values of a step are",
                step=name,
                collective=one.kind,
                inside=one.depends_on,
            )
    return found


def _walk(computations: dict[str, list[Instruction]], name: str) -> Iterator[Collective]:
    for one in computations.get(name, ()):
        kind = one.opcode.removesuffix("-start")
        if kind in KINDS:
            groups = _GROUPS.search(one.attributes)
            shapes = tuple((array.dtype, array.dimensions) for array in array_types(one.type))
            yield Collective(kind, shapes, groups[1] if groups else "")
            continue
        called = _called(one.attributes)
        inside = [found for other in called for found in _walk(computations, other)]
        if one.opcode == "while":
            yield from _in_loop(inside, one.trip_count)
        elif one.opcode == "conditional":
            yield from (replace(found, depends_on="conditional") for found in inside)
        else:
            yield from inside


def _in_loop(inside: Sequence[Collective], trips: int | None) -> Iterator[Collective]:
    for one in inside:
        if trips is None:
            yield replace(one, depends_on="while")
        else:
            yield replace(one, repeats=one.repeats * trips)


def _called(rest: str) -> list[str]:
    branches = _BRANCHES.search(rest)
    named = [] if branches is None else re.findall(r"%?([\w.\-]+)", branches[1])
    return [*_CALLED.findall(rest), *named]
