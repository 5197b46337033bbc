"""Caches of several parts: the latent of all layers, indexer keys of some, a draft layer.

Each part has its own pool, placement and item size, and so a plan of its own; all of them have the
page ids of the sequence. Bound together they are one transfer, which arrives as a whole or not.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dcpjax.errors import PlanError
from dcpjax.layout import KVPlacement
from dcpjax.transfer.blocks import BoundPath, BoundTransfer
from dcpjax.transfer.cover import routes
from dcpjax.transfer.memory import RankMemory, SequenceMemory
from dcpjax.transfer.plan import TransferPlan, plan_transfer
from dcpjax.transfer.runs import TokenSplit, common_runs


@dataclass(frozen=True)
class PlacedPart:
    """One part of an engine's cache.

    Attributes:
        name: the same on both sides of a transfer.
        layers: the layers of the model that have this part, ascending; layer k of the placement is
            ``layers[k]``.
        field_bytes: of a token's fields, where a page has one field of all its tokens after the
            other; empty where the bytes of a token lie together.
    """

    name: str
    layers: tuple[int, ...]
    placement: KVPlacement
    field_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.layers) != self.placement.layers:
            raise PlanError(
                "a cache part has a layer of its placement for each of its layers",
                part=self.name,
                layers=len(self.layers),
                placement=self.placement.layers,
            )

    @classmethod
    def of_layers(cls, name: str, layers: Sequence[int], model: KVPlacement) -> "PlacedPart":
        """The part that the ranks hold of whichever of ``layers`` they hold in ``model``.

        Raises:
            LayoutError: ``layers`` are not ascending layers of ``model``.
        """
        return cls(name, tuple(layers), model.select_layers(layers))


def plan_parts(
    source: Sequence[PlacedPart],
    target: Sequence[PlacedPart],
    *,
    num_tokens: int,
    first_token: int = 0,
) -> dict[str, TransferPlan]:
    """The plan of every part of the target, by name, in the order of ``target``.

    The source may have more parts: a target that does not speculate takes no draft layer. Of a part
    with fields the plan goes on to the end of the last page, where no page has to be cut.

    Raises:
        PlanError: the target has a part that the source lacks, a part has different layers or
            fields, or :func:`dcpjax.transfer.plan_transfer` refuses one.
    """
    source_parts, target_parts = _by_name(source), _by_name(target)
    if not target_parts.keys() <= source_parts.keys():
        raise PlanError(
            "the source has every cache part of the target",
            source=sorted(source_parts),
            target=sorted(target_parts),
        )
    return {
        name: _plan_part(source_parts[name], part, first_token, num_tokens)
        for name, part in target_parts.items()
    }


@lru_cache(maxsize=256)
def cuts_pages(source: KVPlacement, target: KVPlacement) -> bool:
    """Whether some page of one side goes to, or comes from, more than one page of the other.

    Raises:
        PlanError: there is no plan between the placements.
    """
    return source.page_size != target.page_size or not all(
        common_runs(route.source, route.target).is_in_pages for route in routes(source, target)
    )


def by_field(
    field_bytes: Sequence[int], source: SequenceMemory, target: SequenceMemory
) -> Iterator[tuple[SequenceMemory, SequenceMemory]]:
    """The memory of a part on both sides; of its fields one by one, where a page would be cut."""
    if not field_bytes or not cuts_pages(source.placement, target.placement):
        yield source, target
        return
    first = 0
    for size in field_bytes:
        yield source.of_field(first, size), target.of_field(first, size)
        first += size


def join(transfers: Sequence[BoundTransfer]) -> BoundTransfer:
    """Transfers without landings as one: rank r of each is rank r behind those of the ones before.

    Raises:
        PlanError: one of them was staged, so its ranks are not those of the pools.
    """
    source_ranks: list[RankMemory] = []
    target_ranks: list[RankMemory] = []
    paths: list[BoundPath] = []
    for bound in transfers:
        if bound.landings:
            raise PlanError("staged transfers stay alone", landings=len(bound.landings))
        paths += [
            replace(
                path,
                source_rank=len(source_ranks) + path.source_rank,
                target_rank=len(target_ranks) + path.target_rank,
            )
            for path in bound.paths
        ]
        source_ranks += bound.source_ranks
        target_ranks += bound.target_ranks
    return BoundTransfer(tuple(source_ranks), tuple(target_ranks), tuple(paths))


def _plan_part(
    source: PlacedPart, target: PlacedPart, first_token: int, num_tokens: int
) -> TransferPlan:
    for name in ("layers", "field_bytes"):
        if getattr(source, name) != getattr(target, name):
            raise PlanError(
                f"a cache part has the same {name} at the source and the target",
                part=source.name,
                source=getattr(source, name),
                target=getattr(target, name),
            )
    if source.field_bytes and not cuts_pages(source.placement, target.placement):
        num_tokens = _to_whole_pages(source, target, first_token, num_tokens)
    return plan_transfer(
        source.placement, target.placement, num_tokens=num_tokens, first_token=first_token
    )


def _to_whole_pages(
    source: PlacedPart, target: PlacedPart, first_token: int, num_tokens: int
) -> int:
    """``num_tokens`` up to the end of a page."""
    unit = math.lcm(_cut_unit(source.placement), _cut_unit(target.placement))
    if first_token % unit:
        raise PlanError(
            "what moves as whole pages begins with a page",
            part=source.name,
            first_token=first_token,
            page=unit,
        )
    return -(-num_tokens // unit) * unit


def _cut_unit(placement: KVPlacement) -> int:
    """Tokens after which a sequence can be cut between pages of every rank."""
    held = (share for share in placement.shares if not share.is_empty)
    return math.lcm(*(TokenSplit.of(share, placement.page_size).cut_unit for share in held))


def _by_name(parts: Sequence[PlacedPart]) -> Mapping[str, PlacedPart]:
    by_name = {part.name: part for part in parts}
    if len(by_name) != len(parts):
        raise PlanError("the parts of a cache have distinct names", names=[p.name for p in parts])
    return by_name
