"""Segment attention for a prompt chunk: one sequence, many query rows.

Keys are the outer loop, tiles of query rows the inner one: what is dear, gathering, cleaning and
turning keys, is done once per KV head, and the running softmax of every tile stays in SBUF.
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
from neuron.nki.tiling import PARTITIONS, STEP_KEYS, cut, share


@nki.jit
def context_kernel(
    queries, pool, rows, current, prior_from, current_from, positions, value_column, scale, lnc
):
    """Partial attention of one sequence's chunk with K KV heads, on one rank.

    Args:
        queries: [K, D, R], any R whose state fits (``tiling.fits``).
        pool: [·, W], all rows of the pool, bits of the queries' type; prior token i of a head lies
            in row ``rows[.., i, 0]``.
        rows: [K, prior, 1] int32. Every entry is a row of the pool, whether visible or not.
        current: [K, S, D + Dv], keys and values of the chunk's tokens.
        prior_from, current_from: [1, prior or S] float32, the first query position that sees each
            token; ``NEVER`` hides it.
        positions: [R, 1] float32, of each query row.
        value_column: where values begin in a row of the pool.
        lnc: physical cores that run this together, each with its share of the query tiles.

    Returns:
        out [K, R, Dv], lse [K, R, 1], float32.
    """
    heads, key_width, num_rows = queries.shape
    value_width = current.shape[2] - key_width
    out = nl.ndarray((heads, num_rows, value_width), nl.float32, nl.shared_hbm)
    lse = nl.ndarray((heads, num_rows, 1), nl.float32, nl.shared_hbm)
    in_pool = (key_width, value_column, value_width)
    in_current = (key_width, key_width, value_width)
    program = nl.program_id(0) if lnc > 1 else 0
    tiles = share(cut(num_rows, PARTITIONS), program, lnc)

    for head in range(heads):
        chunks = load_queries(queries[head])
        kept = []
        for start, stop in tiles:
            turned = []
            for chunk in chunks:
                turned.append(chunk[:, start:stop])
            state = nothing_seen(stop - start, value_width)
            kept.append((state, turned, load(positions[start:stop, :])))

        for piece in cut(rows.shape[1], STEP_KEYS):
            keys, values = load_step(pool, rows[head], prior_from, piece, in_pool, queries.dtype)
            seen = load_visible_from(prior_from, piece, min(num_rows, PARTITIONS))
            for state, turned, at in kept:
                attend(state, turned, at, keys, values, seen, scale)
        for piece in cut(current.shape[1], STEP_KEYS):
            keys, values = load_step(
                current[head], None, current_from, piece, in_current, queries.dtype
            )
            seen = load_visible_from(current_from, piece, min(num_rows, PARTITIONS))
            for state, turned, at in kept:
                attend(state, turned, at, keys, values, seen, scale)

        for index in range(len(tiles)):
            start, stop = tiles[index]
            store_result(kept[index][0], out[head, start:stop, :], lse[head, start:stop, :])
    return out, lse
