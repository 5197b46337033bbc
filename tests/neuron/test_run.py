"""Everything around the device, with a stand-in for nrtpy that runs nothing."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from dcpjax.errors import ConfigError
from neuron import run
from neuron.errors import EnvironmentSettingError, ManifestError
from neuron.manifest import Manifest
from neuron.run import (
    choose_programs,
    find_cores,
    local_ranks,
    main,
    rank_environment,
    summarise,
)
from tests.neuron.test_manifest import written

FAKE_NRTPY = '''
"""A fake nrtpy with the names of the published one. It runs nothing and notes what it is given."""
import json, os, time
import numpy as np
HOME = {home!r}
ORDER = {order!r}

class NrtError(RuntimeError): ...

def note(**what):
    with open(os.path.join(HOME, "notes.jsonl"), "a") as file:
        file.write(json.dumps(what) + "\\n")

def configure(visible_cores=None):
    global cores
    cores = list(visible_cores)

def reset():
    note(event="reset")

class Info:
    def __init__(self, size): self.size, self.shape = size, [size]

class Result:
    def __init__(self, durations): self.durations_ms = durations

class NrtpyTensor:
    def __init__(self, array, name): self.array, self.name = array, name
    @classmethod
    def from_numpy(cls, array, name=None, core_id=0): return cls(array, name)

class NrtpyModel:
    input_tensors_info = {{"in0": Info(16), "in1": Info(12), "in2": Info(4)}}
    output_tensors_info = {{"output_0": Info(16), "output_1": Info(12)}}
    @classmethod
    def load_from_neff(cls, path, name=None, core_id=0, cc_enabled=False, rank_id=0, world_size=1):
        if ORDER == "refuse" and rank_id == 1:
            raise NrtError("NRT Error NRT_FAILURE(1): Failed to load model")
        if ORDER == "die" and rank_id == 1:
            os._exit(3)
        model = cls()
        model.rank = rank_id
        note(event="load", path=path, cores=cores, core=core_id, cc=cc_enabled, rank_id=rank_id,
             world=world_size, lnc=os.environ["NEURON_LOGICAL_NC_CONFIG"],
             root=os.environ["NEURON_RT_ROOT_COMM_ID"])
        return model
    def benchmark(self, inputs, outputs=None, warmup_iter=5, benchmark_iter=5, mode="device"):
        if ORDER == "hang" and self.rank == 1:
            time.sleep(600)
        if ORDER == "out_of_bounds":
            raise NrtError("NRT_EXEC_OOB(1006)")
        note(event="benchmark", rank_input=inputs["in2"].array.tolist(),
             is_shared=outputs["output_0"] is inputs["in0"], warmup=warmup_iter, mode=mode,
             is_second_shared=outputs["output_1"] in inputs.values(), rank_id=self.rank)
        return Result([1.0 + self.rank] * (benchmark_iter - 1) + [5.0 + self.rank])
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "compiled"
    folder.mkdir()
    written(folder)
    return folder


@pytest.fixture
def on_trn2(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one chip, of four logical cores, and nothing set."""
    monkeypatch.setattr(run, "neuron_chips", lambda: {"trn2": 1})
    for name in ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_ROOT_COMM_ID", "NEURON_RT_VISIBLE_CORES"):
        monkeypatch.delenv(name, raising=False)


def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, order: str = "") -> Path:
    """Put the fake nrtpy where also the ranks' processes find it."""
    home = tmp_path / "fake"
    home.mkdir()
    (home / "nrtpy.py").write_text(FAKE_NRTPY.format(home=str(home), order=order))
    monkeypatch.syspath_prepend(str(home))
    return home / "notes.jsonl"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def notes(path: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


@pytest.mark.usefixtures("on_trn2")
def test_each_rank_runs_on_its_core(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = install(monkeypatch, tmp_path)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "2-3")
    result = call(str(folder), "--iterations", "4", "--warmup", "0", "--clock", "device", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "programs": [
            {
                "name": "decode_1x1_ctx64",
                "ranks": 2,
                "iterations": 4,
                "mean_ms": 2.5,
                "min_ms": 1.0,
                "max_ms": 6.0,
                "slowest_rank": 1,
            }
        ]
    }
    loads = sorted(notes(path, "load"), key=lambda note: note["rank_id"])
    assert [note["cores"] for note in loads] == [[2], [3]]
    for note in loads:
        assert (note["core"], note["cc"], note["world"], note["lnc"]) == (0, True, 2, "2")
        assert note["path"] == str(folder / "decode_1x1_ctx64.neff")
    assert len({note["root"] for note in loads}) == 1  # the ranks meet
    runs = sorted(notes(path, "benchmark"), key=lambda note: note["rank_id"])
    assert [note["rank_input"] for note in runs] == [[[0]], [[1]]]
    assert all(note["is_shared"] and not note["is_second_shared"] for note in runs)
    assert {(note["warmup"], note["mode"]) for note in runs} == {(0, "device")}
    assert len(notes(path, "reset")) == 2


@pytest.mark.usefixtures("on_trn2")
def test_a_table_for_people(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path)
    result = call(str(folder))
    assert result.exit_code == 0
    assert "decode_1x1_ctx64" in result.stdout and "slowest rank" in result.stdout


@pytest.mark.usefixtures("on_trn2")
@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("refuse", "rank 1: a NEFF can be loaded.*NRT_FAILURE"),
        ("out_of_bounds", "a NEFF runs.*NRT_EXEC_OOB"),
        ("die", "a rank answers before it ends.*rank=1, exit_code=3"),
        ("hang", "all ranks answer in time.*ranks=.*1"),
    ],
)
def test_a_rank_that_fails_ends_the_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, words: str
) -> None:
    install(monkeypatch, tmp_path, order)
    timeout = "3" if order == "hang" else "300"
    result = call(str(folder), "--timeout", timeout)
    assert result.exit_code == 1
    assert re.search(words, result.output)


