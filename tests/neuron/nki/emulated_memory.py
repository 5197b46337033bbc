"""Tensors, memories and cores of the emulation, see ``emulation.py``."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np

PARTITIONS, BANK_BYTES = 128, 2048
UNINITIALISED_INT = {"uint8": 4, "int32": 2**31 - 1}
HBM, ON_CHIP = ("hbm", "shared_hbm"), ("sbuf", "psum")


class NkiViolation(AssertionError):
    """A call breaks a documented limit."""


def require(holds: bool, rule: str, *values: object) -> None:
    if not holds:
        raise NkiViolation(f"{rule}: {values}")


@dataclass(frozen=True)
class Tensor:
    """A view of storage; ``array`` is a NumPy view, so writes are seen by every other view."""

    array: np.ndarray
    buffer: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def __getitem__(self, key: Any) -> "Tensor":
        keys = key if isinstance(key, tuple) else (key,)
        for index, size in zip(keys, self.shape, strict=False):
            if isinstance(index, slice):
                inside = 0 <= (index.start or 0) < (index.stop or size) <= size
            else:
                inside = 0 <= index < size
            require(
                inside, "an index lies inside the tensor and selects something", key, self.shape
            )
        require(
            self.buffer in HBM or all(isinstance(index, slice) for index in keys),
            "the emulation indexes on-chip tensors by slices only",
            key,
        )
        return Tensor(self.array[key], self.buffer)

    def broadcast(self, dim: int, size: int) -> "Tensor":
        require(self.shape[dim] == 1, "only a dimension of size 1 is broadcast", self.shape, dim)
        require(self.buffer in HBM or dim != 0, "partitions cannot be broadcast", dim)
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return Tensor(np.broadcast_to(self.array, shape), self.buffer)

    def permute(self, dims: tuple[int, ...]) -> "Tensor":
        require(self.buffer in HBM or dims[0] == 0, "partitions stay outermost", dims)
        return Tensor(self.array.transpose(dims), self.buffer)

    def view(self, dtype: np.dtype) -> "Tensor":
        return Tensor(self.array.view(dtype), self.buffer)

    def vector_select(self, dim: int, vector_offset: "Tensor") -> "Tensor":
        require(dim == 0 and self.buffer in HBM, "gathers are from rows of HBM", dim, self.buffer)
        index = vector_offset
        require(index.buffer == "sbuf" and index.shape[1:] == (1,), "offsets are [n, 1] in SBUF")
        require(index.dtype == np.int32, "offsets are int32", index.dtype)
        rows = index.array[:, 0]
        inside = bool(np.all((rows >= 0) & (rows < self.shape[0])))
        require(inside, "an index out of range ends the program", rows)
        return Tensor(self.array[rows], "hbm")


class Launch:
    """The last kernel, on its cores one after the other; what is in shared HBM is common.

    ``instructions`` and ``sbuf_bytes`` (per partition, nothing ever freed) are sums over the cores.
    """

    def __init__(self) -> None:
        self._shared: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        self._shared.clear()
        self._program = self._count = 0
        self.instructions = self.sbuf_bytes = 0

    def counted(self, instruction: Callable[..., None]) -> Callable[..., None]:
        @wraps(instruction)
        def issue(*arguments: Any, **options: Any) -> None:
            self.instructions += 1
            instruction(*arguments, **options)

        return issue

    def start(self, program: int) -> None:
        self._program, self._count = program, 0

    def program_id(self, axis=0) -> int:
        return self._program

    def ndarray(self, shape, dtype, buffer="sbuf", name="", address=None) -> Tensor:
        require(all(size > 0 for size in shape), "tensors are not empty", shape)
        if buffer in ON_CHIP:
            require(len(shape) >= 2 and shape[0] <= PARTITIONS, "at most 128 partitions", shape)
        row = int(np.prod(shape[1:])) * np.dtype(dtype).itemsize
        if buffer == "sbuf":
            self.sbuf_bytes += row
        if buffer == "psum":
            require(row <= BANK_BYTES, "a PSUM tile of ours fits into one bank", shape, dtype)
        if buffer != "shared_hbm":
            return _uninitialised(shape, dtype, buffer)
        if self._count == len(self._shared):
            self._shared.append(_uninitialised(shape, dtype, buffer))
        self._count += 1
        tensor = self._shared[self._count - 1]
        require(tensor.shape == shape, "cores allocate alike", tensor.shape, shape)
        return tensor


def _uninitialised(shape, dtype, buffer: str) -> Tensor:
    value = UNINITIALISED_INT.get(np.dtype(dtype).name, np.nan)
    return Tensor(np.full(shape, value, dtype), buffer)
