"""Which rank sends what to which: the plan of a KV transfer, without addresses, page ids or jax.

A plan is a path per pair of ranks that have something in common: layers × heads × tokens, the
tokens as strided runs, so that its size depends on the two placements and not on the length of the
sequence. Every (layer, head, token) that a target rank wants is on exactly one path, or there is no
plan.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dcpjax.errors import PlanError
from dcpjax.layout import KVPlacement
from dcpjax.transfer.cover import Route, routes
from dcpjax.transfer.runs import StridedRuns, TokenSplit, strided_runs

MAX_TOKENS = 2**31
"""Sequences are shorter: their tokens are counted in int32 where they land."""


@dataclass(frozen=True, eq=False)
class TransferPath:
    """What one source rank sends to one target rank, at least one token of one head and layer.

    Layers ``[layer_start, layer_stop)`` × heads ``[head_start, head_stop)`` × the tokens of
    ``runs``. Layers and heads are those of the cache, not counted from a rank's first.
    """

    source_rank: int
    target_rank: int
    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int
    runs: StridedRuns

    @property
    def num_layers(self) -> int:
        return self.layer_stop - self.layer_start

    @property
    def num_heads(self) -> int:
        return self.head_stop - self.head_start

    @property
    def num_items(self) -> int:
        """Tokens × heads × layers."""
        return self.num_layers * self.num_heads * self.runs.num_tokens


@dataclass(frozen=True)
class TransferPiece:
    """Consecutive tokens ``[token_start, token_stop)`` of some heads of one layer, on one path."""

    source_rank: int
    target_rank: int
    layer: int
    head_start: int
    head_stop: int
    token_start: int
    token_stop: int


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """The paths of the tokens ``[first_token, num_tokens)`` of one sequence.

    Attributes:
        paths: by source rank, then target rank, at most one for each pair.
    """

    source: KVPlacement
    target: KVPlacement
    first_token: int
    num_tokens: int
    paths: tuple[TransferPath, ...]

    @property
    def num_runs(self) -> int:
        """Strided runs of all paths: the size of the plan."""
        return sum(len(path.runs.length) for path in self.paths)

    def of_layers(self, start: int, stop: int) -> "TransferPlan":
        """The part of the plan in the layers ``[start, stop)``, to send them before the others.

        Raises:
            PlanError: no range of the cache's layers.
        """
        if not 0 <= start <= stop <= self.source.layers:
            raise PlanError(
                "a layer range has 0 <= start <= stop <= layers",
                start=start,
                stop=stop,
                layers=self.source.layers,
            )
        clipped = (
            replace(
                path,
                layer_start=max(start, path.layer_start),
                layer_stop=min(stop, path.layer_stop),
            )
            for path in self.paths
        )
        return replace(self, paths=tuple(path for path in clipped if path.num_layers > 0))

    def bytes_by_path(self, item_bytes: int) -> npt.NDArray[np.int64]:
        """Bytes from each source rank to each target rank, [source ranks, target ranks].

        Args:
            item_bytes: bytes of one token of one head of one layer.
        """
        table = np.zeros((self.source.num_ranks, self.target.num_ranks), np.int64)
        for path in self.paths:
            table[path.source_rank, path.target_rank] = path.num_items * item_bytes
        return table

    def pieces(self) -> Iterator[TransferPiece]:
        """All paths, layer by layer, tokens in intervals as long as possible. Slow: for checks."""
        for path in self.paths:
            intervals = _token_intervals(path.runs)
            for layer in range(path.layer_start, path.layer_stop):
                for start, stop in intervals:
                    yield TransferPiece(
                        path.source_rank,
                        path.target_rank,
                        layer,
                        path.head_start,
                        path.head_stop,
                        start,
                        stop,
                    )


def plan_transfer(
    source: KVPlacement, target: KVPlacement, *, num_tokens: int, first_token: int = 0
) -> TransferPlan:
    """Plan the tokens ``[first_token, num_tokens)`` of a sequence of ``num_tokens`` tokens.

    Raises:
        PlanError: there is no exact plan between the placements (see
            :func:`dcpjax.transfer.cover.routes`), or the token range is none.
    """
    try:
        first_token, num_tokens = operator.index(first_token), operator.index(num_tokens)
    except TypeError as error:
        raise PlanError(
            "tokens are counted", first_token=first_token, num_tokens=num_tokens
        ) from error
    if not 0 <= first_token <= num_tokens < MAX_TOKENS:
        raise PlanError(
            f"a token range has 0 <= first_token <= num_tokens < {MAX_TOKENS}",
            first_token=first_token,
            num_tokens=num_tokens,
        )
    # Many paths carry the same tokens, of other layers or heads: they share one object.
    shared: dict[tuple[TokenSplit, TokenSplit, int, int], StridedRuns] = {}
    paths: list[TransferPath] = []
    for route in routes(source, target):
        key = (route.source, route.target, *route.tokens(first_token, num_tokens))
        runs = shared.get(key)
        if runs is None:
            runs = shared[key] = strided_runs(*key)
        if runs.num_tokens:
            paths.append(_path(route, runs))
    return TransferPlan(source, target, first_token, num_tokens, tuple(paths))


def _path(route: Route, runs: StridedRuns) -> TransferPath:
    return TransferPath(
        route.source_rank,
        route.target_rank,
        route.layer_start,
        route.layer_stop,
        route.head_start,
        route.head_stop,
        runs,
    )


def _token_intervals(runs: StridedRuns) -> list[tuple[int, int]]:
    """The tokens of the runs as intervals of positions, ascending."""
    positions = np.sort(runs.source.position(runs.source_indices()))
    breaks = np.flatnonzero(np.diff(positions) != 1)
    starts = positions[np.concatenate([[0], breaks + 1])]
    stops = positions[np.concatenate([breaks, [-1]])] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))
