"""One step in words: its segments, and the shapes that are compiled for it. Host only."""

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from dcpjax.engine.request import NO_DRAFTS, Drafts, Request
from dcpjax.errors import ConfigError


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens ``[start, start + num_tokens)`` of one request, computed in one step.

    ``samples``: these are the last tokens known so far, so the step yields the next one.
    ``token_is_pending``: the single token of this decode segment was sampled by the step before
    and is still on the device. ``drafts`` are computed behind the single token of a decode segment,
    and are not among its ``num_tokens``.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    token_is_pending: bool = False
    drafts: Drafts = NO_DRAFTS

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_computed(self) -> int:
        """Tokens that the step computes, those that may be rejected included."""
        return self.num_tokens + self.drafts.count


def verification(request: Request) -> Segment:
    """The decode segment of a running request: its last token, and the drafts that it has now."""
    drafts, request.drafts = request.drafts, NO_DRAFTS
    return dataclasses.replace(next_segment(request, 1), drafts=drafts)


def next_segment(request: Request, at_most: int) -> Segment:
    """Take up to ``at_most`` tokens of a running request; from now on they count as computed."""
    start, num_tokens = request.num_scheduled, min(request.num_uncomputed, at_most)
    is_pending = request.num_pending > 0
    request.num_scheduled += num_tokens
    samples = request.num_uncomputed == 0
    request.num_pending += samples
    return Segment(request, start, num_tokens, samples, is_pending)


@dataclass(frozen=True)
class StepPlan:
    """One step: decode segments of one token and its drafts each, and prompt chunks of at most
    ``prefill_width``.

    ``started`` are the requests that got their slot with this plan, first time or after a
    preemption: whatever the device keeps per slot begins anew for them. A request has at most one
    segment in a plan, and no page written by one segment is read by another.
    """

    decode: tuple[Segment, ...] = ()
    prefill: tuple[Segment, ...] = ()
    prefill_width: int = 0
    started: tuple[Request, ...] = ()

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.decode + self.prefill

    @property
    def sampling(self) -> tuple[Segment, ...]:
        """The segments that yield a token, in the order in which ``commit`` takes their results."""
        return tuple(segment for segment in self.segments if segment.samples)


class Drain(enum.Enum):
    """Instead of a plan: pages must be taken from a request that may have a token in flight."""

    DRAIN = "commit the step in flight, then schedule again"


@dataclass(frozen=True)
class StepShapes:
    """The shapes that are compiled.

    Attributes:
        decode_rows: numbers of decode segments.
        prefill: (rows, width) of the prompt blocks.
        fixed_cost: what a step costs beside its prompt tokens, counted in prompt tokens.
        decode_widths: tokens of a decode segment, drafts included, ascending. Beside prompts all
            have the last one.
        expanded_contexts: how prompts are computed: while their sequences have at most so many
            tokens, from keys and values of each head that are made from latents. 0: from what is
            cached as it is.
        least_expanded_width: narrower prompt blocks are always computed as for 0.
    """

    decode_rows: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]
    fixed_cost: int = 64
    decode_widths: tuple[int, ...] = (1,)
    expanded_contexts: tuple[int, ...] = (0,)
    least_expanded_width: int = 1

    def __post_init__(self) -> None:
        sizes = [*self.decode_rows, *(size for shape in self.prefill for size in shape)]
        sizes += self.decode_widths
        filled = self.decode_rows and self.prefill and self.decode_widths
        if not filled or min(sizes) < 1 or self.fixed_cost < 0:
            raise ConfigError(
                "a step has decode rows, decode widths and prefill (rows, width), each at least 1",
                decode_rows=self.decode_rows,
                decode_widths=self.decode_widths,
                prefill=self.prefill,
                fixed_cost=self.fixed_cost,
            )

    @property
    def max_drafts(self) -> int:
        """Drafts that fit into a decode segment."""
        return max(self.decode_widths) - 1

    def contexts_of(self, width: int) -> tuple[int, ...]:
        """``expanded_contexts`` of a prompt block."""
        return self.expanded_contexts if width >= self.least_expanded_width else (0,)

    @property
    def max_prefill_rows(self) -> int:
        return max(rows for rows, _ in self.prefill)

    def best_prefill(self, remaining: Sequence[int]) -> tuple[int, int]:
        """The (rows, width) that computes most prompt tokens for its cost, padding included.

        Args:
            remaining: uncomputed tokens of the prompts, in the order in which they get rows.
                Without any, the result is (0, 0).
        """
        if not remaining:
            return 0, 0

        def worth(shape: tuple[int, int]) -> tuple[float, int, int]:
            rows, width = shape
            useful = sum(min(tokens, width) for tokens in remaining[:rows])
            return useful / (rows * width + self.fixed_cost), useful, -rows * width

        return max(self.prefill, key=worth)
