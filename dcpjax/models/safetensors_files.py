"""The safetensors files of a folder as named tensors, memory-mapped."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from dcpjax.errors import CheckpointError
from dcpjax.models.block_scales import POWERS, SCALED, dequantised, find_scales
from dcpjax.models.tensors import EMBEDDING, StoredTensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_TYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": SCALED,  # these two only together, see block_scales
    "F8_E8M0": POWERS,
}


@dataclass(frozen=True)
class _Location:
    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype


def open_tensors(folder: Path) -> StoredTensors:
    """The tensors of ``model.safetensors``, or of the shards that the index names.

    Raises:
        CheckpointError: files or tensors are missing, a file is cut short or of an unknown type.
    """
    if (folder / SINGLE_FILE).is_file():
        places = _locate([folder / SINGLE_FILE])
    else:
        places = _locate_shards(folder)

    scales = find_scales(
        {name: place.shape for name, place in places.items()},
        {name: place.dtype for name, place in places.items()},
    )

    def read(name: str) -> np.ndarray:
        stored = _read(places[name])
        return dequantised(stored, _read(places[scales[name]])) if name in scales else stored

    model_tensors = places.keys() - set(scales.values())
    widest = places.get(EMBEDDING) or next(iter(places.values()), None)
    return StoredTensors(
        shapes={name: place.shape for name, place in places.items() if name in model_tensors},
        read=read,
        dtype=widest.dtype.name if widest else "float32",
    )


def _read(place: _Location) -> np.ndarray:
    """A mapping per tensor: nothing is shared between threads, and none outlives its array."""
    return np.asarray(np.memmap(place.path, place.dtype, "r", place.offset, place.shape))


def _locate_shards(folder: Path) -> dict[str, _Location]:
    weight_map = _read_index(folder)
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"the files named in {INDEX_FILE} lie beside it", folder=str(folder), absent=absent
        )
    places = _locate(folder / name for name in names)
    astray = [
        name
        for name, shard in weight_map.items()
        if name not in places or places[name].path.name != shard
    ]
    if astray:
        raise CheckpointError(
            f"each tensor is in the file that {INDEX_FILE} names",
            folder=str(folder),
            first=astray[:8],
            count=len(astray),
        )
    return places


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    if not path.is_file():
        raise CheckpointError(
            f"a model folder has {SINGLE_FILE} or {INDEX_FILE}", folder=str(folder)
        )
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "the index is a JSON object with a weight_map", path=str(path), found=str(error)
        ) from error
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise CheckpointError("weight_map maps tensor names to file names", path=str(path))
    return weight_map


def _locate(paths: Iterable[Path]) -> dict[str, _Location]:
    places: dict[str, _Location] = {}
    for path in paths:
        for name, place in _read_header(path).items():
            if name in places:
                raise CheckpointError(
                    "each tensor is in one file",
                    tensor=name,
                    files=[str(places[name].path), str(path)],
                )
            places[name] = place
    return places


def _read_header(path: Path) -> dict[str, _Location]:
    try:
        with safe_open(path, framework="numpy"):  # checks the header against the file's size
            pass
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            "the safetensors file is whole and readable", path=str(path), found=str(error)
        ) from error
    header.pop("__metadata__", None)
    unknown = {item["dtype"] for item in header.values()} - set(STORED_TYPES)
    if unknown:
        raise CheckpointError(
            f"tensors are stored as {', '.join(STORED_TYPES)}",
            path=str(path),
            found=sorted(unknown),
        )
    return {
        name: _Location(
            path,
            8 + header_bytes + item["data_offsets"][0],
            tuple(item["shape"]),
            STORED_TYPES[item["dtype"]],
        )
        for name, item in header.items()
    }
