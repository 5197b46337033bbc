"""What transformers computed, as committed files: tokens in JSON, logits in NumPy archives."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent
NUM_TOKENS = 64
NEAR_TIE = 1e-3
"""Where the two best logits are closer, another choice is no error; no prompt has such a place."""


@dataclass(frozen=True)
class Continuation:
    """A prompt and its greedy continuation.

    ``margin``: the least difference of the best and the second logit over all its tokens.
    """

    name: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margin: float


@dataclass(frozen=True)
class Logits:
    """Logits ``values`` [positions, ids] of some token ids at some positions of a sequence."""

    tokens: np.ndarray
    positions: np.ndarray
    ids: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Scored:
    """Logits [T, V] of a sequence, and what a latent-cache model caches of it.

    ``latents`` [layers, T, latent | rotated key], ``keys`` [layers with an indexer, T, width].
    """

    tokens: np.ndarray
    logits: np.ndarray
    latents: np.ndarray
    keys: np.ndarray


def write_scored(name: str, scored: Scored, folder: Path = FOLDER) -> None:
    """Write ``name``.npz."""
    np.savez_compressed(folder / f"{name}.npz", **vars(scored))


def read_scored(name: str) -> Scored:
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return Scored(**arrays)


def write_record(
    name: str, continuations: list[Continuation], logits: dict[str, Logits], folder: Path = FOLDER
) -> None:
    """Write ``name``.json and ``name``.npz."""
    entries = ",\n".join(json.dumps(asdict(item)) for item in continuations)
    (folder / f"{name}.json").write_text(f"[\n{entries}\n]\n")
    arrays = {
        f"{key}/{part}": value for key, item in logits.items() for part, value in vars(item).items()
    }
    np.savez_compressed(folder / f"{name}.npz", **arrays)


def read_continuations(name: str) -> list[Continuation]:
    entries = json.loads((FOLDER / f"{name}.json").read_text())
    return [
        Continuation(item["name"], tuple(item["prompt"]), tuple(item["tokens"]), item["margin"])
        for item in entries
    ]


def read_logits(name: str) -> dict[str, Logits]:
    with np.load(FOLDER / f"{name}.npz") as arrays:
        keys = dict.fromkeys(entry.rpartition("/")[0] for entry in arrays.files)
        return {
            key: Logits(*(arrays[f"{key}/{part}"] for part in Logits.__dataclass_fields__))
            for key in keys
        }
