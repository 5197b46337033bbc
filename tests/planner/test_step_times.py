"""Recorded step times: lines through tables, and tables that are none."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import ConfigError
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.hardware import find_device
from dcpjax.planner.models import find_model
from dcpjax.planner.step_times import EstimatedSteps, RecordedSteps, fit_steps, read_steps
from dcpjax.planner.steps import decode_step

coefficients = st.tuples(st.floats(1e-3, 1), st.floats(0, 1e-2), st.floats(0, 1e-5))


@given(coefficients, coefficients)
def test_lines_are_found_again(decode_line, prefill_line):
    true = RecordedSteps(decode_line, prefill_line)
    decode = [
        [batch, cached, sum(x * y for x, y in zip(true.decode(batch), (1, cached), strict=True))]
        for batch in (1, 4, 16)
        for cached in (100, 10_000, 100_000)
    ]
    prefill = [[n, prior, true.prefill(n, prior)] for n in (16, 64, 512) for prior in (0, 2048)]
    found = fit_steps(decode, prefill)
    for batch, cached, seconds in decode:
        fixed, per_token = found.decode(int(batch))
        assert fixed + per_token * cached == pytest.approx(seconds, rel=1e-4)
    for tokens, prior, seconds in prefill:
        assert found.prefill(int(tokens), int(prior)) == pytest.approx(seconds, rel=1e-4)


def test_no_coefficient_is_negative():
    """Steps that got faster by noise."""
    found = fit_steps([[1, 100, 1.0], [2, 200, 0.9], [4, 400, 0.8]], [[10, 0, 1.0], [20, 0, 0.5]])
    assert min(*found.decode_line, *found.prefill_line) >= 0
    assert 0.8 < found.decode(2)[0] < 1.0


def test_chunks_take_as_long_as_the_compiled_width():
    steps = RecordedSteps((0, 0, 0), (1.0, 0.1, 0.0), widths=(64, 512))
    assert steps.prefill(1, 0) == steps.prefill(64, 0) == pytest.approx(7.4)
    assert steps.prefill(65, 0) == steps.prefill(512, 0) == pytest.approx(52.2)
    assert steps.prefill(600, 0) == pytest.approx(61.0)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"decode": [[1, 2]], "prefill": []}', '{"decode": 1, "prefill": 2}']
)
def test_tables_that_are_none_are_refused(text, tmp_path):
    (tmp_path / "steps.json").write_text(text)
    with pytest.raises(ConfigError, match="table of steps"):
        read_steps(tmp_path / "steps.json")


def test_a_table_is_read_back(tmp_path):
    rows = {"decode": [[1, 10, 0.5], [2, 20, 0.5]], "prefill": [[64, 0, 2.0]], "widths": [64]}
    (tmp_path / "steps.json").write_text(json.dumps(rows))
    assert read_steps(tmp_path / "steps.json") == fit_steps(*rows.values())


def test_estimated_lines_are_near_the_estimates():
    """One slope for all contexts: exact where it was taken, a few percent off elsewhere."""
    model, device = find_model("glm-5.2"), find_device("h200")
    for deployment in (Deployment(tp=8), Deployment(tp=8, dcp=8, draft_tokens=3)):
        steps = EstimatedSteps(model, device, deployment)
        for batch in (1, 32):
            fixed, per_token = steps.decode(batch)
            for context in (2048, 32_768, 131_072, 10**6):
                exact = decode_step(model, device, deployment, batch, context).seconds
                assert fixed + per_token * batch * context == pytest.approx(exact, rel=0.03)
