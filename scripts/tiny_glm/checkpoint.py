"""The state of a run in one file, replaced at once: an interruption leaves the one before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

FILE = "checkpoint.npz"
_PARAM, _LEAF = "param ", "optimiser "

Params = dict[str, jax.Array]


class State(NamedTuple):
    """``optimiser`` belongs to the stage and is made anew for each; ``step`` is the next one."""

    params: Params
    optimiser: optax.OptState
    stage: int
    step: int


Start = Callable[[int, Params], State]
"""The state at the beginning of a stage."""


def save(folder: Path, state: State) -> None:
    leaves = jax.tree.leaves(state.optimiser)
    arrays: Any = {_PARAM + name: np.asarray(value) for name, value in state.params.items()}
    arrays |= {f"{_LEAF}{index}": np.asarray(leaf) for index, leaf in enumerate(leaves)}
    arrays["progress"] = np.asarray([state.stage, state.step])
    new = folder / f"new-{FILE}"
    np.savez(new, **arrays)
    new.replace(folder / FILE)


def restore(folder: Path, start: Start) -> State | None:
    """What was saved last, or None. ``start`` gives the structure of the optimiser's state."""
    path = folder / FILE
    if not path.is_file():
        return None
    with np.load(path) as arrays:
        params = {
            name.removeprefix(_PARAM): jnp.asarray(arrays[name])
            for name in arrays.files
            if name.startswith(_PARAM)
        }
        stage, step = (int(value) for value in arrays["progress"])
        state = start(stage, params)
        if step == 0:  # the optimiser's is new; a run that had ended has saved none
            return state
        leaves, structure = jax.tree.flatten(state.optimiser)
        saved = [jnp.asarray(arrays[f"{_LEAF}{index}"]) for index in range(len(leaves))]
    return State(params, jax.tree.unflatten(structure, saved), stage, step)
