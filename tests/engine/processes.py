"""Engines of several real processes on this host, and what became of each process."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "tests" / "assets" / "engine_process.py"
PATIENCE = 100.0  # seconds until a test that waits for a process gives up
Json = dict[str, Any]


class EngineProcess:
    """A process that says JSON lines on its standard output."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._said: queue.Queue[str | None] = queue.Queue()
        self.errors = ""
        self._threads = [threading.Thread(target=read) for read in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._said.put(line)
        self._said.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            self.errors = lines.read()

    def hear(self, name: str) -> Json:
        """The next line that is JSON and has ``name``; what the process says before is skipped."""
        while True:
            with contextlib.suppress(ValueError):  # other libraries write lines of their own
                said = json.loads(self.hear_line(""))
                if isinstance(said, dict) and name in said:
                    return said

    def hear_line(self, start: str) -> str:
        """The next line that begins so."""
        while (line := self._said.get(timeout=PATIENCE)) is not None:
            if line.startswith(start):
                return line
        raise AssertionError(f"the process ended, code {self.end()}: {self.errors}")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        """Wait until the process has ended; its exit code."""
        code = self._process.wait(PATIENCE)
        for thread in self._threads:
            thread.join()
        return code

    def close(self) -> None:
        """Be rid of it."""
        if self._process.poll() is None:
            self._process.kill()
        self.end()


@contextlib.contextmanager
def running_engine(
    model: Path,
    settings: Mapping[str, Any],
    *,
    nnodes: int = 2,
    cache: Path,
    specs: Mapping[int, Json] | None = None,
) -> Iterator[list[EngineProcess]]:
    """The processes of one engine, all started and none waited for.

    Args:
        cache: where programs are kept that one of them compiles.
        specs: by node rank, what a process does beside, see ``tests/assets/engine_process.py``;
            its "settings" are for this process alone.
    """
    shared = {**settings, "nnodes": nnodes, "master_port": free_port()}
    commands: list[list[str]] = []
    for rank in range(nnodes):
        spec = dict((specs or {}).get(rank, {}))
        own = {**shared, "node_rank": rank, **spec.pop("settings", {})}
        spec = {"model": str(model), **spec, "settings": own}
        commands.append([sys.executable, str(SCRIPT), json.dumps(spec)])
    with running(commands, cache) as processes:
        yield processes


@contextlib.contextmanager
def running(commands: Sequence[Sequence[str]], cache: Path) -> Iterator[list[EngineProcess]]:
    """These processes, which are gone at the end."""
    with contextlib.ExitStack() as ends:
        processes = []
        for command in commands:
            processes.append(EngineProcess(command, environment(cache)))
            ends.callback(processes[-1].close)
        yield processes


def environment(cache: Path) -> dict[str, str]:
    """Of a process that runs the package of this tree on CPU devices."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def free_port() -> int:
    """One on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
