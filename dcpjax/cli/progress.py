"""What a user sees while an engine loads and compiles."""

import threading
import time

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_SECONDS = 5.0
"""Elsewhere than on a terminal, the longest silence."""


class LoadingProgress:
    """Shows on standard error what is loaded or compiled: bars on a terminal, lines elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._shown = _Bars(console) if console.is_terminal else _Lines(LINE_SECONDS)

    def __enter__(self) -> "LoadingProgress":
        self._shown.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._shown.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        self._shown.show(what, done, total)


class _Bars:
    """One bar on a terminal, with a clock that goes on by itself."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("loading", total=None)
        self.start, self.stop = self._progress.start, self._progress.stop

    def show(self, what: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=what, completed=done, total=total)


class _Lines:
    """A line for each new thing, and one whenever ``seconds`` have passed without a line.

    One program may take longer than that to compile without a word from the engine, so the second
    kind of line comes from a thread.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._started = time.monotonic()
        self._what, self._reached, self._last_line = "", "start", "start"
        self._lock = threading.Lock()
        self._wakes = threading.Event()  # a line was written, or all is over
        self._is_over = False
        self._thread = threading.Thread(target=self._break_silences, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over = True
        self._wakes.set()
        self._thread.join()

    def show(self, what: str, done: int, total: int) -> None:
        with self._lock:
            self._reached = f"{what} ({done}/{total})"
            if what != self._what:
                self._what = what
                self._write(self._reached)
                self._wakes.set()

    def _break_silences(self) -> None:
        while not self._is_over:
            if self._wakes.wait(self._seconds):
                self._wakes.clear()
                continue
            with self._lock:
                is_new = self._reached != self._last_line
                self._write(self._reached if is_new else f"still at {self._reached}")

    def _write(self, line: str) -> None:
        seconds = time.monotonic() - self._started
        click.echo(f"[{seconds:6.1f} s] {line}", err=True)
        self._last_line = self._reached
