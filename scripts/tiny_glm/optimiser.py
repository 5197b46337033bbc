"""Muon for matrices; Adam for embeddings, head, routers, vectors; signs for routers' biases."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from scripts.tiny_glm.config import GlmConfig
from scripts.tiny_glm.model import EMBEDDING, HEAD, Loads, layer_name, param_shapes
from scripts.tiny_glm.stages import Stage

MUON_RATE, ADAM_RATE = 0.01, 3e-3
BIAS_RATE = 3e-3
_WARM_UP_STEPS = 40
_CLIP_NORM = 1.0
_BIAS = "e_score_correction_bias"


def make_optimiser(config: GlmConfig, stage: Stage) -> optax.GradientTransformation:
    """Of the parameters that the stage trains."""
    shapes = {name: of for name, of in param_shapes(config).items() if is_trained(name, stage)}
    axes: Any = {name: _axes(name, of) for name, of in shapes.items()}
    matrices = muon(
        _schedule(stage, MUON_RATE),
        adam_learning_rate=_schedule(stage, ADAM_RATE),
        muon_weight_dimension_numbers=axes,
        consistent_rms=0.2,
        adam_b2=0.98,
    )
    return optax.chain(optax.clip_by_global_norm(_CLIP_NORM), matrices)


def is_trained(name: str, stage: Stage) -> bool:
    """Whether the stage's gradients change a parameter."""
    if name.endswith(_BIAS):
        return False
    return stage.trains_indexer if ".indexer." in name else stage.trains_model


def balanced(params: Mapping[str, jax.Array], loads: Loads) -> dict[str, jax.Array]:
    """The routers' biases a step further: up for experts with less than their share of tokens."""
    changed = dict(params)
    for layer, load in loads.items():
        name = f"{layer_name(layer)}.mlp.gate.{_BIAS}"
        changed[name] = params[name] + BIAS_RATE * jnp.sign(1 / load.shape[0] - load)
    return changed


def _axes(name: str, shape: tuple[int, ...]) -> MuonDimensionNumbers | None:
    """Which axes of a parameter are a matrix for Muon; None where Adam updates it."""
    is_adam = name.startswith((EMBEDDING, HEAD)) or name.endswith(".gate.weight")
    if is_adam or len(shape) < 2:
        return None
    return MuonDimensionNumbers(reduction_axis=len(shape) - 1, output_axis=len(shape) - 2)


def _schedule(stage: Stage, rate: float) -> optax.Schedule:
    warm_up = min(_WARM_UP_STEPS, stage.num_steps // 2)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.1 * rate * stage.rate, rate * stage.rate, warm_up),
            optax.linear_schedule(
                rate * stage.rate, rate * stage.last_rate, stage.num_steps - warm_up
            ),
        ],
        [warm_up],
    )
