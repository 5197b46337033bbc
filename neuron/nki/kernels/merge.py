"""The merge of partial results by their log-sum-exp: rows over the partitions, 128 to a tile."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import nki
import nki.isa as nisa
import nki.language as nl

from neuron.nki.kernels.tiles import load, log_total, where
from neuron.nki.tiling import HIDDEN_SCORE, LEAST_TOTAL, LOWEST_HIGHEST, PARTITIONS, cut, share


@nki.jit
def merge_kernel(outs, lses, lnc):
    """``out = Σ exp(lse_n − logsumexp lse) · out_n`` of N partial results.

    Args:
        outs: [N, R, Dv].
        lses: [R, N] float32, −inf for an empty partial, whose out may be anything, NaN included.
        lnc: physical cores that run this together, each with its share of the tiles of rows.

    Returns:
        out [R, Dv], lse [R, 1], float32; (0, −inf) where all partials are empty.
    """
    num_partials, num_rows, width = outs.shape
    out = nl.ndarray((num_rows, width), nl.float32, nl.shared_hbm)
    lse = nl.ndarray((num_rows, 1), nl.float32, nl.shared_hbm)
    program = nl.program_id(0) if lnc > 1 else 0

    for start, stop in share(cut(num_rows, PARTITIONS), program, lnc):
        weights, merged = _weigh(load(lses[start:stop, :]))
        total = nl.ndarray((stop - start, width), nl.float32, nl.sbuf)
        nisa.memset(dst=total, value=0.0)
        for index in range(num_partials):
            weight = weights[:, index : index + 1]
            part = where(load(outs[index, start:stop, :]), weight, nl.greater, 0.0)
            nisa.scalar_tensor_tensor(
                dst=total, data=part, op0=nl.multiply, operand0=weight, op1=nl.add, operand1=total
            )
        nisa.dma_copy(dst=out[start:stop, :], src=total)
        nisa.dma_copy(dst=lse[start:stop, :], src=merged)
    return out, lse


def _weigh(lses):
    """Weights [rows, N] that sum to 1 (to 0 in an empty row) and the merged lse [rows, 1]."""
    shape, column = lses.shape, (lses.shape[0], 1)
    is_finite = nl.ndarray(shape, nl.uint8, nl.sbuf)
    nisa.tensor_scalar(dst=is_finite, data=lses, op0=nl.greater, operand0=HIDDEN_SCORE)
    scores = nl.ndarray(shape, nl.float32, nl.sbuf)
    nisa.memset(dst=scores, value=HIDDEN_SCORE)
    nisa.tensor_copy_predicated(dst=scores, src=lses, predicate=is_finite)

    lowest = nl.ndarray(column, nl.float32, nl.sbuf)  # −highest, bounded for an empty row
    nisa.tensor_reduce(dst=lowest, op=nl.maximum, data=scores, axis=1, negate=True)
    nisa.tensor_scalar(dst=lowest, data=lowest, op0=nl.minimum, operand0=-LOWEST_HIGHEST)
    weights = nl.ndarray(shape, nl.float32, nl.sbuf)
    total = nl.ndarray(column, nl.float32, nl.sbuf)
    nisa.activation(
        dst=weights,
        op=nl.exp,
        data=scores,
        bias=lowest,
        reduce_op=nl.add,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    divisor = nl.ndarray(column, nl.float32, nl.sbuf)
    nisa.tensor_scalar(dst=divisor, data=total, op0=nl.maximum, operand0=LEAST_TOTAL)
    factor = nl.ndarray(column, nl.float32, nl.sbuf)
    nisa.reciprocal(dst=factor, data=divisor)
    nisa.tensor_scalar(dst=weights, data=weights, op0=nl.multiply, operand0=factor)
    return weights, log_total(divisor, lowest, total)
