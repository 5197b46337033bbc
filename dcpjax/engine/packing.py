"""Plans to the packed arrays of compiled shapes. Host only but for the shapes' module."""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from dcpjax.engine.page_tables import PageTables
from dcpjax.engine.plan import Segment, StepPlan, StepShapes
from dcpjax.engine.sampler import Position
from dcpjax.engine.step import FROM_HOST, SAMPLED, StepShape


def all_shapes(
    shapes: StepShapes, table_widths: Sequence[int], *, checks_prefixes: bool = False
) -> list[StepShape]:
    """Decode alone in every size; prompts beside the most decode rows, which then cost little."""
    most, widest = max(shapes.decode_rows), max(shapes.decode_widths)
    blocks = [(rows, 0, 0, n, 0) for n in shapes.decode_widths for rows in shapes.decode_rows]
    blocks += [
        (most, rows, width, widest, context)
        for rows, width in shapes.prefill
        for context in shapes.contexts_of(width)
    ]
    return [
        StepShape(rows, prefill_rows, prefill_width, table, decode_width, checks_prefixes, context)
        for table in table_widths
        for rows, prefill_rows, prefill_width, decode_width, context in blocks
    ]


def smallest_fitting(shapes: Sequence[StepShape], plan: StepPlan, page_tokens: int) -> StepShape:
    """The least of the shapes that a plan fits into.

    Args:
        page_tokens: tokens that an entry of the page table stands for.
    """
    stop = max((segment.start + segment.num_computed for segment in plan.segments), default=0)
    width = max((segment.num_computed for segment in plan.decode), default=1)
    prompts = max((segment.stop for segment in plan.prefill), default=0)
    fitting = (
        shape
        for shape in shapes
        if shape.table_width * page_tokens >= stop
        and shape.decode_rows >= len(plan.decode)
        and shape.decode_width >= width
        and shape.prefill_rows >= len(plan.prefill)
        and (not plan.prefill or shape.prefill_width >= plan.prefill_width)
        and (not shape.is_expanded or shape.expanded_context >= prompts)
    )
    return min(
        fitting,
        key=lambda shape: (shape.num_tokens, shape.rows, shape.table_width, not shape.is_expanded),
    )


def pack(
    plan: StepPlan,
    shape: StepShape,
    tables: PageTables,
    scratch_page: int,
    previous_rows: Mapping[str, int],
) -> np.ndarray:
    """The plan as one int32 array; unused rows have no tokens and only scratch pages.

    Args:
        previous_rows: by request id, where the devices have the tokens that the host has not.
    """
    packed = np.zeros(shape.packed_size, np.int32)
    views = shape.views(packed)
    views["page_tables"][:] = scratch_page
    views["sources"][:] = FROM_HOST
    views["following"][:] = SAMPLED
    for row, segment in rows_of(plan, shape):
        views["page_tables"][row] = tables.of(segment.request)[: shape.table_width]
        views["prior_lengths"][row] = segment.start
        views["num_tokens"][row] = segment.num_computed
        if segment.token_is_pending or segment.drafts.token_ids is None:
            views["sources"][row] = previous_rows[segment.request.request_id]
        else:
            known = segment.request.tokens(segment.start, segment.stop)
            start = shape.first_token(row)
            views["token_ids"][start : start + segment.num_computed] = [
                *known,
                *segment.drafts.token_ids,
            ]
        if row >= shape.decode_rows and not segment.samples:
            (behind,) = segment.request.tokens(segment.stop, segment.stop + 1)
            views["following"][row - shape.decode_rows] = behind
        if row >= shape.decode_rows and shape.checks_prefixes:
            views["prefix_digests"][row - shape.decode_rows] = prefix_digest(segment)
    return packed


def prefix_digest(segment: Segment) -> int:
    """Of the tokens before a segment: 31 bits, each token looked at once."""
    request, start = segment.request, segment.start
    length, digest = request.prefix_digest
    if length > start:  # it was preempted
        length, digest = 0, 0
    new = np.asarray(request.tokens(length, start), np.int32)
    digest = zlib.crc32(new.tobytes(), digest)
    request.prefix_digest = (start, digest)
    return digest & 0x7FFFFFFF


def rows_of(plan: StepPlan, shape: StepShape) -> list[tuple[int, Segment]]:
    """The plan's segments with their rows in the step."""
    decode = list(enumerate(plan.decode))
    return decode + list(enumerate(plan.prefill, start=shape.decode_rows))


def positions_of(plan: StepPlan, shape: StepShape) -> dict[int, Position]:
    """By output of the step: what is chosen there, for the segments that sample, in order."""
    return {
        shape.first_output(row) + offset: Position(segment.request, offset)
        for row, segment in rows_of(plan, shape)
        if segment.samples
        for offset in range(1 + segment.drafts.count)
    }
