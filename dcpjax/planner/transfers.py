"""What it costs to hand a sequence from a prefill engine to a decode engine.

Bytes, runs and descriptors are those of real plans (:mod:`dcpjax.transfer`) over pools as the
engines have them; only links and posting are estimated.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcpjax.cache.widths import PartWidth, index_field_bytes
from dcpjax.errors import UnsupportedCombination
from dcpjax.layout import KVPlacement
from dcpjax.planner.cache_parts import INDEXER
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.hardware import Device, constant
from dcpjax.planner.memory import deployment_parts
from dcpjax.planner.models import ModelShape
from dcpjax.transfer import bind, plan_transfer
from dcpjax.transfer.memory import RankMemory, SequenceMemory
from dcpjax.transfer.parts import by_field


@dataclass(frozen=True, eq=False)
class TransferCost:
    """One sequence's way from engine to engine.

    Attributes:
        bytes_by_path: [source ranks, target ranks], all parts together.
        num_runs: strided runs of the plans: their size.
        num_descriptors: pieces after neighbours were merged, with page ids in ascending order.
        scattered_descriptors: the same where no two pages of a sequence are neighbours.
    """

    bytes_by_path: npt.NDArray[np.int64]
    num_runs: int
    num_descriptors: int
    scattered_descriptors: int

    @property
    def num_bytes(self) -> int:
        return int(self.bytes_by_path.sum())

    @property
    def busiest_target_bytes(self) -> int:
        """Into the rank that gets most."""
        return int(self.bytes_by_path.sum(axis=0).max(initial=0))

    @property
    def busiest_source_bytes(self) -> int:
        return int(self.bytes_by_path.sum(axis=1).max(initial=0))

    def wire_seconds(self, device: Device) -> float:
        """All ranks send and receive at the same time, each over its own link between nodes."""
        link = device.scale_out_gb_s * 1e9 * constant("nic_efficiency").value
        return max(self.busiest_source_bytes, self.busiest_target_bytes) / link

    def posting_seconds(self, *, scattered: bool = False) -> float:
        """Descriptors are posted by each target rank, side by side."""
        count = self.descriptors_per_target(scattered=scattered)
        return count * constant("descriptor_us").value * 1e-6

    def descriptors_per_target(self, *, scattered: bool = False) -> float:
        """Of each rank that gets something, on average."""
        targets = np.count_nonzero(self.bytes_by_path.sum(axis=0)) or 1
        return (self.scattered_descriptors if scattered else self.num_descriptors) / targets

    def seconds(self, device: Device, *, scattered: bool = False) -> float:
        """Until the last byte has landed, from when both engines are ready."""
        base = constant("transfer_base_us").value * 1e-6
        return base + self.posting_seconds(scattered=scattered) + self.wire_seconds(device)


@functools.lru_cache(maxsize=256)
def transfer_cost(
    model: ModelShape, source: Deployment, target: Deployment, num_tokens: int
) -> TransferCost:
    """The cost of ``num_tokens`` tokens, from one copy of the source to one of the target.

    Raises:
        UnsupportedCombination: the two engines store other values, or one has a draft's cache and
            the other has not.
        PlanError: no plan exists between the placements.
    """
    parts = deployment_parts(model, source)
    if parts != deployment_parts(model, target):
        raise UnsupportedCombination(
            "both sides of a transfer have the same parts, of the same type",
            source=source.stored_dtype(model),
            target=target.stored_dtype(model),
        )
    costs = [_part_cost(model, source, target, part, num_tokens) for part in parts]
    return TransferCost(
        np.sum([cost.bytes_by_path for cost in costs], axis=0),
        sum(cost.num_runs for cost in costs),
        sum(cost.num_descriptors for cost in costs),
        sum(cost.scattered_descriptors for cost in costs),
    )


def _part_cost(
    model: ModelShape, source: Deployment, target: Deployment, part: PartWidth, num_tokens: int
) -> TransferCost:
    placements = [engine.part_placement(part, model) for engine in (source, target)]
    plan = plan_transfer(*placements, num_tokens=num_tokens)
    counts: list[int] = []
    for step in (1, 2):  # page ids 0, 1, 2, … and 0, 2, 4, …
        memories = [_memory(placement, part, num_tokens, step) for placement in placements]
        fields = by_field(_field_bytes(model, source, part), *memories)
        bounds = [bind(plan, *field) for field in fields]
        counts.append(
            sum(len(bound.addresses(path)[0]) for bound in bounds for path in bound.paths)
        )
    bytes_by_path = plan.bytes_by_path(part.bytes_per_token)
    return TransferCost(bytes_by_path, plan.num_runs, counts[0], counts[1])


def _field_bytes(model: ModelShape, engine: Deployment, part: PartWidth) -> tuple[int, ...]:
    """As the engine stores them."""
    if model.indexer is None or not part.name.endswith(INDEXER):
        return ()
    return index_field_bytes(model.indexer.head_dim, engine.stored_dtype(model))


def _memory(placement: KVPlacement, part: PartWidth, num_tokens: int, step: int) -> SequenceMemory:
    """Pools with one sequence in them, its page ids ``step`` apart."""
    ranks_of_tokens = max(share.ranks for share in placement.shares)
    pages = max(1, -(-num_tokens // (placement.page_size * ranks_of_tokens)))
    page_ids: npt.NDArray[Any] = np.arange(pages) * step
    ranks = tuple(
        RankMemory.dense(
            1 << 40,
            num_pages=pages * step,
            num_layers=share.num_layers,
            num_heads=share.num_heads,
            page_size=placement.page_size,
            token_bytes=part.bytes_per_token,
        )
        for share in placement.shares
    )
    return SequenceMemory(placement, ranks, page_ids)


def naive_bytes(cost: TransferCost, ranks: int) -> int:
    """What moves if every rank of the target gets the whole sequence and keeps its share."""
    return cost.num_bytes * ranks
