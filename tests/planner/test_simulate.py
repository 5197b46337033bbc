"""Invariants of the simulation, and queues whose numbers are in textbooks."""

import math
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpjax.errors import ConfigError
from dcpjax.planner.generate import Workload, generate_trace
from dcpjax.planner.sim_cluster import Cluster, Failure
from dcpjax.planner.sim_report import Objective, percentile
from dcpjax.planner.sim_step import EngineSpec
from dcpjax.planner.simulate import Simulation, simulate
from dcpjax.planner.step_times import ConstantSteps, RecordedSteps
from dcpjax.planner.trace_files import Session, Turn
from dcpjax.planner.traces import Trace, hit_tokens

STEPS = RecordedSteps((0.01, 0.001, 1e-7), (0.02, 1e-4, 1e-9))
ENGINE = EngineSpec(STEPS, num_pages=200, page_tokens=16, max_batch=8, chunk=64)


def check_invariants(run: Simulation) -> None:
    """No pool beyond its pages, and nobody idle who could work."""
    for engine in run.state.engines:
        pool = engine.pool
        assert 0 <= pool.num_own and pool.num_held <= pool.num_used <= pool.num_pages
        if not engine.is_alive or not engine.is_idle:
            continue
        assert not engine.prefilling and not engine.num_decoding
        if engine.waiting and engine.load - len(engine.waiting) < engine.spec.max_batch:
            job = engine.waiting[0]
            pages = engine.spec.pages(job.num_tokens)
            assert pool.reserve(engine.page_ids(job), pages) is None


def check_end(run: Simulation) -> None:
    """Everybody is done, in order, and every page is back."""
    for job in run.jobs:
        times = (job.sent, job.started, job.prefilled, job.joined, job.first_token, job.finished)
        assert all(a <= b + 1e-9 for a, b in zip(times, times[1:], strict=False)), times
        assert not job.holdings
    for engine in run.state.engines:
        assert engine.pool.num_held == 0 and not engine.jobs
    assert run.num_present == 0


def run_checked(trace: Trace, cluster: Cluster, **settings):
    """Simulate, check everything; the report and the requests."""
    runs: list[Simulation] = []

    def observe(run: Simulation) -> None:
        runs[:] = [run]
        check_invariants(run)

    report = simulate(trace, cluster, observer=observe, **settings)
    check_end(runs[0])
    jobs = runs[0].jobs
    assert report.num_requests == trace.num_requests == len(jobs)
    # Little: the requests present, over time, are the times of the requests.
    assert runs[0].area == pytest.approx(sum(job.latency for job in jobs), rel=1e-9, abs=1e-9)
    arrival_rate = len(jobs) / report.duration
    assert report.mean_present == pytest.approx(arrival_rate * report.latency.mean, rel=1e-9)
    return report, jobs


workloads = st.builds(
    Workload,
    num_requests=st.integers(1, 40),
    rate=st.floats(0.1, 100),
    num_input=st.integers(64, 500),
    num_output=st.integers(1, 60),
    num_turns=st.integers(1, 4),
    turn_input=st.integers(1, 100),
    shared=st.integers(0, 64),
    think=st.sampled_from([0.0, 0.5]),
)
engines = st.builds(
    EngineSpec,
    steps=st.sampled_from([STEPS, ConstantSteps(0.01, 0.05), ConstantSteps(0.0, 0.0)]),
    num_pages=st.integers(150, 400),
    page_tokens=st.sampled_from([16, 64, 128]),
    host_pages=st.sampled_from([0, 50]),
    host_seconds=st.just(0.001),
    max_batch=st.integers(1, 12),
    chunk=st.sampled_from([16, 100, 4096]),
    acceptance=st.sampled_from([1.0, 2.5]),
    prompt_shape=st.sampled_from([None, None, lambda left: (1, 64), lambda left: (len(left), 16)]),
    looks_ahead=st.booleans(),
)
clusters = st.builds(
    Cluster,
    decode=st.lists(engines, min_size=1, max_size=3).map(tuple),
    prefill=st.lists(engines, max_size=2).map(tuple),
    latency=st.sampled_from([0.0, 0.02]),
    transfer_base=st.sampled_from([0.0, 0.01]),
    transfer_per_token=st.sampled_from([0.0, 1e-5]),
    routing=st.sampled_from(["round_robin", "least_loaded", "prefix"]),
)


@given(workload=workloads, cluster=clusters, seed=st.integers(0, 9), lanes=st.integers(0, 5))
@settings(max_examples=60)
def test_no_request_is_lost_and_no_pool_overflows(workload, cluster, seed, lanes):
    trace = generate_trace(workload, seed).limited(150 * 16)
    if trace.sessions:
        run_checked(trace, cluster, concurrency=lanes or None)


