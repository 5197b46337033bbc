"""Matrices stored as 8-bit floats with one scale per block of 128 x 128 values.

Such a checkpoint has, beside a matrix ``x.weight`` of e4m3 values, ``x.weight_scale_inv`` with
[ceil(rows / 128), ceil(columns / 128)] factors; what the model means is value times factor. Which
matrices are converted is seen from the stored types alone.
"""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from dcpjax.errors import CheckpointError

BLOCK = 128
SCALED = np.dtype(ml_dtypes.float8_e4m3fn)
POWERS = np.dtype(ml_dtypes.float8_e8m0fnu)
SCALE_TYPES = (np.dtype(np.float32), POWERS)

_SUFFIX = "_scale_inv"
_VALUES = np.arange(256, dtype=np.uint8).view(SCALED).astype(np.float32)


def find_scales(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype]
) -> dict[str, str]:
    """For each scaled matrix of a checkpoint the name of its scales.

    Raises:
        CheckpointError: 8-bit values without scales, scales without such a matrix, or of another
            shape or type; each with its name.
    """
    matrices = [name for name, dtype in dtypes.items() if dtype == SCALED]
    scales = {name: name + _SUFFIX for name in matrices}
    spare = set(shapes) - set(scales.values())
    problems = {
        "without_scales": [name for name in matrices if scales[name] not in shapes],
        "without_matrix": sorted(
            name for name in spare if name.endswith(_SUFFIX) or dtypes[name] == POWERS
        ),
        "wrong_scales": [
            f"{scale} {shapes[scale]} of {dtypes[scale]} for {shapes[name]}"
            for name, scale in scales.items()
            if scale in shapes
            and (shapes[scale] != _num_blocks(shapes[name]) or dtypes[scale] not in SCALE_TYPES)
        ],
    }
    if any(problems.values()):
        raise CheckpointError(
            f"a matrix of 8-bit values has a scale, float32 or e8m0, per {BLOCK} x {BLOCK} block",
            **{kind: names[:8] for kind, names in problems.items() if names},
        )
    return scales


def _num_blocks(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """None where it is no matrix."""
    return tuple(-(-size // BLOCK) for size in shape) if len(shape) == 2 else None


def dequantised(matrix: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """``matrix`` [N, E] of e4m3 values times its blocks' scales, as float32.

    A value has 4 significant bits, so the product is rounded once, and with scales that are powers
    of two not at all.
    """
    values = _VALUES[matrix.view(np.uint8)]
    by_column = np.repeat(scales.astype(np.float32), BLOCK, axis=1)[:, : matrix.shape[1]]
    for block, factors in enumerate(by_column):
        values[block * BLOCK : (block + 1) * BLOCK] *= factors
    return values
