"""Segment attention for decode: few query rows, many sequences.

All rows of one KV head of one sequence (tokens × queries per KV head) are one tile. A sequence's
prior tokens stream through it, gathered row by row from its pages, then its own tokens.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import nki
import nki.language as nl

from neuron.nki.kernels.tiles import (
    attend,
    load,
    load_queries,
    load_step,
    load_visible_from,
    nothing_seen,
    store_result,
)
from neuron.nki.tiling import STEP_KEYS, cut, share


@nki.jit
def decode_kernel(
    queries, pool, rows, current, prior_from, current_from, positions, value_column, scale, lnc
):
    """Partial attention of B sequences with K KV heads each, on one rank.

    Args:
        queries: [B, K, D, R], R ≤ 128.
        pool: [·, W], all rows of the pool, bits of the queries' type; prior token i of a head lies
            in row ``rows[.., i, 0]``.
        rows: [B, K, prior, 1] int32. Every entry is a row of the pool, whether visible or not.
        current: [B, K, S, D + Dv], keys and values of the segment's own tokens.
        prior_from, current_from: [B, 1, prior or S] float32, the first query position that sees
            each token; ``NEVER`` hides it.
        positions: [B, R, 1] float32, of each query row.
        value_column: where values begin in a row of the pool.
        lnc: physical cores that run this together, each with its share of (sequence, head).

    Returns:
        out [B, K, R, Dv], lse [B, K, R, 1], float32.
    """
    batch, heads, key_width, num_rows = queries.shape
    value_width = current.shape[3] - key_width
    out = nl.ndarray((batch, heads, num_rows, value_width), nl.float32, nl.shared_hbm)
    lse = nl.ndarray((batch, heads, num_rows, 1), nl.float32, nl.shared_hbm)
    in_pool = (key_width, value_column, value_width)
    in_current = (key_width, key_width, value_width)
    program = nl.program_id(0) if lnc > 1 else 0

    for group, _ in share(cut(batch * heads, 1), program, lnc):
        row, head = group // heads, group % heads
        tile = load_queries(queries[row, head])
        at = load(positions[row])
        state = nothing_seen(num_rows, value_width)
        for piece in cut(rows.shape[2], STEP_KEYS):
            keys, values = load_step(
                pool, rows[row, head], prior_from[row], piece, in_pool, queries.dtype
            )
            seen = load_visible_from(prior_from[row], piece, num_rows)
            attend(state, tile, at, keys, values, seen, scale)
        for piece in cut(current.shape[2], STEP_KEYS):
            keys, values = load_step(
                current[row, head], None, current_from[row], piece, in_current, queries.dtype
            )
            seen = load_visible_from(current_from[row], piece, num_rows)
            attend(state, tile, at, keys, values, seen, scale)
        store_result(state, out[row, head], lse[row, head])
    return out, lse
