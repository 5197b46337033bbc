"""A simulated engine is the engine's own scheduler and loop, with a clock instead of devices."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpjax.cache.prefix import PagePool
from dcpjax.engine.plan import StepPlan, StepShapes
from dcpjax.engine.request import Request, SamplingParams
from dcpjax.engine.scheduler import Scheduler
from dcpjax.planner.shaped_steps import ShapedSteps
from dcpjax.planner.sim_cluster import Cluster
from dcpjax.planner.sim_step import EngineSpec
from dcpjax.planner.simulate import Simulation, simulate
from dcpjax.planner.step_times import ConstantSteps
from dcpjax.planner.trace_files import Session, Turn
from dcpjax.planner.traces import Trace

STEPS = ShapedSteps(
    decode_shapes=((1, 1.0), (2, 1.1), (4, 1.3), (8, 1.9)),
    prompt_shapes=(((1, 64), 2.3), ((4, 64), 5.9), ((1, 512), 10.7)),
    per_cached_token=0.0,
    per_pair=1e-4,
)
SHAPES = StepShapes(STEPS.decode_rows, STEPS.prefill_shapes)
SPEC = EngineSpec(
    STEPS,
    num_pages=4096,
    page_tokens=16,
    max_batch=8,
    prompt_shape=SHAPES.best_prefill,
    looks_ahead=True,
)

Arrival = tuple[float, int, int]
"""Time, prompt tokens, output tokens."""


def simulated(arrivals: Sequence[Arrival], spec: EngineSpec = SPEC) -> list[tuple[float, float]]:
    """When each request's first and last token come."""
    trace = Trace("t", tuple(Session(time, (Turn(a, b),)) for time, a, b in arrivals))
    runs: list[Simulation] = []
    simulate(trace, Cluster((spec,)), observer=lambda run: runs.__setitem__(slice(None), [run]))
    return [(job.first_token, job.finished) for job in runs[0].jobs]


class ClockedEngine:
    """``Engine.step`` and the server's loop around it, where a step takes what STEPS says."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self.scheduler = Scheduler(
            PagePool(4096, 16),
            max_num_seqs=8,
            max_model_len=4096,
            shapes=SHAPES,
            enable_prefix_caching=False,
        )
        self.now, self.device_free = 0.0, 0.0
        self.in_flight: tuple[StepPlan, float] | None = None
        self.inbox = sorted(enumerate(arrivals), key=lambda item: item[1][0])
        self.times: dict[str, list[float]] = {str(n): [] for n in range(len(arrivals))}

    def run(self) -> list[tuple[float, float]]:
        while self.inbox or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.now = max(self.now, self.inbox[0][1][0])
            self._apply_inbox()
            self._step()
        return [(times[0], times[-1]) for times in self.times.values()]

    def _apply_inbox(self) -> None:
        while self.inbox and self.inbox[0][1][0] <= self.now:
            number, (_, num_input, num_output) = self.inbox.pop(0)
            params = SamplingParams(max_tokens=num_output, ignore_eos=True)
            self.scheduler.add(Request(str(number), tuple(range(1, num_input + 1)), params))

    def _step(self) -> None:
        plan = self.scheduler.schedule()
        following = None
        if isinstance(plan, StepPlan):
            begin = max(self.now, self.device_free)
            self.device_free = begin + self._seconds(plan)
            following = (plan, self.device_free)
        if self.in_flight is not None:
            done, self.now = self.in_flight
            for output in self.scheduler.commit(done, [[7]] * len(done.sampling)):
                self.times[output.request_id].append(self.now)
        self.in_flight = following

    def _seconds(self, plan: StepPlan) -> float:
        chunks = [(segment.num_tokens, segment.start) for segment in plan.prefill]
        return STEPS.with_prompts(chunks, len(plan.decode))


lengths = st.one_of(st.integers(1, 700), st.sampled_from([1, 63, 64, 65, 129, 512, 513, 577]))
arrivals = st.lists(
    st.tuples(st.floats(0, 120, allow_subnormal=False), lengths, st.integers(1, 20)),
    min_size=1,
    max_size=30,
    unique_by=lambda arrival: arrival[0],
).map(sorted)


@given(arrivals)
@settings(max_examples=200)
def test_a_simulated_engine_takes_the_steps_of_the_scheduler(requests):
    expected = ClockedEngine(requests).run()
    for found, wanted in zip(simulated(requests), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("changed", [{"looks_ahead": False}, {"prompt_shape": None, "chunk": 512}])
def test_an_engine_of_another_kind_takes_others(changed):
    """The test above can fail."""
    requests = [(2.0 * n, 100 + 37 * n, 9) for n in range(12)]
    expected = np.array(ClockedEngine(requests).run())
    assert np.array(simulated(requests)) == pytest.approx(expected)
    assert np.array(simulated(requests, replace(SPEC, **changed))) != pytest.approx(expected)


# By hand

AHEAD = EngineSpec(ConstantSteps(1.0, 1.0), 100, 16, max_batch=4, looks_ahead=True)


def test_what_comes_during_a_step_waits_for_the_one_that_is_planned():
    """The second comes while the step from 2 to 3 runs, when that from 3 to 4 is planned."""
    assert simulated([(0, 16, 5), (2.5, 16, 1)], AHEAD) == [(1, 6), (6, 6)]
    not_ahead = replace(AHEAD, looks_ahead=False)
    assert simulated([(0, 16, 5), (2.5, 16, 1)], not_ahead) == [(1, 6), (5, 5)]


def test_what_comes_when_nothing_is_planned_does_not_wait():
    assert simulated([(0, 16, 1), (0.5, 16, 1), (7, 16, 1)], AHEAD) == [(1, 1), (2, 2), (8, 8)]


def test_a_run_of_decode_steps_is_cut_where_a_prompt_comes_in():
    requests = [(0, 16, 100), (50.5, 16, 1)]
    assert simulated(requests, AHEAD) == [(1, 101), (54, 54)]


def test_the_way_to_the_engine_keeps_no_step_waiting():
    trace = Trace("t", tuple(Session(time, (Turn(16, 3),)) for time in (0.0, 0.1)))
    reports = [simulate(trace, Cluster((AHEAD,), latency=latency)) for latency in (0.0, 0.5)]
    assert reports[1].ttft.mean == pytest.approx(reports[0].ttft.mean + 0.5)
    assert reports[1].tpot == reports[0].tpot


def test_a_rest_of_one_token_is_a_decode_row():
    """65 tokens: a chunk of 64, then one row of decode."""
    ((first, _),) = simulated([(0, 65, 1)])
    assert first == pytest.approx(2.3 + 1.0)
    ((first, _),) = simulated([(0, 66, 1)])
    assert first == pytest.approx(2.3 + 2.3 + 64 * 2 * 1e-4)
