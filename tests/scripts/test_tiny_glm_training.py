"""Training: what a stage changes, runs that are interrupted, and what the evaluation counts."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from scripts import train_tiny_glm
from scripts.tiny_glm import checkpoint, training
from scripts.tiny_glm.evaluate import accepted_per_step, draft_all
from scripts.tiny_glm.export import load
from scripts.tiny_glm.initial import initial_params
from scripts.tiny_glm.optimiser import BIAS_RATE, balanced, is_trained
from scripts.tiny_glm.stages import PLAN, Stage, plan, smoke_plan
from scripts.tiny_glm.training import Report, Run, train
from tests.scripts.tiny import SHALLOW, random_params, random_tokens

MIXTURE = {"pairs": 1.0, "prose": 1.0}
DENSE = Stage("dense", 4, 4, 32, MIXTURE)
INDEXER = replace(DENSE, name="indexer", trains_indexer=True, trains_model=False, num_drafts=0)
SPARSE = replace(DENSE, name="sparse", is_sparse=True, trains_indexer=True, num_drafts=2)
pytestmark = pytest.mark.usefixtures("optax_promotions")


@pytest.fixture
def optax_promotions():
    """optax mixes types and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def interrupt_at(stage: str, step: int) -> Report:
    def report(line: dict[str, object]) -> None:
        if (line["stage"], line["step"]) == (stage, step):
            raise KeyboardInterrupt

    return report


def ignore(line: dict[str, object]) -> None:
    del line


@pytest.mark.parametrize("stage", [DENSE, INDEXER, SPARSE], ids=lambda stage: stage.name)
def test_a_stage_changes_what_it_trains(tmp_path: Path, stage: Stage):
    before = initial_params(SHALLOW, 0)
    after = train(Run(SHALLOW, (stage,), 0, tmp_path), ignore)
    for name, value in before.items():
        is_bias = name.endswith("e_score_correction_bias")
        expected = stage.trains_model if is_bias else is_trained(name, stage)
        assert bool((after[name] != value).any()) == expected, name


def test_a_run_that_was_interrupted_ends_with_the_same_weights(tmp_path: Path):
    stages = (replace(DENSE, num_steps=3), replace(INDEXER, num_steps=2))
    whole = train(Run(SHALLOW, stages, 0, tmp_path / "whole"), ignore)

    run = Run(SHALLOW, stages, 0, tmp_path / "parts", log_every=1, save_every=2)
    for stop in [("dense", 3), ("indexer", 1)]:
        with pytest.raises(KeyboardInterrupt):
            train(run, interrupt_at(*stop))
    parts = train(run, ignore)
    for name, value in whole.items():
        np.testing.assert_array_equal(parts[name], value, err_msg=name)


def test_a_run_that_had_ended_goes_on_with_further_stages(tmp_path: Path):
    stages = (replace(DENSE, num_steps=2), replace(SPARSE, num_steps=2))
    whole = train(Run(SHALLOW, stages, 0, tmp_path / "whole"), ignore)
    for count in (1, 2):
        parts = train(Run(SHALLOW, stages[:count], 0, tmp_path / "parts"), ignore)
    for name, value in whole.items():
        np.testing.assert_array_equal(parts[name], value, err_msg=name)


def test_training_learns(tmp_path: Path):
    lines: list[dict[str, object]] = []
    stage = replace(DENSE, num_steps=40, mixture={"prose": 1.0})
    train(Run(SHALLOW, (stage,), 0, tmp_path, log_every=1), lines.append)
    losses = [float(str(line["loss"])) for line in lines]
    assert losses[-1] < 0.6 * losses[0]


def test_an_untrained_checkpoint_is_none(tmp_path: Path):
    assert checkpoint.restore(tmp_path, lambda stage, params: pytest.fail()) is None


def test_a_router_s_bias_rises_where_an_expert_is_idle():
    params = initial_params(SHALLOW, 0)
    share = np.full(SHALLOW.n_routed_experts, 1 / SHALLOW.n_routed_experts, np.float32)
    share[0], share[1] = 0.0, 0.5
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    found = np.asarray(balanced(params, {1: share})[name] - params[name])
    np.testing.assert_allclose(found[:3], [BIAS_RATE, -BIAS_RATE, 0.0], atol=1e-9)


def test_the_plan_is_dense_then_indexer_then_sparse_and_scales():
    kinds = [(stage.is_sparse, stage.trains_indexer, stage.trains_model) for stage in PLAN]
    sparse = (True, True, True)
    assert kinds[-4:] == [(False, True, False), (False, True, True), sparse, sparse]
    assert set(kinds[:-4]) == {(False, False, True)}
    doubled = [stage.num_steps for stage in plan(2.0)]
    assert doubled == [2 * stage.num_steps for stage in PLAN]
    assert [stage.name for stage in smoke_plan()] == [stage.name for stage in PLAN]


@pytest.mark.parametrize(
    ("drafted", "accepted"),
    [
        ([[3, 4], [9, 9], [9, 9], [6, 7], [9, 9], [9, 9]], [2, 2]),
        ([[3, 9], [9, 9], [5, 9], [9, 9], [7, 9], [9, 9]], [1, 1, 1]),
        ([[9, 4], [4, 9], [9, 6], [9, 9], [7, 8], [9, 9]], [0, 1, 0, 2]),
    ],
)
def test_accepted_drafts_are_counted_from_the_newest_token(
    drafted: list[list[int]], accepted: list[int]
):
    tokens = np.asarray([1, 2, 3, 4, 5, 6, 7, 8])
    rows = np.pad(np.asarray(drafted), ((0, 2), (0, 0)))
    assert accepted_per_step(tokens, rows, prompt=1) == accepted


def test_drafts_of_a_row_see_no_later_token():
    params, tokens = random_params(SHALLOW, 1), random_tokens(SHALLOW, 1, 1, 16)
    changed = tokens.copy()
    changed[0, 10] = (changed[0, 10] + 1) % SHALLOW.vocab_size
    before, after = (
        np.asarray(draft_all(params, SHALLOW, which))[0] for which in (tokens, changed)
    )
    np.testing.assert_array_equal(before[:9], after[:9])  # row 9 takes token 10
    assert (before[9:] != after[9:]).any()


def test_the_script_leaves_a_model_and_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["train_tiny_glm", "--folder", str(tmp_path), "--smoke"])
    train_tiny_glm.main()
    lines = list(training.read_log(tmp_path / "log.jsonl"))
    assert [line["stage"] for line in lines] == [stage.name for stage in PLAN]
    results = json.loads((tmp_path / "export" / "evaluation.json").read_text())
    assert 0 <= results["recall"] <= 1 <= results["acceptance_length"] <= 4
    params = load(tmp_path / "export", train_tiny_glm.SMOKE_CONFIG)
    assert all(np.isfinite(value).all() for value in params.values())