@given(
    workload=workloads,
    cluster=clusters,
    times=st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 2)), min_size=1, max_size=3),
)
@settings(max_examples=40)
def test_failures_lose_nobody(workload, cluster, times):
    trace = generate_trace(workload).limited(150 * 16)
    roles = ["decode", "prefill"] if cluster.prefill else ["decode"]
    failures = tuple(
        Failure(start, length, roles[index % len(roles)])
        for index, (start, length) in enumerate(times)
    )
    if trace.sessions:
        run_checked(trace, replace(cluster, failures=failures))


def test_the_same_seed_gives_the_same_result():
    cluster = Cluster(decode=(ENGINE, ENGINE), prefill=(ENGINE,), transfer_per_token=1e-5)
    workload = Workload(num_requests=50, num_input=300, num_turns=3, turn_input=50)
    reports = [simulate(generate_trace(workload, seed), cluster) for seed in (7, 7, 8)]
    assert reports[0] == reports[1] != reports[2]


# By hand


def arrivals(times, num_input=16, num_output=1) -> Trace:
    turn = Turn(num_input, num_output)
    return Trace("by hand", tuple(Session(start, (turn,)) for start in times))


def test_a_queue_by_hand():
    """Service takes 1 s, one at a time; arrivals at 0, 0.5, 0.5 and 9 wait 0, 0.5, 1.5 and 0."""
    spec = EngineSpec(ConstantSteps(1.0, 1.0), 100, 16, max_batch=1)
    report, jobs = run_checked(arrivals([0, 0.5, 0.5, 9]), Cluster(decode=(spec,)))
    assert [job.latency for job in jobs] == [1, 1.5, 2.5, 1]
    assert [job.started - job.sent for job in jobs] == [0, 0.5, 1.5, 0]
    assert report.duration == 10 and report.mean_present == pytest.approx(0.6)
    assert report.engines[0].busy_share == pytest.approx(0.4)


@pytest.mark.parametrize("load, tolerance", [(0.3, 0.05), (0.6, 0.05), (0.8, 0.1)])
def test_a_queue_with_random_arrivals_and_constant_service(load, tolerance):
    """M/D/1: the mean wait is ρ / (2 (1 − ρ)) services; and each wait follows Lindley's rule."""
    service = 0.1
    spec = EngineSpec(ConstantSteps(1.0, service), 10, 16, max_batch=1)
    workload = Workload(num_requests=30_000, rate=load / service, num_input=16, num_output=1)
    trace = generate_trace(replace(workload, spread=0.0))
    report = simulate(trace, Cluster(decode=(spec,)))
    wait, waits = 0.0, [0.0]
    for before, after in zip(trace.sessions, trace.sessions[1:], strict=False):
        wait = max(0.0, wait + service - (after.start - before.start))
        waits.append(wait)
    assert report.prefill_queue.mean == pytest.approx(sum(waits) / len(waits))
    assert report.prefill_queue.max == pytest.approx(max(waits))
    textbook = load * service / (2 * (1 - load))
    assert report.prefill_queue.mean == pytest.approx(textbook, rel=tolerance)


def test_decode_by_hand():
    """A prompt of 2 s and 4 more tokens of 0.5 s each; a second one shares the last steps."""
    spec = EngineSpec(ConstantSteps(0.5, 2.0), 100, 16, max_batch=2)
    report, jobs = run_checked(arrivals([0], num_output=5), Cluster(decode=(spec,)))
    assert (jobs[0].ttft, jobs[0].latency, jobs[0].tpot) == (2, 4, 0.5)
    # The second comes in the middle of a step: the step ends, then its prompt delays the first.
    _, jobs = run_checked(arrivals([0, 2.7], num_output=5), Cluster(decode=(spec,)))
    assert jobs[0].finished == 3.0 + 2.5 + 0.5
    assert jobs[1].started == 3.0 and jobs[1].first_token == 5.5
    assert jobs[1].finished == 5.5 + 4 * 0.5


def test_steps_grow_with_what_is_cached():
    """Step k of one sequence takes 1 + 0.01 · (16 + k) s."""
    spec = EngineSpec(ConstantSteps(1.0, 0.0, 0.01), 100, 16)
    _, jobs = run_checked(arrivals([0], num_output=11), Cluster(decode=(spec,)))
    assert jobs[0].latency == pytest.approx(sum(1 + 0.01 * (16 + k) for k in range(10)))


