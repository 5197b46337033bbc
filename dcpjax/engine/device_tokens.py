"""The tokens that a step finds on the devices, because the host did not know them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from dcpjax.cache.pool import Pools
from dcpjax.engine.device_drafting import DeviceDrafter, DraftInputs
from dcpjax.engine.request import Request
from dcpjax.engine.step import StepResult, StepShape
from dcpjax.engine.verification import SeedWords
from dcpjax.mesh import place as place_values
from dcpjax.mesh import replicate


class DraftSeeds(NamedTuple):
    """Seeds uint32 [rows, 2] and counters int32 [rows] of drafts' sampling; zeros elsewhere."""

    seeds: np.ndarray
    counters: np.ndarray

    @classmethod
    def of(
        cls, shape: StepShape, requests: Mapping[int, Request], seed_words: SeedWords
    ) -> "DraftSeeds":
        """Those of the requests that sample, by row."""
        seeds = cls(np.zeros((shape.rows, 2), np.uint32), np.zeros(shape.rows, np.int32))
        for row, request in requests.items():
            seeds.seeds[row] = seed_words(request)
            seeds.counters[row] = request.next_output_index
        return seeds


class DeviceTokens:
    """What the step before has sampled; with a drafter on the devices, its drafts behind that.

    ``array`` [max_rows · width] is what steps take as ``previous``, ``rows`` the row of each
    request in it. Nothing of either changes in place: a step that was dispatched keeps its own.
    """

    def __init__(
        self, max_rows: int, width: int, place: NamedSharding, drafter: DeviceDrafter | None
    ) -> None:
        self._max_rows, self._width, self._place = max_rows, width, place
        self._drafter = drafter
        self.array: Array = place_values(np.zeros(max_rows * width, np.int32), place)
        self.rows: dict[str, int] = {}

    def read_drafts(self) -> Callable[[], dict[str, np.ndarray]]:
        """What gives, once a step has ended, the drafts of each request that it took from here."""
        if self._drafter is None:
            return dict
        array, rows = self.array, self.rows

        def read() -> dict[str, np.ndarray]:
            by_row = np.asarray(array).reshape(self._max_rows, self._width)
            return {request_id: by_row[row, 1:] for request_id, row in rows.items()}

        return read

    def keep(
        self,
        shape: StepShape,
        packed: np.ndarray,
        result: StepResult,
        sampled: Array,
        rows: Mapping[str, int],
        seeds: DraftSeeds,
    ) -> Pools:
        """Let the next step find what this one has sampled, and what may follow.

        Without a drafter on the devices and with several tokens per segment, the host knows all
        tokens when it plans: nothing is kept.

        Args:
            sampled: what was chosen at each output.
            rows: of the requests that sampled, by id; nobody asks a follower for them.

        Returns:
            the pools of ``result``, which a drafter may have written to.
        """
        pools = result.pools
        if self._drafter is None and self._width > 1:
            return pools
        if sampled is not result.tokens:
            sampled = replicate(sampled, self._place)
        if self._drafter is None:
            self.array = sampled
        else:
            assert result.hidden is not None, "a drafter goes on from hidden states"
            step = DraftInputs(shape, packed, self.array, result.hidden, sampled, rows, *seeds)
            self.array, pools = self._drafter.follow(step, pools)
        self.rows = dict(rows)
        return pools
