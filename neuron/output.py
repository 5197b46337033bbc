"""The folder that ``neuron.compile`` fills: programs, NEFFs, logs, and the manifest last.

::

    manifest.json
    NAME.hlo_module.pb        what the compiler reads
    NAME.neff
    logs/NAME/attempt-1/      what the compiler wrote, of each attempt
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from neuron.errors import ManifestError
from neuron.files import file_sha256, replacing, write_atomically
from neuron.jobs import Compiled, Failed
from neuron.manifest import (
    MANIFEST_FILE,
    Neff,
    ProgramRecord,
    record_program,
)
from neuron.program import Program


@contextlib.contextmanager
def open_output(folder: Path) -> Iterator[None]:
    """Make the folder, and be the only one that writes there.

    A manifest of an earlier run goes first, as its files are about to change: without a manifest
    nothing in the folder counts.

    Raises:
        ManifestError: another process writes there, or something cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            _lock(descriptor, folder)
            (folder / MANIFEST_FILE).unlink(missing_ok=True)
            yield
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ManifestError(
            "the output folder can be written", folder=str(folder), why=str(error)
        ) from error


def _lock(descriptor: int, folder: Path) -> None:
    """Until the descriptor is closed; the kernel does it where a process is killed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ManifestError(
            "one run at a time writes an output folder: wait for the other one, or take another",
            folder=str(folder),
        ) from error


def write_programs(programs: Sequence[Program], folder: Path) -> list[tuple[ProgramRecord, bytes]]:
    """Write the programs; what the manifest says about each, and its bytes.

    Raises:
        ManifestError: two programs have one name.
    """
    written: dict[str, tuple[ProgramRecord, bytes]] = {}
    for program in programs:
        if program.name in written:
            raise ManifestError("programs have different names", repeated=program.name)
        hlo = program.to_bytes()
        record = record_program(program, hlo)
        write_atomically(folder / record.hlo_file, hlo)
        written[program.name] = record, hlo
    return list(written.values())


def add_result(record: ProgramRecord, result: Compiled | Failed, folder: Path) -> ProgramRecord:
    """Copy a NEFF and the logs beside its program, and say so in its record."""
    if isinstance(result, Failed):
        _copy_logs(result.logs, folder / "logs" / record.name)
        return msgspec.structs.replace(record, failure=result.failure)
    entry, file = result.entry, f"{record.name}.neff"
    _copy_logs(result.neff.parent, folder / "logs" / record.name)
    _copy_neff(result.neff, folder / file, entry.neff_sha256)
    neff = Neff(
        file=file,
        num_bytes=entry.neff_bytes,
        sha256=entry.neff_sha256,
        arguments=entry.arguments,
        compiler=entry.compiler,
        cache_key=entry.key,
        attempts=entry.attempts,
    )
    return msgspec.structs.replace(record, neff=neff)


def _copy_neff(source: Path, target: Path, sha256: str) -> None:
    """A copy, so that neither of the two changes with the other."""
    with replacing(target) as temporary:
        shutil.copyfile(source, temporary)
        found = file_sha256(temporary)
        if found != sha256:
            raise ManifestError(
                "a NEFF is copied as it is", path=str(target), written=sha256, found=found
            )


def _copy_logs(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for attempt in sorted(source.glob("attempt-*")):
        shutil.copytree(attempt, target / attempt.name)
