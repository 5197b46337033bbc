"""Caches of several parts: the latent of all layers, indexer keys of some, a draft layer.

Each part has its own pool, placement and item size, and so a plan of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcpjax.errors import PlanError
from dcpjax.layout import KVPlacement
from dcpjax.transfer.plan import TransferPlan, plan_transfer


@dataclass(frozen=True)
class CachePart:
    """One part of an engine's cache.

    Attributes:
        name: the same on both sides of a transfer.
        layers: the layers of the model that have this part, ascending; layer k of the placement is
            ``layers[k]``.
    """

    name: str
    layers: tuple[int, ...]
    placement: KVPlacement

    def __post_init__(self) -> None:
        if len(self.layers) != self.placement.layers:
            raise PlanError(
                "a cache part has a layer of its placement for each of its layers",
                part=self.name,
                layers=len(self.layers),
                placement=self.placement.layers,
            )

    @classmethod
    def of_layers(cls, name: str, layers: Sequence[int], model: KVPlacement) -> "CachePart":
        """The part that the ranks hold of whichever of ``layers`` they hold in ``model``.

        Raises:
            LayoutError: ``layers`` are not ascending layers of ``model``.
        """
        return cls(name, tuple(layers), model.select_layers(layers))


def plan_parts(
    source: Sequence[CachePart],
    target: Sequence[CachePart],
    *,
    num_tokens: int,
    first_token: int = 0,
) -> dict[str, TransferPlan]:
    """The plan of every part, by name, in the order of ``source``.

    Raises:
        PlanError: the two caches have different parts, a part has different layers, or
            :func:`dcpjax.transfer.plan_transfer` refuses one.
    """
    target_parts = _by_name(target)
    source_parts = _by_name(source)
    if source_parts.keys() != target_parts.keys():
        raise PlanError(
            "source and target have the same cache parts",
            source=sorted(source_parts),
            target=sorted(target_parts),
        )
    plans: dict[str, TransferPlan] = {}
    for name, part in source_parts.items():
        other = target_parts[name]
        if part.layers != other.layers:
            raise PlanError(
                "a cache part is of the same layers at the source and the target",
                part=name,
                source=part.layers,
                target=other.layers,
            )
        plans[name] = plan_transfer(
            part.placement, other.placement, num_tokens=num_tokens, first_token=first_token
        )
    return plans


def _by_name(parts: Sequence[CachePart]) -> Mapping[str, CachePart]:
    by_name = {part.name: part for part in parts}
    if len(by_name) != len(parts):
        raise PlanError("the parts of a cache have distinct names", names=[p.name for p in parts])
    return by_name
