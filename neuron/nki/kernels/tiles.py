"""What the attention kernels have in common; the NKI compiler inlines it where it is called.

Keys come a step at a time. A step's keys lie turned in SBUF, head width over the partitions; its
values lie as they are stored, tokens over the partitions, 128 to a block. A tile of query rows
has its rows over the partitions, so a row's softmax runs along the free axis.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import nki.isa as nisa
import nki.language as nl
import numpy as np

from neuron.nki.tiling import (
    HIDDEN_SCORE,
    LEAST_TOTAL,
    LOWEST_HIGHEST,
    NEVER,
    PARTITIONS,
    cut,
)


def load_queries(queries):
    """Chunks [D ≤ 128, rows] in SBUF of HBM [D, rows], D over the partitions."""
    width, num_rows = queries.shape
    chunks = []
    for low, high in cut(width, PARTITIONS):
        chunk = nl.ndarray((high - low, num_rows), queries.dtype, nl.sbuf)
        nisa.dma_copy(dst=chunk, src=queries[low:high, :])
        chunks.append(chunk)
    return chunks


def load_step(stored, rows, visible_from, piece, columns, dtype):
    """One step's keys, turned, in chunks [D ≤ 128, keys], and its values in blocks [128, Dv].

    stored is HBM [·, W]; key i lies in row ``rows[i]``, or in row i where rows is None. Its bits
    are of type ``dtype``. columns are (width of keys, first column of values, their width).
    """
    start, stop = piece
    key_width, value_column, value_width = columns
    keys = []
    for low, high in cut(key_width, PARTITIONS):
        keys.append(nl.ndarray((high - low, stop - start), dtype, nl.sbuf))
    values = []
    for first, last in cut(stop - start, PARTITIONS):
        read = _read(stored, rows, start + first, start + last).view(dtype)
        clean = _without_hidden(read, visible_from[:, start + first : start + last])
        for index in range(len(keys)):
            low = index * PARTITIONS
            _turn(keys[index][:, first:last], clean[:, low : low + keys[index].shape[0]])
        values.append(clean[:, value_column : value_column + value_width])
    return keys, values


def load_visible_from(visible_from, piece, num_rows):
    """SBUF [rows, keys] of HBM [1, ·]: for each key the first query position that sees it."""
    start, stop = piece
    loaded = nl.ndarray((num_rows, stop - start), nl.float32, nl.sbuf)
    nisa.dma_copy(dst=loaded, src=visible_from[:, start:stop].broadcast(0, num_rows))
    return loaded


def load(source):
    """SBUF [rows, n] of HBM [rows, n], rows ≤ 128."""
    loaded = nl.ndarray(source.shape, source.dtype, nl.sbuf)
    nisa.dma_copy(dst=loaded, src=source)
    return loaded


def nothing_seen(num_rows, value_width):
    """(weighted values, negated highest score, sum of exponentials) before the first key."""
    values = nl.ndarray((num_rows, value_width), nl.float32, nl.sbuf)
    lowest = nl.ndarray((num_rows, 1), nl.float32, nl.sbuf)
    total = nl.ndarray((num_rows, 1), nl.float32, nl.sbuf)
    nisa.memset(dst=values, value=0.0)
    nisa.memset(dst=lowest, value=-LOWEST_HIGHEST)
    nisa.memset(dst=total, value=0.0)
    return values, lowest, total


def attend(state, queries, positions, keys, values, visible_from, scale):
    """One step of the online softmax of a tile of query rows; changes ``state`` in place.

    queries and keys are lists of chunks [D ≤ 128, ·]; positions is [rows, 1].
    """
    sums, lowest, total = state
    num_rows, num_keys = queries[0].shape[1], keys[0].shape[1]
    scores = _scores(queries, positions, keys, visible_from, scale)

    step_lowest = nl.ndarray((num_rows, 1), nl.float32, nl.sbuf)
    nisa.tensor_reduce(dst=step_lowest, op=nl.maximum, data=scores, axis=1, negate=True)
    nisa.tensor_tensor(dst=step_lowest, data1=step_lowest, data2=lowest, op=nl.minimum)
    keep = nl.ndarray((num_rows, 1), nl.float32, nl.sbuf)  # exp(highest before − highest now)
    nisa.activation(dst=keep, op=nl.exp, data=lowest, bias=step_lowest, scale=-1.0)
    nisa.tensor_copy(dst=lowest, src=step_lowest)

    weights = nl.ndarray((num_rows, num_keys), values[0].dtype, nl.sbuf)
    step_total = nl.ndarray((num_rows, 1), nl.float32, nl.sbuf)
    nisa.activation(
        dst=weights,
        op=nl.exp,
        data=scores,
        bias=lowest,
        reduce_op=nl.add,
        reduce_res=step_total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    _add_scaled(total, keep, step_total)
    _add_scaled(sums, keep, _weighted(weights, values))


def store_result(state, out, lse):
    """Writes out [rows, Dv] and lse [rows, 1] to HBM; (0, −inf) for a row that saw nothing."""
    sums, lowest, total = state
    num_rows = total.shape[0]
    divisor = nl.ndarray((num_rows, 1), nl.float32, nl.sbuf)
    nisa.tensor_scalar(dst=divisor, data=total, op0=nl.maximum, operand0=LEAST_TOTAL)
    factor = nl.ndarray((num_rows, 1), nl.float32, nl.sbuf)
    nisa.reciprocal(dst=factor, data=divisor)
    nisa.tensor_scalar(dst=sums, data=sums, op0=nl.multiply, operand0=factor)
    nisa.dma_copy(dst=out, src=sums)
    nisa.dma_copy(dst=lse, src=log_total(divisor, lowest, total))


def log_total(divisor, lowest, total):
    """SBUF [rows, 1]: log(divisor) − lowest where total is above 0, −inf elsewhere."""
    shape = total.shape
    finite = nl.ndarray(shape, nl.float32, nl.sbuf)
    nisa.activation(dst=finite, op=nl.log, data=divisor)
    nisa.tensor_tensor(dst=finite, data1=finite, data2=lowest, op=nl.subtract)
    is_seen = nl.ndarray(shape, nl.uint8, nl.sbuf)
    nisa.tensor_scalar(dst=is_seen, data=total, op0=nl.greater, operand0=0.0)
    result = nl.ndarray(shape, nl.float32, nl.sbuf)
    nisa.memset(dst=result, value=-np.inf)
    nisa.tensor_copy_predicated(dst=result, src=finite, predicate=is_seen)
    return result


def where(data, condition, op, operand):
    """SBUF copy of data [rows, n] in the rows where ``condition op operand``, 0 in the others.

    condition is [rows, 1]. A copy and not a product: 0 · NaN is NaN.
    """
    zeros = nl.ndarray(data.shape, nl.float32, nl.sbuf)
    nisa.memset(dst=zeros, value=0.0)
    is_kept = nl.ndarray(data.shape, nl.uint8, nl.sbuf)
    nisa.tensor_scalar(
        dst=is_kept, data=zeros, op0=nl.add, operand0=condition, op1=op, operand1=operand
    )
    kept = nl.ndarray(data.shape, data.dtype, nl.sbuf)
    nisa.memset(dst=kept, value=0.0)
    nisa.tensor_copy_predicated(dst=kept, src=data, predicate=is_kept)
    return kept


def _read(stored, rows, first, last):
    """SBUF [tokens, width] of stored rows, one per partition."""
    if rows is None:
        return load(stored[first:last, :])
    return load(stored.vector_select(0, load(rows[first:last, :])))


def _without_hidden(read, visible_from):
    """The rows read, those that no query sees as 0: they may hold anything, NaN included."""
    return where(read, load(visible_from.permute((1, 0))), nl.less, NEVER)


def _turn(dst, data):
    """dst [n, m] = data [m, n] transposed, through PSUM."""
    turned = nl.ndarray((data.shape[1], data.shape[0]), data.dtype, nl.psum)
    nisa.nc_transpose(dst=turned, data=data, engine=nisa.engine.tensor)
    nisa.tensor_copy(dst=dst, src=turned)


def _scores(queries, positions, keys, visible_from, scale):
    """SBUF [rows, keys]: scaled products, HIDDEN_SCORE added where a query does not see a key."""
    num_rows, num_keys = queries[0].shape[1], keys[0].shape[1]
    products = nl.ndarray((num_rows, num_keys), nl.float32, nl.psum)
    for index in range(len(keys)):
        nisa.nc_matmul(
            dst=products,
            stationary=queries[index],
            moving=keys[index],
            accumulate=index > 0,
        )
    penalties = nl.ndarray((num_rows, num_keys), nl.float32, nl.sbuf)
    nisa.tensor_scalar(
        dst=penalties,
        data=visible_from[0:num_rows, :],
        op0=nl.greater,
        operand0=positions,
        op1=nl.multiply,
        operand1=HIDDEN_SCORE,
    )
    scores = nl.ndarray((num_rows, num_keys), nl.float32, nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=scores, data=products, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=penalties
    )
    return scores


def _weighted(weights, values):
    """PSUM [rows, Dv]: weights [rows, keys] times the blocks of values."""
    num_rows = weights.shape[0]
    result = nl.ndarray((num_rows, values[0].shape[1]), nl.float32, nl.psum)
    blocks = cut(weights.shape[1], PARTITIONS)
    for index in range(len(blocks)):
        start, stop = blocks[index]
        turned = nl.ndarray((stop - start, num_rows), weights.dtype, nl.sbuf)
        _turn(turned, weights[:, start:stop])
        nisa.nc_matmul(dst=result, stationary=turned, moving=values[index], accumulate=index > 0)
    return result


def _add_scaled(accumulated, factor, addend):
    """accumulated = accumulated · factor + addend; factor is [rows, 1]."""
    nisa.scalar_tensor_tensor(
        dst=accumulated,
        data=accumulated,
        op0=nl.multiply,
        operand0=factor,
        op1=nl.add,
        operand1=addend,
    )
