"""``dcpjax serve`` with another node rank than 0: a process that follows until it need not."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NoReturn

import click

from dcpjax.cli.progress import LoadingProgress
from dcpjax.config import EngineConfig

EXTRA_SECONDS = 40.0
"""What a leader may need beyond its --shutdown-timeout: it aborts requests and flushes answers."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


class ToldToLeave(click.ClickException):
    """A signal ends this process, and with it the engine."""


def follow(config: EngineConfig, shutdown_timeout: float) -> None:
    """Load this process's part of the engine, and do what the leader says.

    Args:
        shutdown_timeout: the leader's, in seconds: so long its requests get to finish.

    Raises:
        ConfigError: a setting or a model file is wrong, or not the same on all processes.
        EngineDeadError: a process of the engine is gone or failed.
        ToldToLeave: by signals, and the leader did not end the engine.
    """
    from dcpjax.llm import load_follower

    with LoadingProgress() as progress:
        run = load_follower(config, progress)
    with patient(shutdown_timeout + EXTRA_SECONDS):
        click.echo(f"ready: process {config.node_rank} of {config.nnodes} follows the first one")
        run()


@contextlib.contextmanager
def patient(seconds: float) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM end nothing for so many seconds.

    Whoever stops all processes at once stops the leader too, which needs its followers for the
    requests that it still finishes. The second signal, or the time, raises ToldToLeave in the main
    thread, where this is used; further ones do what they do by default.
    """
    seconds = min(max(0.001, seconds), threading.TIMEOUT_MAX)  # 0 would be a timer that is off

    def first(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        wait = f"waits up to {seconds:.0f} s for the process with node rank 0 to end the engine"
        click.echo(f"{name}: {wait}; once more leaves at once", err=True)
        _handle(_SIGNALS, lambda *_: _leave(f"{name} came, and a second signal"))
        late = f"{name} came, and the process with node rank 0 has not ended the engine for"
        _handle([signal.SIGALRM], lambda *_: _leave(f"{late} {seconds:.0f} s"))
        signal.setitimer(signal.ITIMER_REAL, seconds)

    before = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGALRM)}
    _handle(_SIGNALS, first)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle(numbers: Iterable[signal.Signals], handler: Handler) -> None:
    for number in numbers:
        signal.signal(number, handler)


def _leave(reason: str) -> NoReturn:
    """Once: what follows is to end, whatever comes."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    _handle(_SIGNALS, signal.SIG_DFL)
    raise ToldToLeave(reason)
