"""Inputs for a program that is only to be timed, and under which names a NEFF takes them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from neuron.errors import ManifestError
from neuron.manifest import Tensor

RANK_INPUT = "rank_ids"
"""The input that tells a rank which one it is; all others may be the same for all ranks."""

_SCALE = 0.02  # keeps activations of random weights finite through many layers
_BLOCK = 1 << 20


@dataclass(frozen=True)
class NeffTensor:
    """What a NEFF says about one of its tensors."""

    name: str
    num_bytes: int


def dtype_of(name: str) -> np.dtype:
    """The dtype of NumPy's or ml_dtypes' name.

    Raises:
        ManifestError: there is none of this name.
    """
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError as error:
        raise ManifestError("a dtype is one of NumPy or ml_dtypes", dtype=name) from error


def num_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize


def make_inputs(tensors: Sequence[Tensor], *, rank: int, seed: int = 0) -> list[np.ndarray]:
    """Random floats, and integers inside their declared ranges; where none is declared, zeros.

    An index out of range is an error of the device, even in a lane that is masked later. All ranks
    get the same, as they have to for page tables and token ids, except for their own number.
    """
    random = np.random.default_rng(seed)
    return [_make(tensor, rank, random) for tensor in tensors]


def _make(tensor: Tensor, rank: int, random: np.random.Generator) -> np.ndarray:
    dtype, size = dtype_of(tensor.dtype), math.prod(tensor.shape)
    if tensor.name == RANK_INPUT:
        return np.full(tensor.shape, rank, dtype)
    if dtype.kind in "biu":
        flat = np.zeros(size, dtype)
        for start, stop, low, high in tensor.ranges:
            flat[start:stop] = random.integers(
                low, high, size=len(flat[start:stop]), endpoint=True
            ).astype(dtype)
        return flat.reshape(tensor.shape)
    # One block over and over: weights of gigabytes would take minutes to draw.
    block = (_SCALE * random.standard_normal(min(size, _BLOCK))).astype(dtype)
    return np.resize(block, tensor.shape)


def match_names(tensors: Sequence[Tensor], found: Sequence[NeffTensor]) -> list[str]:
    """The NEFF's name of each tensor: as the program set it, else the same, else by order.

    By order only where both have as many tensors and all of them as many bytes.

    Raises:
        ManifestError: the NEFF takes other tensors than the manifest says.
    """
    offered = {item.name: item for item in found}
    wanted = [tensor.neff_name or tensor.name for tensor in tensors]
    if any(name not in offered for name in wanted) and not any(t.neff_name for t in tensors):
        wanted = [item.name for item in found]
    matched = [offered[name] for name in wanted if name in offered]
    if [item.num_bytes for item in matched] != [num_bytes(tensor) for tensor in tensors]:
        raise ManifestError(
            "a NEFF has the tensors of its manifest",
            manifest=[(t.neff_name or t.name, num_bytes(t)) for t in tensors],
            neff=[(item.name, item.num_bytes) for item in found],
        )
    return wanted


def shared_tensors(
    aliases: Sequence[tuple[int, int]], inputs: Sequence[str], outputs: Sequence[str]
) -> Mapping[str, str]:
    """{output: input} of the tensors that are one, by the NEFF's names."""
    return {outputs[output]: inputs[number] for output, number in aliases}