def test_prefill_and_decode_apart_by_hand():
    """2 s prompt, 0.1 + 16 · 0.01 s on the way, then every token out of a decode step."""
    prefill = EngineSpec(ConstantSteps(9.0, 2.0), 100, 16)
    decode = EngineSpec(ConstantSteps(0.5, 9.0), 100, 16)
    cluster = Cluster((decode,), (prefill,), transfer_base=0.1, transfer_per_token=0.01)
    _, jobs = run_checked(arrivals([0], num_output=4), cluster)
    assert jobs[0].joined == pytest.approx(2.26)
    assert jobs[0].ttft == pytest.approx(2.76) and jobs[0].latency == pytest.approx(4.26)
    # Two at once share the link into the engine, one after the other.
    _, jobs = run_checked(arrivals([0, 0], num_output=4), replace(cluster))
    assert [job.joined - job.prefilled for job in jobs] == pytest.approx([0.26, 0.52], abs=2.01)


def test_what_a_step_takes_anyway_counts_once():
    """Chunks of 3 s of which 1 s is the step's own: 3 + 2 s for two; 2 s beside an answer."""
    steps = ConstantSteps(0.5, 3.0, fixed=1.0)
    spec = EngineSpec(steps, 100, 16, max_batch=2)
    _, jobs = run_checked(arrivals([0, 0], num_output=2), Cluster(decode=(spec,)))
    assert [job.first_token for job in jobs] == [5, 5]
    _, jobs = run_checked(arrivals([0, 3.2], num_output=3), Cluster(decode=(spec,)))
    assert jobs[1].started == 3.5 and jobs[1].first_token == 3.5 + 2.0 + 0.5


def test_acceptance_divides_the_steps():
    for acceptance, steps in ((1.0, 12), (2.0, 6), (2.99, 5), (100.0, 1)):
        spec = EngineSpec(ConstantSteps(1.0, 0.0), 100, 16, acceptance=acceptance)
        _, jobs = run_checked(arrivals([0], num_output=13), Cluster(decode=(spec,)))
        assert jobs[0].latency == steps


def test_memory_admits_as_many_as_fit():
    """Pages for two of three: the third waits for one of them to end."""
    spec = EngineSpec(ConstantSteps(1.0, 0.0), num_pages=4, page_tokens=16)
    _, jobs = run_checked(arrivals([0, 0, 0], 16, 11), Cluster(decode=(spec,)))
    assert [job.finished for job in jobs] == [10, 10, 20]


def test_the_cliff():
    """A little more than fits, and the time to the first token jumps by a whole answer."""
    spec = EngineSpec(ConstantSteps(1.0, 0.0), num_pages=40, page_tokens=16, max_batch=99)
    fits, one_more = (
        simulate(arrivals([0] * count, 16, 101), Cluster(decode=(spec,))) for count in (5, 6)
    )
    assert fits.ttft.max == 0 and one_more.ttft.max == 100


# Prefix cache


def conversation(turns: int) -> Trace:
    steps = [Turn(64 * (k + 1), 10, tuple(range(k + 1))) for k in range(turns)]
    return Trace("conversation", (Session(0.0, tuple(steps)),), 64)


def test_an_endless_cache_hits_what_the_trace_shares():
    trace = conversation(6)
    spec = replace(ENGINE, page_tokens=64, num_pages=1000)
    report, jobs = run_checked(trace, Cluster(decode=(spec,)))
    hits = hit_tokens(trace, 64)
    assert sum(job.cached_tokens for job in jobs) == hits == 64 * (1 + 2 + 3 + 4 + 5)
    assert report.hit_rate == pytest.approx(hits / (64 * 21))


def test_larger_pages_hit_less():
    """DCP makes the grain of the cache larger: two blocks to a page."""
    trace = conversation(6)
    for page_tokens, wanted in ((128, 128 + 128 + 256 + 256), (32, hit_tokens(trace, 64))):
        spec = replace(ENGINE, page_tokens=page_tokens, num_pages=1000)
        _, jobs = run_checked(trace, Cluster(decode=(spec,)))
        assert sum(job.cached_tokens for job in jobs) == wanted == hit_tokens(trace, page_tokens)


def test_a_full_hit_still_computes_the_last_token():
    turn = Turn(128, 4, (1, 2))
    trace = Trace("again", (Session(0.0, (turn, turn)),), 64)
    spec = replace(ENGINE, page_tokens=64, num_pages=100)
    _, jobs = run_checked(trace, Cluster(decode=(spec,)))
    assert [job.cached_tokens for job in jobs] == [0, 127]


