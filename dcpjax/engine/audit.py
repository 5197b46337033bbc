"""Proof that a compiled step updates the KV pool in place.

A hidden copy of the pool costs up to twenty times the step's time and half the capacity, and makes
writes from other machines into the pool unsafe. The compiled program tells: the pool's input and
output share memory, and no other instruction has an output of the pool's shape.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcpjax.engine.hlo_text import Instruction, read_instructions
from dcpjax.errors import AuditError

_IN_PLACE = frozenset(
    ("parameter", "get-tuple-element", "tuple", "while", "bitcast", "call", "conditional")
    + ("scatter", "dynamic-update-slice", "opt-barrier")
)
"""Instructions that pass the pool on or update it in place; a fusion is judged by its root."""

_ALIAS = re.compile(r"\{(\d*)\}: \(\d+, \{\}, (?:may|must)-alias\)")


@dataclass(frozen=True)
class StepAudit:
    """What was found in one compiled step. Sizes are bytes of one device."""

    step: str
    aliased_bytes: int
    temporary_bytes: int
    instructions: int


def audit_step(compiled: Any, step: str, *, pool_shapes: Sequence[tuple[int, ...]]) -> StepAudit:
    """Examine one compiled step.

    Args:
        compiled: what ``jax.jit(step).lower(…).compile()`` returns.
        step: its name, for the error.
        pool_shapes: shapes of one device's share of each pool; the pools are the first outputs of
            the step, in this order.

    Raises:
        AuditError: the pool is not aliased, or an instruction makes another one of its shape.
    """
    text = compiled.as_text()
    for output in range(len(pool_shapes)):
        check_aliased(text, step, output)
    instructions = read_instructions(text)
    wanted = [f"[{','.join(map(str, shape))}]" for shape in dict.fromkeys(pool_shapes)]
    copies = [found for dimensions in wanted for found in _copies(instructions, dimensions)]
    if copies:
        raise AuditError("the step makes copies of the KV pool", step=step, instructions=copies)
    memory = compiled.memory_analysis()
    return StepAudit(step, memory.alias_size_in_bytes, memory.temp_size_in_bytes, len(instructions))


def check_aliased(text: str, step: str, pool_output: int = 0) -> None:
    """Raise unless output ``pool_output`` of the program lies in the memory of an input."""
    header = text.split("\n", 1)[0]
    if str(pool_output) not in _ALIAS.findall(header):
        raise AuditError("the KV pool is not updated in place", step=step, header=header[:400])


def _copies(instructions: list[Instruction], dimensions: str) -> list[str]:
    """Instructions with an output of the pool's dimensions that is not the pool itself."""
    fused = {i.calls for i in instructions if i.opcode == "fusion"}
    found = {(i.computation, i.name): i for i in instructions}
    roots = {i.computation: i for i in instructions if i.is_root}

    def makers(item: Instruction) -> list[Instruction]:
        """What makes the outputs: in a fusion its root, or the members of a tuple there."""
        if item.opcode != "fusion" or item.calls is None:
            return [item]
        root = roots[item.calls]
        if root.opcode != "tuple":
            return [root]
        members = (found.get((root.computation, word)) for word in root.words)
        return [member for member in members if member is not None]

    return [
        f"{item.name} ({maker.opcode})"
        for item in instructions
        if item.computation not in fused and item.makes(dimensions)
        for maker in makers(item)
        if maker.makes(dimensions) and maker.opcode not in _IN_PLACE
    ]
