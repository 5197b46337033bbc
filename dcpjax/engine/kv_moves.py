"""The tokens of one sequence on their way from one engine's pages to another's, in all parts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dcpjax.transfer.bind import BoundTransfer, bind
from dcpjax.transfer.engine_info import EngineInfo
from dcpjax.transfer.memory import SequenceMemory
from dcpjax.transfer.parts import by_field, join, plan_parts
from dcpjax.transfer.plan import TransferPlan

PageIds = Sequence[int] | np.ndarray
Plans = Mapping[str, TransferPlan]
"""By cache part."""


@dataclass(frozen=True)
class Moved:
    """A transfer that has arrived, of some parts or of some tokens of one."""

    plans: Plans
    bound: BoundTransfer
    seconds: float


@dataclass(frozen=True)
class SequenceMove:
    """The tokens ``span`` of a sequence from pages of the source to pages of the target.

    What moves is what the target caches. Page ids are the same in all parts of an engine.
    """

    source: EngineInfo
    source_pages: PageIds
    target: EngineInfo
    target_pages: PageIds
    span: range

    @cached_property
    def plans(self) -> Plans:
        """Of all parts.

        Raises:
            PlanError: there is no plan between the engines.
        """
        return plan_parts(
            self.source.placed,
            self.target.placed,
            num_tokens=self.span.stop,
            first_token=self.span.start,
        )

    def memory(self, part: str) -> tuple[SequenceMemory, SequenceMemory]:
        """The sequence in the pools of a part, at the source and at the target."""
        return (
            _memory(self.source, part, self.source_pages),
            _memory(self.target, part, self.target_pages),
        )

    def bind(self, parts: Iterable[str]) -> BoundTransfer:
        """These parts as one transfer, directly to their places."""
        return join(
            [
                bind(self.plans[part], *sides)
                for part in parts
                for sides in by_field(self.target.part(part).field_bytes, *self.memory(part))
            ]
        )

    def shown(self, transfers: Sequence[Moved], backend: str) -> dict[str, Any]:
        """What has moved for people: bytes and pieces, [source ranks][target ranks].

        Pieces that lie one behind the other on both sides count one by one, though a library may
        move them together. ``parts`` are bytes by cache part. ``num_bytes`` are those that moved,
        in staged pages more than were wanted.
        """
        shape = self.source.num_ranks, self.target.num_ranks
        tables = {part.name: np.zeros(shape, int) for part in self.target.parts}
        pieces = np.zeros(shape, int)
        for moved in transfers:
            for part, plan in moved.plans.items():
                tables[part] += plan.bytes_by_path(self.target.part(part).token_bytes)
            for path in moved.bound.paths:  # the ranks of joined parts lie one behind the other
                pieces[path.source_rank % shape[0], path.target_rank % shape[1]] += path.num_blocks
        return {
            "backend": backend,
            "num_tokens": len(self.span),
            "num_bytes": sum(moved.bound.num_bytes for moved in transfers),
            "seconds": sum(moved.seconds for moved in transfers),
            "bytes": np.sum(list(tables.values()), axis=0).tolist(),
            "pieces": pieces.tolist(),
            "parts": {part: int(table.sum()) for part, table in tables.items()},
        }


def _memory(engine: EngineInfo, part: str, page_ids: PageIds) -> SequenceMemory:
    info = engine.part(part)
    return SequenceMemory(info.placement, info.regions, page_ids)
