"""Compiled programs by their content: the program's bytes, the options and the compiler.

::

    KEY[:2]/KEY/            an entry: entry.json, model.neff, attempt-1/ (logs), attempt-2/ …
    failed/KEY/             logs of the last time that it did not compile
    work/KEY-…/             being compiled, or left behind by a driver that was killed
    locks/KEY               held by the process that compiles; the kernel frees it with the process

An entry appears by one rename, after its files are on disk: it is there whole or not at all, also
after ``kill -9``. What happens to it later is found by size and SHA-256. Several processes may
share a folder of one machine; on a network file system, if that has ``flock`` and atomic renames.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import platformdirs
import psutil

from neuron.attempt import Attempt
from neuron.compiler import NEFF_FILE, Compiler
from neuron.errors import CompilerError, ManifestError
from neuron.files import file_sha256, sha256

_ENTRY_FILE = "entry.json"
_FORMAT = 1
_LOOK_SECONDS = 0.1


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is known about a cached NEFF. ``attempts``: the last one made it."""

    format: int = _FORMAT
    key: str
    program_sha256: str
    arguments: tuple[str, ...]
    compiler: str
    neff_bytes: int
    neff_sha256: str
    attempts: tuple[Attempt, ...]


def default_folder() -> Path:
    return Path(platformdirs.user_cache_dir("dcpjax")) / "neff"


def entry_key(program: bytes, arguments: Sequence[str], compiler: Compiler) -> str:
    """Equal for equal programs, options and compilers, and for nothing else."""
    parts = {
        "format": _FORMAT,
        "program": sha256(program),
        "arguments": list(arguments),
        "compiler": str(compiler),
    }
    return sha256(msgspec.json.encode(parts, order="sorted"))


@contextlib.contextmanager
def writing_cache(folder: Path) -> Iterator[None]:
    """Say of which folder it was where something cannot be written: no rights, no space."""
    try:
        yield
    except OSError as error:
        raise CompilerError(
            "the cache folder can be written", folder=str(folder), why=str(error)
        ) from error


class NeffCache:
    """The entries below one folder."""

    def __init__(self, folder: Path) -> None:
        """Make the folder where it is not there.

        Raises:
            CompilerError: it cannot be made.
        """
        self.folder = folder
        with writing_cache(folder):
            for name in ("work", "locks", "failed"):
                (folder / name).mkdir(parents=True, exist_ok=True)

    def neff_path(self, key: str) -> Path:
        return self._entry_folder(key) / NEFF_FILE

    def read(self, key: str) -> Entry | None:
        """The entry, whose NEFF is as it was written; None where there is none.

        Raises:
            ManifestError: the entry is damaged.
        """
        folder = self._entry_folder(key)
        if not folder.is_dir():
            return None
        try:
            entry = msgspec.json.decode((folder / _ENTRY_FILE).read_bytes(), type=Entry)
            size = self.neff_path(key).stat().st_size
        except (OSError, msgspec.DecodeError) as error:
            raise ManifestError(
                "a cached NEFF has its file and its description", folder=str(folder), why=str(error)
            ) from error
        if (entry.key, entry.format) != (key, _FORMAT):
            raise ManifestError("a cached NEFF is described by its own entry", folder=str(folder))
        written, found = entry.neff_bytes, size
        if found == written:  # then it is worth to read all of it
            written, found = entry.neff_sha256, file_sha256(self.neff_path(key))
        if found != written:
            raise ManifestError(
                "a cached NEFF is as the compiler wrote it",
                folder=str(folder),
                written=written,
                found=found,
            )
        return entry

    def discard(self, key: str) -> None:
        """Forget an entry. The caller holds its lock."""
        with self.work_folder(key) as work:
            self._entry_folder(key).rename(work / "damaged")

    def store(self, work: Path, entry: Entry) -> None:
        """Make an entry of a work folder that has NEFF_FILE. The caller holds its lock."""
        (work / _ENTRY_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(entry)))
        for name in (_ENTRY_FILE, NEFF_FILE):
            _sync(work / name)
        target = self._entry_folder(entry.key)
        target.parent.mkdir(exist_ok=True)
        _sync(work)
        work.rename(target)
        _sync(target.parent)

    def keep_failure(self, key: str, work: Path) -> Path:
        """Keep the logs of a program that did not compile; the folder where they are."""
        kept = self.folder / "failed" / key
        shutil.rmtree(kept, ignore_errors=True)
        work.rename(kept)
        return kept

    @contextlib.contextmanager
    def lock(self, key: str, stop: threading.Event, on_wait: Callable[[], None]) -> Iterator[None]:
        """Be the only one, of all threads and processes, that makes this entry.

        Args:
            on_wait: is called if another one is at it.

        Raises:
            CompilerError: ``stop`` was set while another one had it.
        """
        with (self.folder / "locks" / key).open("wb") as file:
            has_lock = _try_lock(file.fileno())
            if not has_lock:
                on_wait()
            while not (has_lock or _try_lock(file.fileno())):
                if stop.wait(_LOOK_SECONDS):
                    raise CompilerError("another process compiles this program", key=key)
            self._remove_abandoned(key)
            yield

    @contextlib.contextmanager
    def work_folder(self, key: str) -> Iterator[Path]:
        """A folder on the cache's file system, gone afterwards unless it was renamed. The caller
        holds the lock."""
        work = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=self.folder / "work"))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _entry_folder(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def _remove_abandoned(self, key: str) -> None:
        """Remove what a killed driver has left, its compiler included, which may still run."""
        for work in (self.folder / "work").glob(f"{key}-*"):
            _end_processes_in(work)
            shutil.rmtree(work, ignore_errors=True)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _end_processes_in(folder: Path) -> None:
    """End the processes whose working directory is inside a folder that nobody owns any more."""
    for process in psutil.process_iter(["cwd"]):
        cwd = process.info["cwd"]  # None where it may not be known
        if cwd and Path(cwd).is_relative_to(folder.resolve()):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.send_signal(signal.SIGKILL)


def _sync(path: Path) -> None:
    """Have a file's or folder's content on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
