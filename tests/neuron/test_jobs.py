"""Many programs: none keeps the others from a NEFF, and every attempt is counted."""

import time
from pathlib import Path

import pytest

from neuron.cache import NeffCache
from neuron.compiler import CompilerFlags, find_compiler
from neuron.errors import CompilerError
from neuron.jobs import GIB, Compiled, Driver, Failed, compile_all, default_workers
from tests.neuron.fake_compiler import FakeCompiler, compile_one, job


@pytest.fixture
def fake(tmp_path: Path) -> FakeCompiler:
    return FakeCompiler(tmp_path / "fake")


@pytest.fixture
def cache(tmp_path: Path) -> NeffCache:
    return NeffCache(tmp_path / "cache")


def test_the_second_time_comes_from_the_cache(fake: FakeCompiler, cache: NeffCache) -> None:
    first, second = compile_one(fake, cache, "pass"), compile_one(fake, cache, "pass")
    assert isinstance(first, Compiled) and isinstance(second, Compiled)
    assert (first.state, second.state) == ("compiled", "cached")
    assert first.entry == second.entry and first.neff == second.neff
    assert len(fake.calls) == 1


def test_other_options_are_another_entry(fake: FakeCompiler, cache: NeffCache) -> None:
    for level in (1, 2):
        compile_one(fake, cache, "pass", flags=CompilerFlags("trn2", 2, level))
    assert len(fake.calls) == 2


def test_a_failure_is_not_cached(fake: FakeCompiler, cache: NeffCache) -> None:
    for _ in range(2):
        failed = compile_one(fake, cache, "fail")
        assert isinstance(failed, Failed)
        assert failed.failure == "ended with exit code 70"
    assert len(fake.calls) == 2


def test_there_is_one_attempt_unless_more_are_asked_for(
    fake: FakeCompiler, cache: NeffCache
) -> None:
    said: list[str] = []
    assert isinstance(compile_one(fake, cache, "fail_once", said), Failed)
    assert said == ["fail_once: attempt 1 of 1: ended with exit code 70"]


def test_a_retry_is_said_counted_and_kept(fake: FakeCompiler, cache: NeffCache) -> None:
    said: list[str] = []
    result = compile_one(fake, cache, "fail_once", said, attempts=3)
    assert isinstance(result, Compiled)
    assert said == ["fail_once: attempt 1 of 3: ended with exit code 70"]
    assert [attempt.failure for attempt in result.attempts] == ["ended with exit code 70", None]
    logs = {path.name for path in result.neff.parent.iterdir()}
    assert {"attempt-1", "attempt-2"} <= logs
    later = compile_one(fake, cache, "fail_once")
    assert isinstance(later, Compiled) and later.attempts == result.attempts


def test_attempts_come_to_an_end(fake: FakeCompiler, cache: NeffCache) -> None:
    said: list[str] = []
    result = compile_one(fake, cache, "die", said, attempts=3)
    assert isinstance(result, Failed) and len(result.attempts) == len(said) == len(fake.calls) == 3


def run_all(
    fake: FakeCompiler, cache: NeffCache, orders: list[str], workers: int
) -> tuple[Compiled | Failed, ...]:
    driver = Driver(find_compiler(str(fake.path)), cache, environ={})
    shown: list[Compiled | Failed] = []
    results = compile_all(
        driver,
        [job(order) for order in orders],
        workers=workers,
        report=lambda line: None,
        on_result=shown.append,
    )
    assert sorted(map(id, shown)) == sorted(map(id, results))
    return results


@pytest.mark.parametrize("workers", [1, 4])
def test_failures_do_not_stop_the_others(
    fake: FakeCompiler, cache: NeffCache, workers: int
) -> None:
    orders = ["fail", "pass", "torn", "passes_too", "die"]
    results = run_all(fake, cache, orders, workers)
    assert [result.job.name for result in results] == orders
    states = [result.state for result in results]
    assert states == ["failed", "compiled", "failed", "compiled", "failed"]


def test_equal_programs_are_compiled_once(fake: FakeCompiler, cache: NeffCache) -> None:
    results = run_all(fake, cache, ["pass"] * 4, workers=4)
    assert sorted(result.state for result in results) == ["cached"] * 3 + ["compiled"]
    assert len(fake.calls) == 1


def test_no_programs(fake: FakeCompiler, cache: NeffCache) -> None:
    assert run_all(fake, cache, [], workers=1) == ()


def test_a_bug_of_ours_ends_the_compilers_and_is_seen(fake: FakeCompiler, cache: NeffCache) -> None:
    def broken(result: Compiled | Failed) -> None:
        raise ZeroDivisionError

    driver = Driver(find_compiler(str(fake.path)), cache, environ={})
    started = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        compile_all(
            driver,
            [job("hang"), job("pass")],
            workers=2,
            report=lambda line: None,
            on_result=broken,
        )
    assert time.monotonic() - started < driver.timeout / 10  # the one that hangs was ended


@pytest.mark.parametrize(
    ("cores", "free_gib", "per_job_gib", "workers"),
    [(2, 8, 16, 1), (192, 2048, 16, 48), (192, 64, 16, 4), (192, 64, 64, 1), (8, 1000, 1, 2)],
)
def test_compilers_at_a_time_fit_into_the_machine(
    cores: int, free_gib: int, per_job_gib: int, workers: int
) -> None:
    found = default_workers(memory_per_job=per_job_gib * GIB, cores=cores, free=free_gib * GIB)
    assert found == workers


def test_this_machine_has_room_for_one() -> None:
    assert default_workers() >= 1


def test_wrong_settings(fake: FakeCompiler, cache: NeffCache) -> None:
    compiler = find_compiler(str(fake.path))
    with pytest.raises(CompilerError, match="attempts=0"):
        Driver(compiler, cache, attempts=0)
    with pytest.raises(CompilerError, match="timeout=0"):
        Driver(compiler, cache, timeout=0)
    with pytest.raises(CompilerError, match="memory"):
        default_workers(memory_per_job=0)
