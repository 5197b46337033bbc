"""What a user sees while an engine loads and compiles."""

import time

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class LoadingProgress:
    """Shows on standard error what is loaded or compiled: bars on a terminal, lines elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._is_live = console.is_terminal
        self._last = ""
        self._started = time.monotonic()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not self._is_live,
        )
        self._task = self._bars.add_task("loading", total=None)

    def __enter__(self) -> "LoadingProgress":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._is_live:
            self._bars.update(self._task, description=what, completed=done, total=total)
        elif what != self._last:
            seconds = time.monotonic() - self._started
            click.echo(f"[{seconds:6.1f} s] {what} ({done}/{total})", err=True)
        self._last = what
