"""A ``dcpjax serve`` process as a script sees it: started, measured, ended by a signal."""

import contextlib
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
    """A server that is ready. ``url`` has no path; ``num_tracebacks`` counts those in its log."""

    def __init__(self, model: str, options: Sequence[str]) -> None:
        program = str(Path(sys.executable).with_name("dcpjax"))
        self._process = subprocess.Popen(
            [program, "serve", model, "--port", "0", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this script alone, which ends the server
        )
        self.num_tracebacks = 0
        assert self._process.stdout is not None and self._process.stderr is not None
        self._copier = threading.Thread(
            target=self._copy_log, args=(self._process.stderr,), daemon=True
        )
        self._copier.start()
        self.url = ""
        for line in self._process.stdout:
            if line.startswith(READY):
                self.url = line.partition(" at ")[2].split()[0].removesuffix("/v1")
                break

    def _copy_log(self, log: IO[str]) -> None:
        for line in log:
            self.num_tracebacks += line.startswith("Traceback")
            sys.stderr.write(line)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def rss_bytes(self) -> int:
        """Memory of the process that is in RAM now."""
        command = ["ps", "-o", "rss=", "-p", str(self._process.pid)]
        return 1024 * int(subprocess.run(command, capture_output=True, check=True).stdout)

    def stop(self) -> int:
        """Send SIGTERM, wait, and only then kill. The exit code."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        code = self._process.wait()
        self._copier.join()
        return code


@contextlib.contextmanager
def running_server(model: str, options: Sequence[str]) -> Iterator[ServerProcess]:
    """A server that is ready, and stopped on every way out.

    Raises:
        ServerEnded: it could not start.
    """
    server = ServerProcess(model, options)
    try:
        if not server.url:
            raise ServerEnded(" ".join(["dcpjax serve", model, *options]))
        yield server
    finally:
        server.stop()
