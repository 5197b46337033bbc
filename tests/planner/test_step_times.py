"""Recorded step times: lines through tables, and tables that are none."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import ConfigError
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.hardware import find_device
from dcpjax.planner.models import find_model
from dcpjax.planner.shaped_steps import ShapedSteps, fit_shapes, read_steps
from dcpjax.planner.step_times import ConstantSteps, EstimatedSteps, RecordedSteps, fit_steps
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


def test_what_chunks_and_answers_have_in_common_counts_once():
    steps = ConstantSteps(decode_seconds=0.5, prefill_seconds=3.0, fixed=1.0)
    assert steps.with_prompts([], 0) == 0
    assert steps.with_prompts([], 7) == 0.5
    assert steps.with_prompts([(10, 0)], 0) == 3.0
    assert steps.with_prompts([(10, 0), (10, 0)], 0) == 5.0
    assert steps.with_prompts([(10, 0), (10, 0)], 7) == 4.5


SHAPES = ShapedSteps(
    decode_shapes=((1, 0.01), (2, 0.011), (8, 0.03)),
    prompt_shapes=(((1, 64), 0.05), ((4, 64), 0.15), ((1, 512), 0.25)),
    per_cached_token=1e-6,
    per_pair=1e-7,
)


@pytest.mark.parametrize("batch, seconds", [(1, 0.01), (2, 0.011), (3, 0.03), (8, 0.03), (9, 0.03)])
def test_answers_take_as_long_as_the_rows_that_are_compiled(batch, seconds):
    assert SHAPES.decode(batch) == (seconds, 1e-6)


@pytest.mark.parametrize(
    "chunks, seconds",
    [
        ([(1, 0)], 0.05),
        ([(64, 0)], 0.05),
        ([(64, 100)], 0.05 + 6400 * 1e-7),
        ([(65, 0)], 0.25),
        ([(20, 0), (30, 10)], 0.15 + 300 * 1e-7),
        ([(512, 512)], 0.25 + 512 * 512 * 1e-7),
        ([(600, 0)], 0.25),
    ],
)
@pytest.mark.parametrize("batch", [0, 1, 8])
def test_a_step_with_prompts_takes_as_long_as_its_shape(chunks, seconds, batch):
    """Whatever is beside: all decode rows are computed."""
    assert SHAPES.with_prompts(chunks, batch) == pytest.approx(seconds)


def test_a_step_without_prompts_is_decode():
    assert SHAPES.with_prompts([], 3) == 0.03 and SHAPES.with_prompts([], 0) == 0


times = st.floats(1e-3, 1)


@given(st.lists(times, min_size=3, max_size=3), st.lists(times, min_size=3, max_size=3))
def test_shapes_are_found_again(decode_seconds, prompt_seconds):
    true = ShapedSteps(
        tuple(zip((1, 2, 8), sorted(decode_seconds), strict=True)),
        tuple(zip(((1, 64), (4, 64), (1, 512)), prompt_seconds, strict=True)),
        1e-6,
        1e-8,
    )
    decode = [
        [rows, cached, seconds + 1e-6 * cached]
        for rows, seconds in true.decode_shapes
        for cached in (64, 5000)
    ]
    prompts = [
        [rows, width, prior, seconds + 1e-8 * rows * width * prior]
        for (rows, width), seconds in true.prompt_shapes
        for prior in (0, 512)
    ]
    found = fit_shapes(decode, prompts)
    for batch in (1, 2, 8):
        assert found.decode(batch) == pytest.approx(true.decode(batch), rel=1e-4)
    for chunks in ([(64, 512)], [(64, 0)] * 4, [(512, 1024)]):
        expected = true.with_prompts(chunks, 8)
        assert found.with_prompts(chunks, 8) == pytest.approx(expected, rel=1e-4)


def test_what_was_recorded_several_times_counts_by_its_median():
    found = fit_shapes(
        [[1, 0, 1.0], [1, 0, 9.0], [1, 0, 1.2]],
        [[1, 64, 0, 2.0], [1, 64, 0, 70.0], [1, 64, 0, 3.0]],
    )
    assert found.decode(1)[0] == pytest.approx(1.2)
    assert found.with_prompts([(64, 0)], 0) == pytest.approx(3.0)


def test_shapes_need_rows():
    with pytest.raises(ConfigError, match="steps of decode and of prompts"):
        fit_shapes([], [[1, 64, 0, 1.0]])
    with pytest.raises(ConfigError, match="steps of decode and of prompts"):
        fit_shapes([[1, 64, 1.0]], [])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"decode": [[1, 2]], "prefill": []}',
        '{"decode": 1, "prefill": 2}',
        '{"decode": [], "prompts": []}',
        '{"decode": [[1, 2, 3]], "prompts": [[1, 2, 3]]}',
    ],
)
def test_tables_that_are_none_are_refused(text, tmp_path):
    (tmp_path / "steps.json").write_text(text)
    with pytest.raises(ConfigError, match="table of steps"):
        read_steps(tmp_path / "steps.json")


def test_a_table_is_read_back(tmp_path):
    file, decode = tmp_path / "steps.json", [[1, 10, 0.5], [2, 20, 0.5]]
    file.write_text(json.dumps({"decode": decode, "prefill": [[64, 0, 2.0]]}))
    assert read_steps(file) == fit_steps(decode, [[64, 0, 2.0]])
    file.write_text(json.dumps({"decode": decode, "prompts": [[1, 64, 0, 2.0]]}))
    assert read_steps(file) == fit_shapes(decode, [[1, 64, 0, 2.0]])


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
