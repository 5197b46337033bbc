"""What the ranks exchange in one run of a program."""

from dataclasses import dataclass

from neuron.lint.graph import Graph, num_bytes, replica_groups
from neuron.lint.loops import find_trip
from neuron.program import Program

_KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Collective:
    """All collectives of a kind over the same groups.

    Attributes:
        count: runs of them in one run of the program, those in loops as often as they run.
        groups: the ranks; none for a collective-permute.
        num_bytes: of the larger of operands and results on one rank, over all runs.
    """

    kind: str
    count: int
    groups: tuple[tuple[int, ...], ...]
    num_bytes: int

    @property
    def group_size(self) -> int:
        return len(self.groups[0]) if self.groups else 0


def find_collectives(program: Program) -> tuple[Collective, ...]:
    """What a program exchanges, in the order of kinds and groups."""
    graph = Graph(program.module)
    runs = _runs(graph)
    found: dict[tuple[str, tuple[tuple[int, ...], ...]], tuple[int, int]] = {}
    for i in graph.of(*_KINDS):
        permutes = i.opcode == "collective-permute"
        groups = () if permutes else tuple(replica_groups(i, program.num_ranks))
        times = runs[graph.computation_of(i).id]
        operands = sum(num_bytes(operand.shape) for operand in graph.operands(i))
        count, size = found.get((i.opcode, groups), (0, 0))
        size += times * max(operands, num_bytes(i.shape))
        found[i.opcode, groups] = count + times, size
    return tuple(
        Collective(kind, count, groups, size)
        for (kind, groups), (count, size) in sorted(found.items())
    )


def _runs(graph: Graph) -> dict[int, int]:
    """How often each computation runs, by its id; once in a loop of unknown length."""
    runs = {graph.entry.id: 1}
    for computation in reversed(list(graph.computations.values())):  # callers come after callees
        times = runs.setdefault(computation.id, 0)
        for instruction in computation.instructions:
            trip = find_trip(graph, instruction) if instruction.opcode == "while" else None
            for called in instruction.called_computation_ids:
                count = times * (1 if trip is None else trip.count)
                runs[called] = runs.get(called, 0) + count
    return runs
