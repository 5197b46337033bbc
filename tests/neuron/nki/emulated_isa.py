"""The instructions of the emulation, see ``emulation.py``: float32 inside, cast to the target."""

from typing import Any

import numpy as np

from tests.neuron.nki.emulated_memory import ON_CHIP, PARTITIONS, Tensor, require

STATIONARY_COLUMNS, MOVING_COLUMNS = 128, 512


def _write(dst: Tensor, values: np.ndarray) -> None:
    require(dst.shape == values.shape, "shapes agree", dst.shape, values.shape)
    dst.array[...] = values.astype(dst.dtype)


def _f32(operand: Any) -> Any:
    return operand.array.astype(np.float32) if isinstance(operand, Tensor) else np.float32(operand)


def _column(operand: Any, data: Tensor) -> Any:
    """A scalar, or a float32 tile [rows, 1]."""
    if isinstance(operand, Tensor):
        require(operand.shape == (data.shape[0], 1), "an operand is a column", operand.shape)
        require(operand.dtype == np.float32, "an operand is float32", operand.dtype)
        require(operand.buffer in ON_CHIP, "an operand is on chip", operand.buffer)
    return _f32(operand)


def _on_chip(*tensors: Tensor) -> None:
    for tensor in tensors:
        require(tensor.buffer in ON_CHIP, "engines read and write SBUF and PSUM", tensor.buffer)


def dma_copy(dst, src, priority=None, oob_mode=None, dge_mode=None, engine=None, name=None) -> None:
    require("psum" not in (dst.buffer, src.buffer), "DMA moves between HBM and SBUF")
    _write(dst, src.array)


def memset(dst, value, engine=None, name=None) -> None:
    dst.array[...] = value


def tensor_copy(dst, src, engine=None, name=None) -> None:
    _on_chip(dst, src)
    _write(dst, src.array)


def tensor_copy_predicated(dst, src, predicate, reverse_pred=False, name=None) -> None:
    _on_chip(dst, src, predicate)
    require(predicate.dtype == np.uint8, "a predicate is an unsigned integer", predicate.dtype)
    require(src.dtype == dst.dtype, "source and target are of one type", src.dtype, dst.dtype)
    require(src.shape == dst.shape == predicate.shape, "shapes agree", src.shape, predicate.shape)
    dst.array[...] = np.where(predicate.array != 0, src.array, dst.array)


def nc_matmul(
    dst,
    stationary,
    moving,
    is_stationary_onezero=False,
    is_moving_onezero=False,
    is_transpose=False,
    accumulate=None,
    tile_position=(),
    tile_size=(),
    perf_mode=None,
    name=None,
) -> None:
    require(dst.buffer == "psum" and dst.dtype == np.float32, "products go to PSUM in float32")
    require(stationary.buffer == moving.buffer == "sbuf", "operands are in SBUF")
    require(stationary.shape[1] <= STATIONARY_COLUMNS, "stationary columns", stationary.shape)
    require(moving.shape[1] <= MOVING_COLUMNS, "moving columns", moving.shape)
    both_f32 = (stationary.dtype == np.float32) == (moving.dtype == np.float32)
    require(both_f32, "float32 meets float32", stationary.dtype, moving.dtype)
    require(accumulate is not None, "our kernels say whether they accumulate")
    product = _f32(stationary).T @ _f32(moving)
    _write(dst, dst.array + product if accumulate else product)


def nc_transpose(dst, data, engine=None, name=None) -> None:
    require(engine == "tensor", "the emulation knows the tensor engine's transpose", engine)
    require(data.buffer == "sbuf" and dst.buffer == "psum", "from SBUF to PSUM")
    require(data.dtype == dst.dtype, "one type", data.dtype, dst.dtype)
    require(max(data.shape) <= PARTITIONS, "at most 128 by 128", data.shape)
    _write(dst, data.array.T)


def tensor_tensor(dst, data1, data2, op, engine=None, name=None) -> None:
    _on_chip(dst, data1, data2)
    require(not data1.buffer == data2.buffer == "psum", "not both operands in PSUM")
    require(data1.shape == data2.shape, "shapes agree", data1.shape, data2.shape)
    _write(dst, op(_f32(data1), _f32(data2)))


def tensor_scalar(
    dst,
    data,
    op0,
    operand0,
    reverse0=False,
    op1=None,
    operand1=None,
    reverse1=False,
    engine=None,
    name=None,
) -> None:
    _on_chip(dst, data)
    result = op0(_f32(data), _column(operand0, data))
    if op1 is not None:
        result = op1(_f32(Tensor(result, "sbuf")), _column(operand1, data))
    _write(dst, np.asarray(result))


def scalar_tensor_tensor(
    dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None
) -> None:
    _on_chip(dst, data, operand1)
    require(not data.buffer == operand1.buffer == "psum", "not both operands in PSUM")
    require(data.shape == operand1.shape, "shapes agree", data.shape, operand1.shape)
    _write(dst, op1(op0(_f32(data), _column(operand0, data)), _f32(operand1)))


def tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None) -> None:
    _on_chip(dst, data)
    require(axis == 1 and len(data.shape) == 2, "along the free axis", axis, data.shape)
    result = op.reduce(_f32(data), axis=1, keepdims=True)
    _write(dst, -result if negate else result)


def activation(
    dst,
    op,
    data,
    bias=None,
    scale=1.0,
    reduce_op=None,
    reduce_res=None,
    reduce_cmd="idle",
    name=None,
) -> None:
    _on_chip(dst, data)
    argument = _f32(data) * _column(scale, data)
    if bias is not None:
        argument = argument + _column(bias, data)
    if op is np.log:
        inside = bool(np.all((argument >= 2.0**-64) & (argument <= 2.0**64)))
        require(inside or bool(np.isnan(argument).any()), "log is defined on [2^-64, 2^64]")
    result = op(argument)
    _write(dst, result)
    if reduce_res is not None:
        require(reduce_op is np.add and reduce_cmd == "reset_reduce", "a sum, begun anew")
        _write(reduce_res, np.sum(result, axis=1, keepdims=True, dtype=np.float32))


def reciprocal(dst, data, name=None) -> None:
    _on_chip(dst, data)
    _write(dst, np.float32(1.0) / _f32(data))


ISA = {
    call.__name__: call
    for call in (
        activation,
        dma_copy,
        memset,
        nc_matmul,
        nc_transpose,
        reciprocal,
        scalar_tensor_tensor,
        tensor_copy,
        tensor_copy_predicated,
        tensor_reduce,
        tensor_scalar,
        tensor_tensor,
    )
}
