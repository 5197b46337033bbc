"""Drafts that are computed where the model is: the seam between a runner and who makes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jax import Array

from dcpjax.cache.pool import Pools
from dcpjax.engine.drafting import Drafter
from dcpjax.engine.step import StepShape


@dataclass(frozen=True)
class DraftInputs:
    """One step as the devices have it; nothing of it was waited for.

    Which drafts were accepted follows from ``token_ids(shape, shape.views(packed), previous)``,
    ``sampled`` and the packed numbers of tokens, with the functions of :mod:`dcpjax.speculation`.

    Attributes:
        packed: what the host said about the step.
        previous: [max_rows · W] what the devices had to say, see ``make_step``.
        hidden: [T, E] of all tokens of the step.
        sampled: [max_outputs] what was chosen at each output, on every device.
        rows: by id, the rows of the requests that sampled.
        seeds, counters: [rows, 2], [rows] of their sampling, by row; zeros elsewhere.
    """

    shape: StepShape
    packed: np.ndarray
    previous: Array
    hidden: Array
    sampled: Array
    rows: Mapping[str, int]
    seeds: np.ndarray
    counters: np.ndarray


class DeviceDrafter(Drafter, Protocol):
    """A drafter that goes on from a step's own results, without the host in between.

    What it proposes for a request of ``rows`` has no token ids: its row of what :meth:`follow`
    returned last has them, behind the last token. The host reads them when the step that verifies
    them has ended.
    """

    def follow(self, step: DraftInputs, pools: Pools) -> tuple[Array, Pools]:
        """Dispatch the drafts behind a step, and return at once.

        Called for every step and once for every shape in warm-up, then with no ``rows``: what is
        to be compiled is compiled there. May take over ``pools``, and returns them.

        Returns:
            the next ``previous``, replicated, of the same shape and type; and the pools.
        """
        ...
