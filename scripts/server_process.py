"""A ``dcpjax`` server process as a script sees it: started, measured, sent signals, ended."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

READY = "ready: "
STOP_SECONDS = 90.0


class ServerEnded(Exception):
    """The server ended before it was ready; its own message stands on standard error."""


class ServerProcess:
    """``dcpjax`` with the arguments of a server. What it writes goes to our standard error."""

    def __init__(self, arguments: Sequence[str]) -> None:
        program = str(Path(sys.executable).with_name("dcpjax"))
        self._command = [program, *arguments]
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this script alone, which ends the server
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._streams = (self._process.stdout, self._process.stderr)
        self._copiers: list[threading.Thread] = []
        self.num_tracebacks = 0
        self._copy(self._process.stderr)

    def _copy(self, stream: IO[str]) -> None:
        """Pass on, in a thread, all that comes: a full pipe would stop the server."""

        def copy() -> None:
            for line in stream:
                self.num_tracebacks += line.startswith("Traceback")
                sys.stderr.write(line)

        self._copiers.append(threading.Thread(target=copy, daemon=True))
        self._copiers[-1].start()

    def wait_until_ready(self) -> str:
        """The server's URL, without a path.

        Raises:
            ServerEnded: it could not start.
        """
        stdout = self._streams[0]
        for line in stdout:
            sys.stderr.write(line)
            if line.startswith(READY):
                self._copy(stdout)
                return line.partition(" at ")[2].split()[0].removesuffix("/v1")
        raise ServerEnded(" ".join(self._command))

    def rss_bytes(self) -> int:
        """Memory of the process that is in RAM now."""
        status = Path(f"/proc/{self._process.pid}/status")
        if status.exists():  # on Linux, where small containers have no ps
            (line,) = re.findall(r"^VmRSS:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
            return 1024 * int(line)
        command = ["ps", "-o", "rss=", "-p", str(self._process.pid)]
        return 1024 * int(subprocess.run(command, capture_output=True, check=True).stdout)

    def send(self, number: signal.Signals) -> None:
        """A signal, unless the process has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it without a chance to say anything to anybody."""
        self.send(signal.SIGKILL)
        self._wait()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait, and only then kill; more than once is fine. The exit code."""
        self.send(number)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return self._wait()

    def _wait(self) -> int:
        code = self._process.wait()
        for copier in self._copiers:
            copier.join()
        for stream in self._streams:
            stream.close()
        return code


@contextlib.contextmanager
def running_server(model: str, options: Sequence[str]) -> Iterator[tuple[ServerProcess, str]]:
    """An engine's server on a port of its own choice that is ready, and its URL. It is stopped on
    every way out.

    Raises:
        ServerEnded: it could not start.
    """
    server = ServerProcess(["serve", model, "--port", "0", *options])
    try:
        yield server, server.wait_until_ready()
    finally:
        server.stop()
