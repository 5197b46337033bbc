"""What signals do to ``dcpjax serve`` as a process that follows another one."""

import signal
import time
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from dcpjax import llm
from dcpjax.cli import following, main

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a follower that does what the test wants instead of following."""

    def run(follow: Callable[[], None], seconds: float = 0.0) -> Result:
        monkeypatch.setattr(llm, "load_follower", lambda config, progress: follow)
        words = ["-tp", "2", "--nnodes", "2", "--node-rank", "1", "--shutdown-timeout"]
        return CliRunner().invoke(main, ["serve", "m", *words, str(seconds)])

    return run


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (*BOTH, signal.SIGALRM)]


@pytest.mark.parametrize("number", BOTH)
def test_a_follower_that_is_told_to_leave_waits_for_the_leader(run, number: signal.Signals):
    before = handlers()

    def follow() -> None:
        signal.raise_signal(number)  # and then the leader ends the engine

    result = run(follow, 30.0)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[-1].startswith(f"{number.name}: waits up to 70 s")
    assert handlers() == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@pytest.mark.parametrize("second", BOTH)
def test_a_second_signal_ends_it(run, second: signal.Signals):
    before, seen = handlers(), []

    def follow() -> None:
        signal.raise_signal(signal.SIGTERM)
        try:
            signal.raise_signal(second)
        finally:  # the third one would do what it does by default
            seen.extend(handlers()[:2])

    result = run(follow, 30.0)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "Error: SIGTERM came, and a second signal"
    assert seen == [signal.SIG_DFL, signal.SIG_DFL]
    assert handlers() == before


def test_a_follower_does_not_wait_for_ever(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(following, "EXTRA_SECONDS", 0.0)

    def follow() -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(60)  # the leader does not end the engine

    result = run(follow)
    assert result.exit_code == 1
    assert "SIGTERM came, and the process with node rank 0 has not ended" in result.stderr


def test_without_a_signal_nothing_is_said(run):
    result = run(lambda: None)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "ready: process 1 of 2 follows the first one\n"
