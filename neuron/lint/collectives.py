"""Rules about exchanges between ranks."""

from collections.abc import Iterator

from neuron.lint.graph import Instruction, replica_groups
from neuron.lint.model import Context, Found, Rule

ALLOWED = ("all-gather", "reduce-scatter")
GROUPED = (*ALLOWED, "all-reduce", "all-to-all", "ragged-all-to-all", "collective-broadcast")
PERMUTES = ("collective-permute", "collective-permute-start")
_OTHERS = (
    *GROUPED[len(ALLOWED) :],
    *PERMUTES,
    "all-gather-start",
    "all-gather-done",
    "all-reduce-start",
    "all-reduce-done",
    "collective-permute-done",
)
MAX_GROUP_SETS = 16
_SHOWN = 4
"""Groups or pairs that a finding lists."""
_PAGE = "Neuron SDK, neuron-runtime/about/collectives"


def grouped(context: Context) -> Iterator[tuple[Instruction, list[tuple[int, ...]]]]:
    """Each collective over groups, with them."""
    for i in context.graph.of(*GROUPED, "all-gather-start", "all-reduce-start"):
        yield i, replica_groups(i, context.program.num_ranks)


def _other_kinds(context: Context) -> Iterator[Found]:
    return ((i, {"opcode": i.opcode}) for i in context.graph.of(*_OTHERS))


def _open_rings(context: Context) -> Iterator[Found]:
    """Pairs are full rings if every rank that sends also receives, once each."""
    for i in context.graph.of(*PERMUTES):
        pairs = [(pair.source, pair.target) for pair in i.source_target_pairs]
        sources, targets = sorted(s for s, _ in pairs), sorted(t for _, t in pairs)
        is_once = len(set(sources)) == len(sources)
        if sources != targets or not is_once or any(s == t for s, t in pairs):
            yield i, {"pairs": pairs[:_SHOWN], "count": len(pairs)}


def _unequal_sizes(context: Context) -> Iterator[Found]:
    for i, groups in grouped(context):
        if sizes := sorted({len(group) for group in groups})[1:]:
            yield i, {"sizes": [len(groups[0]), *sizes]}


def _partial_groups(context: Context) -> Iterator[Found]:
    for i, groups in grouped(context):
        ranks = sorted(rank for group in groups for rank in group)
        if ranks != list(range(context.program.num_ranks)):
            yield i, {"num_ranks": context.program.num_ranks, "groups": groups[:_SHOWN]}


def _asymmetric(context: Context) -> Iterator[Found]:
    """Groups that reach over instances have the same cores on each of them."""
    cores = context.target.instance_cores(context.lnc)
    for i, groups in grouped(context):
        for group in groups:
            by_node: dict[int, list[int]] = {}
            for rank in group:
                by_node.setdefault(rank // cores, []).append(rank % cores)
            if len({tuple(sorted(local)) for local in by_node.values()}) > 1:
                yield i, {"group": group, "cores_per_instance": cores}
                break


def _many_group_sets(context: Context) -> Iterator[Found]:
    sets = {frozenset(groups) for _, groups in grouped(context)}
    if len(sets) > MAX_GROUP_SETS:
        yield None, {"sets": len(sets), "limit": MAX_GROUP_SETS}


RULES = (
    Rule(
        "collective-kind",
        "ranks exchange by all-gather and reduce-scatter alone",
        "NRT_INVALID, long waits and failed loads that other kinds have been seen to cause",
        "design of these programs; aws-neuron-sdk issues 998, 1142 and 1189",
        _other_kinds,
    ),
    Rule(
        "permute-ring",
        "the pairs of a collective-permute form full rings",
        "a collective that the runtime cannot build",
        _PAGE,
        _open_rings,
    ),
    Rule(
        "group-size",
        "all groups of a collective have the same size",
        "a collective that the runtime cannot build",
        _PAGE,
        _unequal_sizes,
    ),
    Rule(
        "group-cover",
        "every rank is in exactly one group of a collective",
        "mismatching number of cc ops",
        "aws-neuron-sdk issue 779",
        _partial_groups,
    ),
    Rule(
        "group-symmetry",
        "a group over several instances has the same cores on each",
        "a collective that the runtime cannot build",
        _PAGE,
        _asymmetric,
    ),
    Rule(
        "group-sets",
        f"a program has at most {MAX_GROUP_SETS} different sets of groups",
        "a program that the runtime does not load (12 before SDK 2.32)",
        _PAGE,
        _many_group_sets,
    ),
)
