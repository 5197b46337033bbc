"""Where query and KV heads go on the ranks of an engine, zeros and copies included."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dcpjax.errors import LayoutError, MeshError
from dcpjax.layout.ranks import head_group, heads_per_rank


@dataclass(frozen=True)
class HeadLayout:
    """Where query and KV heads go on a mesh of ``groups`` × ``dcp`` ranks.

    A group holds whole KV heads, or with more groups than heads a copy of one (see
    :func:`dcpjax.layout.head_group`); its query heads are split over its DCP ranks. Where that
    does not come out even, each KV head gets zero query heads at its end, which is exact: their
    output meets zero rows of the output projection.

    Raises:
        MeshError: neither of KV heads and groups divides the other, a count below 1, or query heads
            that are no multiple of the KV heads.
    """

    num_heads: int
    num_kv_heads: int
    groups: int
    dcp: int

    def __post_init__(self) -> None:
        try:
            heads_per_rank(self.groups * self.dcp, self.dcp, self.num_kv_heads)
        except LayoutError as error:  # here it is a setting that is wrong
            raise MeshError(error.rule, **error.values) from error
        if self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise MeshError(
                "the number of query heads is a multiple of the number of KV heads",
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
            )

    @property
    def copies(self) -> int:
        """Groups that hold the same KV head."""
        return max(1, self.groups // self.num_kv_heads)

    @property
    def group_kv_heads(self) -> int:
        return max(1, self.num_kv_heads // self.groups)

    @cached_property
    def queries_per_kv_head(self) -> int:
        """Query heads per KV head held by a group, zeros included."""
        share = math.ceil(self.num_heads // self.num_kv_heads / self.copies)
        while share * self.group_kv_heads % self.dcp:
            share += 1
        return share

    @property
    def group_heads(self) -> int:
        """Query heads of a group, zeros included."""
        return self.group_kv_heads * self.queries_per_kv_head

    @cached_property
    def kv_head_source(self) -> npt.NDArray[np.int64]:
        """For each placed KV head [groups · group_kv_heads]: the model's."""
        ranks = self.groups * self.dcp
        groups = [head_group(ranks, self.dcp, self.num_kv_heads, g) for g in range(self.groups)]
        heads: list[npt.NDArray[np.int64]] = [np.arange(start, stop) for start, stop in groups]
        return np.concatenate(heads)

    @cached_property
    def q_head_source(self) -> npt.NDArray[np.int64]:
        """For each placed query head [groups · group_heads]: the model's, −1 for zeros."""
        real = self.num_heads // self.num_kv_heads
        place = np.arange(self.copies * self.queries_per_kv_head)
        of_kv_head = np.where(place < real, place, -1)
        rows: list[npt.NDArray[np.int64]] = []
        for index, kv_head in enumerate(self.kv_head_source):
            copy = index % self.copies if self.copies > 1 else 0
            start = copy * self.queries_per_kv_head
            share = of_kv_head[start : start + self.queries_per_kv_head]
            rows.append(np.where(share >= 0, kv_head * real + share, -1))
        return np.concatenate(rows)
