"""From an instruction to the line of our code that it comes from."""

from collections import deque
from pathlib import Path

import dcpjax
from neuron.lint.graph import Graph, Instruction

ROOT = Path(dcpjax.__file__).resolve().parent.parent
_PACKAGES = ("dcpjax", "neuron")
_PASSED = ROOT / "neuron" / "lowering.py"  # every trace passes through it
_NEAR = 64
"""Neighbours to ask when an instruction has no line of its own: JAX keeps none of what it traced
before, like the body of ``jnp.where``."""


def source_line(graph: Graph, instruction: Instruction) -> str | None:
    """``path:line`` of the innermost frame in our packages, else of the innermost frame.

    An instruction without frames has the line of the nearest one that has: of those that use it,
    then of its operands, then of what calls its computation.
    """
    waiting, seen = deque([instruction]), {instruction.id}
    while waiting and len(seen) < _NEAR:
        current = waiting.popleft()
        if line := _own_line(graph, current):
            return line
        callers = graph.callers[graph.computation_of(current).id]
        for near in [*graph.users[current.id], *graph.operands(current), *callers]:
            if near.id not in seen:
                seen.add(near.id)
                waiting.append(near)
    return None


def _own_line(graph: Graph, instruction: Instruction) -> str | None:
    frames = _frames(graph, instruction)
    ours = [frame for frame in frames if _is_ours(frame[0])]
    for path, line in ours or frames:
        return f"{_shown(path)}:{line}"
    return None


def _frames(graph: Graph, instruction: Instruction) -> list[tuple[Path, int]]:
    """Files and lines of an instruction's stack, the innermost first. Ids count from one."""
    index, metadata = graph.module.stack_frame_index, instruction.metadata
    found, number = [], metadata.stack_frame_id
    if not number and metadata.source_file:
        return [(Path(metadata.source_file), metadata.source_line)]
    while 0 < number <= len(index.stack_frames):
        frame = index.stack_frames[number - 1]
        location = index.file_locations[frame.file_location_id - 1]
        found.append((Path(index.file_names[location.file_name_id - 1]), location.line))
        number = frame.parent_frame_id if frame.parent_frame_id != number else 0
    return found


def _is_ours(path: Path) -> bool:
    return path != _PASSED and any(path.is_relative_to(ROOT / name) for name in _PACKAGES)


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
