"""One run of the compiler, in a folder of its own: it ends, or is ended, and leaves its logs.

Says why there is no NEFF instead of raising, so that a run can be repeated, counted and shown.
"""

import gzip
import os
import signal
import subprocess
import tarfile
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from neuron.compiler import (
    HLO_FILE,
    LOG_FILE,
    NEFF_FILE,
    Compiler,
    child_environment,
    command,
)

OUTPUT_FILE = "output.txt"
"""What the compiler wrote to its standard output and error."""
TAIL_LINES = 25

_KEPT = {NEFF_FILE, LOG_FILE, OUTPUT_FILE}
_LOOK_SECONDS = 0.1
_TAIL_BYTES = 64 * 1024
_NEFF_HEADER = 1024
_CHUNK = 1 << 20
_GZIP, _TAR, _TAR_AT = b"\x1f\x8b", b"ustar", 257


class Attempt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one run ended. ``failure`` is None where it made a NEFF; a negative ``exit_code`` is the
    signal that ended it, None that it never started."""

    failure: str | None
    exit_code: int | None
    seconds: float


@dataclass(frozen=True)
class Call:
    """What is run. ``timeout`` is in seconds; ``environ`` is the one of the driver."""

    compiler: Compiler
    arguments: Sequence[str]
    target: str
    timeout: float
    environ: Mapping[str, str]


def run_attempt(call: Call, program: bytes, folder: Path, stop: threading.Event) -> Attempt:
    """Compile a program in a new folder, and leave there its logs and, if it worked, NEFF_FILE.

    Args:
        stop: ends the run when it is set.
    """
    folder.mkdir(parents=True)
    (folder / HLO_FILE).write_bytes(program)
    started = time.monotonic()
    exit_code, failure = _run(call, folder, stop)
    if failure is None:
        failure = find_damage(folder / NEFF_FILE)
    _remove_litter(folder)
    return Attempt(failure, exit_code, round(time.monotonic() - started, 3))


def _run(call: Call, folder: Path, stop: threading.Event) -> tuple[int | None, str | None]:
    with (folder / OUTPUT_FILE).open("wb") as output:
        try:
            process = subprocess.Popen(
                command(call.compiler, call.arguments),
                cwd=folder,
                env=child_environment(call.environ, call.target),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # one group, to be ended with its own children
            )
        except OSError as error:
            return None, f"could not be started: {error}"
    ended_for = _wait(process, time.monotonic() + call.timeout, stop)
    exit_code = process.wait()
    if ended_for is not None:
        return exit_code, ended_for.format(call.timeout)
    if exit_code < 0:
        return exit_code, f"was ended by signal {-exit_code} ({_signal_name(-exit_code)})"
    return exit_code, f"ended with exit code {exit_code}" if exit_code else None


def _wait(process: "subprocess.Popen[bytes]", deadline: float, stop: threading.Event) -> str | None:
    """Wait for the end; why the process group was ended, or None if it ended by itself."""
    try:
        while True:
            try:
                process.wait(_LOOK_SECONDS)
                return None
            except subprocess.TimeoutExpired:
                if stop.is_set():
                    return "was stopped"
                if time.monotonic() > deadline:
                    return "took longer than {:g} s"
    finally:
        _end_group(process)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End the compiler and what it has started and left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else "unknown"


def _remove_litter(folder: Path) -> None:
    """Remove what the compiler leaves in its working directory, which may be gigabytes."""
    for path in sorted(folder.rglob("*"), reverse=True):  # what is inside a folder comes first
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        elif path.parent != folder or path.name not in _KEPT:
            path.unlink()


def find_damage(neff: Path) -> str | None:
    """Why this cannot be a whole NEFF; None where nothing speaks against it.

    A NEFF is a header of 1024 bytes and an archive. What is known to be an archive is read to its
    end; another container is not understood here and passes.
    """
    if not neff.is_file():
        return "said that it passed and wrote no NEFF"
    size = neff.stat().st_size
    if size <= _NEFF_HEADER:
        return f"wrote a NEFF of {size} bytes, which is not longer than its header"
    with neff.open("rb") as file:
        file.seek(_NEFF_HEADER)
        start = file.read(_TAR_AT + len(_TAR))
        file.seek(_NEFF_HEADER)
        try:
            if start.startswith(_GZIP):
                _read_gzip(file)
            elif start.endswith(_TAR):
                _read_tar(file)
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            return f"wrote a torn NEFF of {size} bytes: {error}"
    return None


def _read_gzip(file: BinaryIO) -> None:
    """Read to the checksum at the end."""
    with gzip.open(file) as content:
        while content.read(_CHUNK):
            pass


def _read_tar(file: BinaryIO) -> None:
    """Read every member to its end."""
    with tarfile.open(fileobj=file, mode="r|") as archive:
        for _ in archive:
            pass


def log_tail(folder: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of what a run wrote: its standard output, then its log."""
    parts: list[str] = []
    for name in (OUTPUT_FILE, LOG_FILE):
        text = _end_of(folder / name).strip()
        if text:
            parts += [f"{name}:", *(f"  {line}" for line in text.splitlines()[-lines:])]
    return "\n".join(parts) or "it wrote nothing"


def _end_of(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