@pytest.mark.usefixtures("on_trn2")
def test_without_nrtpy(folder: Path) -> None:
    result = call(str(folder))
    assert result.exit_code == 2
    assert "install it from AWS's own" in result.output


def test_without_devices(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path)
    monkeypatch.setattr(run, "neuron_chips", dict)
    result = call(str(folder))
    assert result.exit_code == 2
    assert "ranks=2, cores=0" in result.output


@pytest.mark.usefixtures("on_trn2")
def test_another_core_size_in_the_environment(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = install(monkeypatch, tmp_path)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    result = call(str(folder))
    assert result.exit_code == 2
    assert "export NEURON_LOGICAL_NC_CONFIG=2" in result.output
    assert not path.exists()  # nothing was loaded


@pytest.fixture
def manifest(folder: Path) -> Manifest:
    return written(folder)


def test_only_compiled_programs_are_chosen(manifest: Manifest) -> None:
    assert [record.name for record, _ in choose_programs(manifest, ())] == ["decode_1x1_ctx64"]
    assert len(choose_programs(manifest, ["decode_1x1_ctx64"])) == 1
    with pytest.raises(ManifestError, match="prefill_1x32_ctx64"):
        choose_programs(manifest, ["prefill_1x32_ctx64"])
    with pytest.raises(ManifestError, match="name='x'"):
        choose_programs(manifest, ["x"])


def test_a_folder_without_any_neff(manifest: Manifest) -> None:
    bare = msgspec.structs.replace(
        manifest,
        programs=tuple(
            msgspec.structs.replace(program, neff=None, failure="took longer than 1 s")
            for program in manifest.programs
        ),
    )
    with pytest.raises(ManifestError, match="--hlo-only.*took longer"):
        choose_programs(bare, ())


@pytest.mark.parametrize(
    ("chips", "visible", "cores"),
    [
        ({"trn2": 1}, None, (0, 1)),
        ({"trn2": 16}, "60-63", (60, 61)),
        ({"trn2": 1}, "3,1", (3, 1)),
    ],
)
def test_cores_of_the_ranks(
    manifest: Manifest, chips: dict[str, int], visible: str | None, cores: tuple[int, ...]
) -> None:
    environ = {} if visible is None else {"NEURON_RT_VISIBLE_CORES": visible}
    assert find_cores(manifest, 2, environ, chips) == cores


@pytest.mark.parametrize(
    ("chips", "visible", "words"),
    [
        ({}, None, "cores=0"),
        ({"trn2": 1}, "3", "ranks=2, cores=1"),
        ({"trn2": 1}, "3-5", "ranks=2, cores=1"),  # cores 4 and 5 are on no chip
        ({"trn1": 16}, None, "another target.*wanted='trn1', compiled='trn2'"),
    ],
)
def test_cores_that_are_missing(
    manifest: Manifest, chips: dict[str, int], visible: str | None, words: str
) -> None:
    environ = {} if visible is None else {"NEURON_RT_VISIBLE_CORES": visible}
    with pytest.raises(ManifestError, match=words):
        find_cores(manifest, 2, environ, chips)


def test_ranks_of_a_node() -> None:
    assert local_ranks(64, 1, 0) == range(64)
    assert local_ranks(64, 2, 1) == range(32, 64)
    for world_size, nodes, node in ((64, 3, 0), (64, 2, 2)):
        with pytest.raises(EnvironmentSettingError, match=f"nodes={nodes}, node={node}"):
            local_ranks(world_size, nodes, node)


def test_the_environment_of_a_rank(manifest: Manifest) -> None:
    added = rank_environment(manifest, {}, 1)
    assert added["NEURON_LOGICAL_NC_CONFIG"] == "2"
    assert added["NEURON_RT_ROOT_COMM_ID"].startswith("127.0.0.1:")
    kept = {"NEURON_LOGICAL_NC_CONFIG": "2", "NEURON_RT_ROOT_COMM_ID": "127.0.0.1:4000"}
    assert rank_environment(manifest, kept, 1) == {}
    alone = msgspec.structs.replace(manifest, world_size=1)
    assert rank_environment(alone, {}, 1) == {"NEURON_LOGICAL_NC_CONFIG": "2"}


def test_flags_of_the_plugin_are_not_those_of_a_neff(manifest: Manifest) -> None:
    assert "NEURON_LOGICAL_NC_CONFIG" in rank_environment(
        manifest, {"NEURON_CC_FLAGS": "--lnc 1"}, 1
    )


@pytest.mark.parametrize("timeout", ["0", "-1", "inf", "soon"])
def test_a_timeout_is_a_time(tmp_path: Path, timeout: str) -> None:
    result = CliRunner().invoke(main, [str(tmp_path), "--timeout", timeout])
    assert result.exit_code == 2 and "--timeout" in result.output


def test_several_nodes_need_a_meeting_point_and_efa(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match="NEURON_RT_ROOT_COMM_ID") as error:
        rank_environment(manifest, {}, 2)
    assert "FI_PROVIDER" in str(error.value)
    assert "NEURON_PJRT" not in str(error.value)  # this is not the plugin
    fabric = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
    assert rank_environment(manifest, {"NEURON_RT_ROOT_COMM_ID": "10.0.0.1:4000", **fabric}, 2)


def test_a_summary_names_the_slowest_rank() -> None:
    timing = summarise("p", range(4, 7), [[1.0, 1.0], [1.0, 4.0], [2.0, 2.0]])
    assert (timing.mean_ms, timing.min_ms, timing.max_ms) == (1.8333, 1.0, 4.0)
    assert timing.slowest_rank == 5
