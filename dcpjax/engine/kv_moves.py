"""The tokens of one sequence on their way from one engine's pages to another's, in all parts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dcpjax.transfer.bind import BoundTransfer, bind
from dcpjax.transfer.engine_info import EngineInfo
from dcpjax.transfer.memory import SequenceMemory
from dcpjax.transfer.parts import join, plan_parts
from dcpjax.transfer.plan import TransferPlan

PageIds = Sequence[int] | np.ndarray
Plans = Mapping[str, TransferPlan]
"""By cache part."""


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
        return join([bind(self.plans[part], *self.memory(part)) for part in parts])

    def shown(
        self, plans: Plans, bound: BoundTransfer, backend: str, seconds: float
    ) -> dict[str, Any]:
        """What has moved for people: bytes and pieces, [source ranks][target ranks].

        Pieces that lie one behind the other on both sides count one by one, though a library may
        move them together. ``parts`` are bytes by cache part.
        """
        bytes_of = {
            part: plan.bytes_by_path(self.target.part(part).token_bytes)
            for part, plan in plans.items()
        }
        shape = self.source.num_ranks, self.target.num_ranks
        pieces = np.zeros(shape, int)
        for path in bound.paths:
            pieces[path.source_rank % shape[0], path.target_rank % shape[1]] += path.num_blocks
        return {
            "backend": backend,
            "num_tokens": len(self.span),
            "num_bytes": bound.num_bytes,
            "seconds": seconds,
            "bytes": sum(bytes_of.values(), np.zeros(shape, int)).tolist(),
            "pieces": pieces.tolist(),
            "parts": {part: int(table.sum()) for part, table in bytes_of.items()},
        }


def _memory(engine: EngineInfo, part: str, page_ids: PageIds) -> SequenceMemory:
    info = engine.part(part)
    return SequenceMemory(info.placement, info.regions, page_ids)
