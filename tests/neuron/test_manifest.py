"""A folder of programs is what its manifest says, or is refused with both values."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from neuron.attempt import Attempt
from neuron.compiler import CompilerFlags
from neuron.errors import ManifestError
from neuron.files import sha256
from neuron.manifest import (
    FORMAT,
    Manifest,
    Neff,
    ProgramRecord,
    Wanted,
    check_cores,
    load_manifest,
    record_program,
    write_manifest,
)
from tests.neuron.tiny_programs import INPUTS, OUTPUTS, program

NEFF = b"compiled"
ARGUMENTS = CompilerFlags("trn2", 2, 2).arguments((2, 27))


def neff_record(name: str, data: bytes = NEFF) -> Neff:
    return Neff(
        file=f"{name}.neff",
        num_bytes=len(data),
        sha256=sha256(data),
        arguments=ARGUMENTS,
        compiler="2.27.5334.0+abc",
        cache_key="ab" * 32,
        attempts=(Attempt("ended with exit code 70", 70, 0.5), Attempt(None, 0, 1.5)),
    )


def written(folder: Path) -> Manifest:
    """A folder with one compiled program and one that is not."""
    records: list[ProgramRecord] = []
    for name, is_compiled in (("decode_1x1_ctx64", True), ("prefill_1x32_ctx64", False)):
        made = program(name)
        hlo = made.to_bytes()
        record = record_program(made, hlo)
        (folder / record.hlo_file).write_bytes(hlo)
        if is_compiled:
            (folder / f"{name}.neff").write_bytes(NEFF)
            record = msgspec.structs.replace(record, neff=neff_record(name))
        records.append(record)
    manifest = Manifest(
        format=FORMAT,
        model="some/model",
        target="trn2",
        lnc=2,
        tp=2,
        dcp=2,
        world_size=2,
        settings={"block_size": 16, "dtype": "auto", "num_pages": None},
        programs=tuple(records),
    )
    write_manifest(manifest, folder)
    return manifest


def test_what_was_written_is_read(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    assert load_manifest(tmp_path) == manifest
    assert manifest.program("decode_1x1_ctx64").neff is not None
    assert [path.name for path in tmp_path.glob(".*")] == []  # nothing half written


def test_a_record_says_what_the_program_is() -> None:
    made = program("decode_1x1_ctx64")
    record = record_program(made, made.to_bytes())
    assert record.hlo_sha256 == sha256(made.to_bytes())
    assert record.aliases == ((0, 0),)
    assert tuple(tensor.spec() for tensor in record.inputs) == INPUTS
    assert tuple(tensor.spec() for tensor in record.outputs) == OUTPUTS
    assert {tensor.neff_name for tensor in record.inputs + record.outputs} == {None}


def test_names_that_the_program_sets_for_the_neff_are_recorded() -> None:
    """Attributes as nkipy sets them, here on parameters that are not in the order of numbers."""
    made = program("p")
    parameters = made.module.computations[0].instructions
    for number, name in ((2, "third"), (0, "first"), (1, "second")):
        parameters[number].frontend_attributes.map.add(key="neff_input_names", value=name)
    parameters[3].frontend_attributes.map.add(key="neff_output_names", value="a,b")
    parameters.reverse()
    record = record_program(made, made.to_bytes())
    assert [tensor.neff_name for tensor in record.inputs] == ["first", "second", "third"]
    assert [tensor.neff_name for tensor in record.outputs] == ["a", "b"]


def test_a_lone_output_that_is_no_tuple() -> None:
    made = program("p")
    del made.module.input_output_alias.entries[0].output_shape_index[:]
    assert record_program(made, b"").aliases == ((0, 0),)


def test_a_program_that_declares_too_little_is_refused() -> None:
    made = program("p")
    del made.module.computations[0].instructions[2]
    with pytest.raises(ManifestError, match="declared=3, found=2"):
        record_program(made, b"")


def test_a_missing_program_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="name='x'.*decode_1x1_ctx64"):
        written(tmp_path).program("x")


Change = Callable[[dict[str, Any]], object]

BROKEN: dict[str, tuple[Change, str]] = {
    "unknown key": (lambda m: m.update(extra=1), "unknown field `extra`"),
    "unknown key inside": (lambda m: m["programs"][0].update(extra=1), "extra"),
    "missing key": (lambda m: m.pop("target"), "missing required field `target`"),
    "wrong type": (lambda m: m.update(tp="8"), r"Expected `int`, got `str` - at `\$.tp`"),
    "no ranks": (lambda m: m.update(world_size=0), ">= 1"),
    "unknown kind": (lambda m: m["programs"][0].update(kind="train"), "train"),
    "a path": (lambda m: m["programs"][0].update(hlo_file="../x"), "regex"),
    "a hidden file": (lambda m: m["programs"][0].update(hlo_file=".x"), "regex"),
    "no digest": (lambda m: m["programs"][0].update(hlo_sha256="abc"), "regex"),
    "other format": (lambda m: m.update(format=2), "wanted=1, found=2"),
    "other format of other form": (
        lambda m: (m.clear(), m.update(format=2, everything="else")),
        "wanted=1, found=2",
    ),
    "one name twice": (
        lambda m: m["programs"][1].update(name=m["programs"][0]["name"]),
        "different names.*decode_1x1_ctx64",
    ),
    "other ranks": (
        lambda m: m["programs"][1].update(num_ranks=4),
        "num_ranks=4, world_size=2",
    ),
    "other target": (lambda m: m.update(target="trn3"), "wanted='trn3', compiled='trn2'"),
    "other core size": (lambda m: m.update(lnc=1), "option='--lnc', wanted='1', compiled='2'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_manifest_is_refused(tmp_path: Path, case: str) -> None:
    change, words = BROKEN[case]
    written(tmp_path)
    path = tmp_path / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ManifestError, match=words):
        load_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", '{"format": 1}'])
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ManifestError, match="has its form"):
        load_manifest(tmp_path)


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="neuron.compile writes it last"):
        load_manifest(tmp_path)


FILES = ["decode_1x1_ctx64.neff", "decode_1x1_ctx64.hlo_module.pb"]


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    written(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(ManifestError, match=f"compile again.*{file}"):
        load_manifest(tmp_path)


@pytest.mark.parametrize("file", FILES)
def test_a_changed_file_is_refused_with_both_digests(tmp_path: Path, file: str) -> None:
    written(tmp_path)
    path = tmp_path / file
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    changed = sha256(path.read_bytes())
    with pytest.raises(ManifestError, match=f"written='{sha256(before)}', found='{changed}'"):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Wanted(target="trn3"), "another target.*wanted='trn3', compiled='trn2'"),
        (Wanted(lnc=1), "another lnc.*wanted=1, compiled=2"),
        (Wanted(tp=8), "another tp.*wanted=8, compiled=2"),
        (Wanted(tp=2, dcp=1), "another dcp.*wanted=1, compiled=2"),
    ],
)
def test_programs_for_something_else_are_refused(
    tmp_path: Path, wanted: Wanted, words: str
) -> None:
    with pytest.raises(ManifestError, match=words):
        wanted.check(written(tmp_path))


def test_programs_for_what_is_wanted_pass(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    Wanted().check(manifest)
    Wanted(target="trn2", lnc=2, tp=2, dcp=2).check(manifest)


def test_each_rank_needs_a_core(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    check_cores(manifest, 2, 2)
    with pytest.raises(ManifestError, match="ranks=2, cores=1"):
        check_cores(manifest, 2, 1)
