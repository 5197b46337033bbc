"""The simulator against a recorded run of the server, see ``scripts/compare_simulation.py``."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcpjax.config import EngineConfig
from dcpjax.engine.buckets import decode_buckets, prefill_buckets
from dcpjax.engine.plan import StepShapes
from dcpjax.planner.shaped_steps import ShapedSteps, read_steps
from dcpjax.planner.sim_cluster import Cluster
from dcpjax.planner.sim_report import Report
from dcpjax.planner.sim_step import EngineSpec
from dcpjax.planner.simulate import simulate
from dcpjax.planner.trace_files import Session, Turn
from dcpjax.planner.traces import Trace

FILE = Path(__file__).with_name("recorded_steps.json")
TOLERANCE = 0.2
"""Of medians; the aim that the simulator is held to."""


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def shapes_of(recorded: dict[str, Any]) -> StepShapes:
    shapes = recorded["shapes"]
    return StepShapes(tuple(shapes["decode_rows"]), tuple(map(tuple, shapes["prefill"])))


def replayed(recorded: dict[str, Any], **changed: Any) -> Report:
    """The recorded requests on an engine of the recorded step times."""
    settings = recorded["provenance"]["settings"]
    steps = read_steps(FILE)
    assert isinstance(steps, ShapedSteps)
    spec = EngineSpec(
        steps,
        num_pages=settings["num_pages"],
        page_tokens=settings["block_size"],
        max_batch=settings["max_num_seqs"],
        prompt_shape=shapes_of(recorded).best_prefill,
        looks_ahead=True,
    )
    trace = Trace("recorded", tuple(Session(s, (Turn(a, b),)) for s, a, b in recorded["trace"]))
    return simulate(trace, Cluster((replace(spec, **changed),), latency=recorded["latency"]))


def test_a_run_of_the_server_is_simulated(recorded):
    assert len(recorded["trace"]) >= 50
    report, measured = replayed(recorded), recorded["measured"]
    assert report.ttft.p50 == pytest.approx(measured["ttft"], rel=TOLERANCE)
    assert report.tpot.p50 == pytest.approx(measured["tpot"], rel=TOLERANCE)


def test_the_comparison_can_fail(recorded):
    """Twice the time for each step, and nothing is within the tolerance any more."""
    steps = read_steps(FILE)
    assert isinstance(steps, ShapedSteps)
    slow = replace(
        steps,
        decode_shapes=tuple((rows, 2 * seconds) for rows, seconds in steps.decode_shapes),
        prompt_shapes=tuple((shape, 2 * seconds) for shape, seconds in steps.prompt_shapes),
    )
    report, measured = replayed(recorded, steps=slow), recorded["measured"]
    assert report.ttft.p50 > (1 + TOLERANCE) * measured["ttft"]
    assert report.tpot.p50 > (1 + TOLERANCE) * measured["tpot"]


def test_the_recorded_shapes_are_those_of_such_a_server(recorded):
    """A server with the recorded settings still compiles them; else record again."""
    provenance = recorded["provenance"]
    assert {"what", "model", "settings", "recorded", "machine", "jax"} <= set(provenance)
    settings = provenance["settings"]
    config = EngineConfig.from_settings(provenance["model"], dict(settings))
    rows = decode_buckets(1, settings["max_num_seqs"])
    assert shapes_of(recorded) == StepShapes(rows, prefill_buckets(config))
    steps = read_steps(FILE)
    assert isinstance(steps, ShapedSteps)
    assert set(steps.decode_rows) == set(rows)
    assert set(steps.prefill_shapes) == set(prefill_buckets(config))