def test_what_is_evicted_comes_back_from_the_host():
    """Three conversations in turn, room for one: without a host tier nothing is left."""
    prompts = [Turn(640, 1, tuple(range(100 * k, 100 * k + 10))) for k in range(3)]
    sessions = tuple(Session(float(10 * k), (prompts[k % 3],)) for k in range(6))
    trace = Trace("turns", sessions, 64)
    hits = []
    for host_pages in (0, 100):
        spec = replace(ENGINE, page_tokens=64, num_pages=12, host_pages=host_pages)
        report, _ = run_checked(trace, Cluster(decode=(spec,)))
        hits.append(report.hit_rate)
    assert hits[0] == 0 and hits[1] == pytest.approx(3 * 639 / (6 * 640))


def test_routing_by_prefix_finds_what_an_engine_has():
    """Two sessions in turns: round robin sends every second turn to the wrong engine."""
    turns = [conversation(8).sessions[0].turns, conversation(8).sessions[0].turns]
    shifted = [replace(t, blocks=tuple(b + 1000 for b in t.blocks)) for t in turns[1]]
    sessions = (Session(0.0, turns[0]), Session(0.01, tuple(shifted)), Session(0.02, turns[0][:1]))
    trace = Trace("three", sessions, 64)
    spec = replace(ENGINE, page_tokens=64, num_pages=1000)
    rates = {}
    for routing in ("round_robin", "least_loaded", "prefix"):
        report, _ = run_checked(trace, Cluster(decode=(spec, spec), routing=routing))
        rates[routing] = report.hit_rate
    assert rates["prefix"] >= max(rates.values())


def test_a_decode_engine_keeps_prefixes_too():
    """What it has is not sent again."""
    trace = conversation(4)
    spec = replace(ENGINE, page_tokens=64, num_pages=1000)
    report, _ = run_checked(trace, Cluster((spec,), (spec,), transfer_per_token=1e-5))
    assert report.transferred_tokens == 64 * 4


# Limits


def test_a_sequence_that_fits_nowhere_is_refused_with_how_much():
    cluster = Cluster(decode=(EngineSpec(STEPS, 10, 16),))
    with pytest.raises(ConfigError, match="41 tokens too long"):
        simulate(arrivals([0], 200, 1), cluster)
    simulate(arrivals([0], 159, 1), cluster)


@pytest.mark.parametrize("lanes", [0, -1])
def test_concurrency_is_counted(lanes):
    with pytest.raises(ConfigError, match="concurrency"):
        simulate(arrivals([0]), Cluster(decode=(ENGINE,)), concurrency=lanes)


def test_clusters_that_make_no_sense():
    with pytest.raises(ConfigError, match="has a decode engine"):
        Cluster(decode=())
    with pytest.raises(ConfigError, match="engine of the cluster"):
        Cluster(decode=(ENGINE,), failures=(Failure(1, 1, "prefill"),))


def test_closed_loops_have_as_many_at_once():
    trace = arrivals([0] * 20, 16, 11)
    spec = EngineSpec(ConstantSteps(1.0, 0.0), 1000, 16)
    report = simulate(trace, Cluster(decode=(spec,)), concurrency=4)
    assert report.duration == 50 and report.mean_present == pytest.approx(4)


def test_objectives_are_counted():
    spec = EngineSpec(ConstantSteps(1.0, 1.0), 100, 16, max_batch=1)
    trace = arrivals([0, 0, 0, 0])
    for ttft, share in ((0.5, 0), (1, 0.25), (3, 0.75), (math.inf, 1)):
        report = simulate(trace, Cluster(decode=(spec,)), objective=Objective(ttft=ttft))
        assert report.good_share == share
    with pytest.raises(ConfigError, match="above 0"):
        Objective(ttft=0)


def test_percentiles_are_nearest_ranks():
    values = [float(v) for v in range(1, 11)]
    assert [percentile(values, p) for p in (1, 10, 11, 50, 90, 99, 100)] == [1, 1, 2, 5, 9, 10, 10]


def test_twelve_thousand_requests_are_simulated_in_seconds():
    """The size of the Mooncake trace. The limit is far above what it takes, a few seconds."""
    workload = Workload(num_requests=12_031, rate=3.4, num_input=12_035, num_output=343)
    trace = generate_trace(workload)
    steps = RecordedSteps((0.012, 2e-4, 1e-9), (0.005, 4e-5, 1e-10))
    spec = EngineSpec(steps, 20_000, 512, acceptance=2.99, chunk=8192)
    began = time.process_time()
    report = simulate(trace, Cluster((spec,), (spec,)))
    assert report.num_requests == 12_031
    assert time.process_time() - began < 60
