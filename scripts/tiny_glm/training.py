"""The loop: stages, steps, a log, and checkpoints to go on from.

A step's batch is a function of seed, stage and step, so a run that was interrupted goes on with the
very numbers it would have had.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import optax

from scripts.tiny_glm import checkpoint
from scripts.tiny_glm.checkpoint import Params, State
from scripts.tiny_glm.config import GlmConfig
from scripts.tiny_glm.initial import initial_params
from scripts.tiny_glm.losses import Metrics, total_loss
from scripts.tiny_glm.model import Attending
from scripts.tiny_glm.optimiser import balanced, is_trained, make_optimiser
from scripts.tiny_glm.stages import Stage
from scripts.tiny_glm.tasks import Row, batch

Report = Callable[[dict[str, Any]], None]
"""Takes one line of the log."""


@dataclass(frozen=True)
class Run:
    """What a run is. ``folder`` takes checkpoints and log."""

    config: GlmConfig
    stages: tuple[Stage, ...]
    seed: int
    folder: Path
    log_every: int = 25
    save_every: int = 100

    @property
    def log_path(self) -> Path:
        return self.folder / "log.jsonl"


def train(run: Run, report: Report) -> Params:
    """The parameters after all stages, from the last checkpoint on if there is one."""
    run.folder.mkdir(parents=True, exist_ok=True)
    start = partial(_start, run)
    state = checkpoint.restore(run.folder, start)
    if state is None:
        state = start(0, initial_params(run.config, run.seed))
    while state.stage < len(run.stages):
        params = _train_stage(run, state, report)
        state = _start(run, state.stage + 1, params)
        checkpoint.save(run.folder, state)
    return state.params


def _start(run: Run, stage: int, params: Params) -> State:
    """The state at the beginning of a stage."""
    if stage == len(run.stages):
        return State(params, (), stage, 0)
    trained, _ = _split(params, run.stages[stage])
    return State(params, make_optimiser(run.config, run.stages[stage]).init(trained), stage, 0)


def _train_stage(run: Run, state: State, report: Report) -> Params:
    stage = run.stages[state.stage]
    step_function = make_step(run.config, stage)
    params, optimiser = state.params, state.optimiser
    started, first = time.monotonic(), state.step
    for step in range(state.step, stage.num_steps):
        rows = _rows(run, state.stage, step)
        params, optimiser, metrics = step_function(params, optimiser, rows.tokens, rows.weights)
        is_last = step + 1 == stage.num_steps
        if (step + 1) % run.log_every == 0 or is_last:
            seconds = (time.monotonic() - started) / (step + 1 - first)
            report(_line(stage, step + 1, seconds, metrics))
        if (step + 1) % run.save_every == 0:
            checkpoint.save(run.folder, State(params, optimiser, state.stage, step + 1))
    return params


def make_step(config: GlmConfig, stage: Stage) -> Callable[..., tuple[Params, Any, Metrics]]:
    """The compiled step of a stage: from parameters, optimiser state, tokens and weights."""
    optimiser = make_optimiser(config, stage)
    attending = Attending(stage.is_sparse, stage.trains_indexer)

    def loss(
        trained: Params, fixed: Params, tokens: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        params = trained | fixed
        return total_loss(params, config, tokens, weights, attending, stage.num_drafts)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Params, state: optax.OptState, tokens: jax.Array, weights: jax.Array
    ) -> tuple[Params, optax.OptState, Metrics]:
        trained, fixed = _split(params, stage)
        gradients, metrics = jax.grad(loss, has_aux=True)(trained, fixed, tokens, weights)
        updates, state = optimiser.update(gradients, state, trained)
        params = fixed | cast(Params, optax.apply_updates(trained, updates))
        if stage.trains_model:
            params = balanced(params, metrics.loads)
        return params, state, metrics

    return step


def _split(params: Params, stage: Stage) -> tuple[Params, Params]:
    """What the stage trains, and the rest."""
    trained = {name: value for name, value in params.items() if is_trained(name, stage)}
    return trained, {name: value for name, value in params.items() if name not in trained}


def _rows(run: Run, stage: int, step: int) -> Row:
    random = np.random.default_rng((run.seed, stage, step))
    plan = run.stages[stage]
    return batch(random, plan.mixture, plan.rows, plan.length)


def _line(stage: Stage, step: int, seconds: float, metrics: Metrics) -> dict[str, Any]:
    loads = np.stack([np.asarray(load) for load in metrics.loads.values()])
    return {
        "stage": stage.name,
        "step": step,
        "loss": _rounded(metrics.next_token),
        "accuracy": _rounded(metrics.accuracy),
        "draft_loss": _rounded(metrics.drafts),
        "draft_accuracies": [_rounded(value) for value in metrics.draft_accuracies],
        "divergence": _rounded(metrics.divergence),
        "largest_expert_share": _rounded(loads.max()),
        "seconds_per_step": round(seconds, 3),
    }


def _rounded(value: Any) -> float:
    return round(float(value), 4)


def append_json(path: Path) -> Report:
    """A report that adds its lines to a file."""

    def report(line: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    return report


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, path.read_text().splitlines())
