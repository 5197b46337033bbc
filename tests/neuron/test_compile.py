"""The command: programs to a folder of HLO, NEFFs, logs and a manifest, whatever fails on the way.

The programs come from the engine elsewhere; here they are tiny, and the compiler is a fake.
"""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dcpjax.config import EngineConfig
from neuron import compile as command
from neuron.cache import NeffCache
from neuron.errors import ManifestError
from neuron.lint import Finding, Rule
from neuron.manifest import load_manifest, write_manifest
from neuron.output import open_output, write_programs
from neuron.program import Program, ProgramKind
from neuron.targets import Target, find_target
from tests.neuron.fake_compiler import FakeCompiler, ends, wait_for
from tests.neuron.tiny_programs import program

SLOW = Finding(
    Rule("slow", "is fast", "", "a test", lambda context: [], "warning"), "", {"rows": 1}, None
)
SETTINGS = ("model", "--max-model-len", "64", "--tp", "2", "--dcp", "2")


@dataclass(frozen=True)
class Call:
    """What the engine gives: a program before it is lowered."""

    program: Program

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def kind(self) -> ProgramKind:
        return self.program.kind

    def lower(self) -> Program:
        return self.program


class Stage:
    """A command whose engine gives these programs, and a fake compiler for them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake = FakeCompiler(folder / "fake")
        self.output, self.cache = folder / "compiled", folder / "cache"
        self.programs: list[Program] = [program("decode"), program("prefill", "prefill")]
        self.broken: list[Finding] = []
        self.asked: list[tuple[EngineConfig, Target, int, int]] = []
        self.checked: list[tuple[str, int, Collection[str] | None]] = []
        monkeypatch.setattr(command, "engine_calls", self._calls)
        monkeypatch.setattr(command, "broken_rules", self._check)
        monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)

    def _calls(
        self, config: EngineConfig, target: Target, lnc: int, draft_tokens: int
    ) -> list[Call]:
        self.asked.append((config, target, lnc, draft_tokens))
        return [Call(program) for program in self.programs]

    def _check(
        self, program: Program, target: Target, lnc: int, operators: Collection[str] | None
    ) -> list[Finding]:
        self.checked.append((target.name, lnc, operators))
        return self.broken

    def run(self, *arguments: str, compiler: str | None = None) -> Result:
        paths = {
            "--output": self.output,
            "--cache-dir": self.cache,
            "--compiler": compiler or self.fake.path,
        }
        options = [str(word) for pair in paths.items() for word in pair]
        return CliRunner().invoke(command.main, [*SETTINGS, *options, *arguments])

    def files(self) -> set[str]:
        return {path.name for path in self.output.iterdir()}


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def summary(result: Result) -> dict[str, dict[str, Any]]:
    rows = json.loads(result.stdout.splitlines()[-1])["programs"]
    return {row["name"]: row for row in rows}


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_all_goes_well(stage: Stage) -> None:
    result = stage.run()
    assert result.exit_code == 0, result.output
    assert stage.files() == {
        *("manifest.json", "logs"),
        *("decode.hlo_module.pb", "decode.neff"),
        *("prefill.hlo_module.pb", "prefill.neff"),
    }
    manifest = load_manifest(stage.output)
    assert (manifest.target, manifest.lnc, manifest.tp, manifest.dcp) == ("trn2", 2, 2, 2)
    assert manifest.world_size == 2 and manifest.model == "model"
    assert manifest.settings["max_model_len"] == 64
    for made in stage.programs:
        assert (stage.output / f"{made.name}.hlo_module.pb").read_bytes() == made.to_bytes()
        logs = stage.output / "logs" / made.name / "attempt-1"
        assert "Compiler status PASS" in (logs / "output.txt").read_text()
    assert "compiled" in result.stdout


def test_the_engine_is_asked_for_its_programs(stage: Stage) -> None:
    stage.run("--block-size", "32", "--lnc", "1", "--target", "trn3", "--draft-tokens", "3")
    ((config, target, lnc, draft_tokens),) = stage.asked
    assert (config.tensor_parallel_size, config.decode_context_parallel_size) == (2, 2)
    assert (config.block_size, target.name, lnc) == (32, "trn3", 1)
    assert (config.max_model_len, draft_tokens) == (64, 3)
    assert stage.checked == [("trn3", 1, None)] * 2


def test_the_compiler_is_called_as_each_program_needs_it(stage: Stage) -> None:
    stage.run("--target", "trn3", "--lnc", "1", "--compiler-option=--enable-fast-context-switch")
    levels: set[str] = set()
    for call in stage.fake.calls:
        arguments = call["argv"]
        assert option(arguments, "--target") == "trn3" and option(arguments, "--lnc") == "1"
        assert call["env"]["NEURON_PLATFORM_TARGET_OVERRIDE"] == "trn3"
        assert "--enable-fast-context-switch" in arguments
        levels |= {"-O1", "-O2"} & set(arguments)
    assert levels == {"-O1", "-O2"}
    manifest = load_manifest(stage.output)
    neffs = {record.name: record.neff for record in manifest.programs}
    assert neffs["prefill"] and "-O1" in neffs["prefill"].arguments
    assert neffs["decode"] and "-O2" in neffs["decode"].arguments
    assert neffs["decode"].compiler == "2.27.5334.0+abc123"


def test_one_level_for_all(stage: Stage) -> None:
    stage.run("-O", "3")
    assert all("-O3" in call["argv"] for call in stage.fake.calls)


def test_the_second_run_compiles_nothing(stage: Stage) -> None:
    stage.run()
    before = load_manifest(stage.output)
    again = stage.run("--json")
    assert {row["state"] for row in summary(again).values()} == {"cached"}
    assert len(stage.fake.calls) == 2
    assert load_manifest(stage.output) == before


def test_a_damaged_cache_is_repaired_and_said(stage: Stage) -> None:
    stage.run()
    (record, _) = load_manifest(stage.output).programs
    assert record.neff is not None
    NeffCache(stage.cache).neff_path(record.neff.cache_key).write_bytes(b"torn")
    again = stage.run("--json")
    assert again.exit_code == 0
    assert "compiled again, the cache is damaged" in again.stderr
    assert {row["state"] for row in summary(again).values()} == {"cached", "compiled"}
    load_manifest(stage.output)


def test_a_program_that_fails_stops_no_other(stage: Stage) -> None:
    stage.programs.insert(0, program("broken", order="fail"))
    result = stage.run("--json")
    assert result.exit_code == 1
    rows = summary(result)
    assert [row["state"] for row in rows.values()] == ["failed", "compiled", "compiled"]
    assert "NCC_FAKE001" in result.stderr and "log line 99" in result.stderr
    assert "1 of 3 programs did not compile" in result.stderr
    manifest = load_manifest(stage.output)
    broken = manifest.program("broken")
    assert broken.neff is None and broken.failure == "ended with exit code 70"
    assert manifest.program("decode").neff is not None
    assert (stage.output / "logs" / "broken" / "attempt-1" / "log-neuron-cc.txt").exists()


def test_retries_are_in_the_manifest(stage: Stage) -> None:
    stage.programs = [program("flaky", order="fail_once")]
    result = stage.run("--attempts", "2")
    assert result.exit_code == 0
    assert "attempt 1 of 2: ended with exit code 70" in result.stderr
    neff = load_manifest(stage.output).program("flaky").neff
    assert neff is not None and [attempt.exit_code for attempt in neff.attempts] == [70, 0]
    logs = stage.output / "logs" / "flaky"
    assert {path.name for path in logs.iterdir()} == {"attempt-1", "attempt-2"}


def test_programs_alone_need_no_compiler(stage: Stage) -> None:
    result = stage.run("--hlo-only", compiler="no-such-compiler")
    assert result.exit_code == 0
    manifest = load_manifest(stage.output)
    assert [record.neff for record in manifest.programs] == [None, None]
    assert stage.files() == {"manifest.json", "decode.hlo_module.pb", "prefill.hlo_module.pb"}
    assert not stage.cache.exists()


def test_without_a_compiler_nothing_is_lowered(stage: Stage) -> None:
    result = stage.run(compiler="no-such-compiler")
    assert result.exit_code == 2
    assert "--hlo-only" in result.output and "package index" in result.output
    assert stage.asked == [] and not stage.output.exists()


def test_broken_rules_are_shown_and_nothing_is_compiled(stage: Stage) -> None:
    wide = Rule("wide", "no 64-bit integers", "EVRF000", "a test", lambda context: [])
    stage.broken = [Finding(wide, "add.1", {"dtype": "s64"}, "step.py:3"), SLOW]
    result = stage.run()
    assert result.exit_code == 1
    assert "decode\n  error: wide: no 64-bit integers [EVRF000; a test]" in result.stderr
    assert "    step.py:3: add.1 dtype=s64" in result.stderr
    assert "  warning: slow: is fast" in result.stderr
    assert "broken at 2 places" in result.stderr
    assert stage.fake.calls == [] and not stage.output.exists()
    assert stage.run("--no-check").exit_code == 0


def test_warnings_stop_nothing(stage: Stage) -> None:
    stage.broken = [SLOW]
    assert stage.run("--hlo-only").exit_code == 0


def test_a_recorded_list_of_operators_is_passed_on(stage: Stage, tmp_path: Path) -> None:
    recorded = tmp_path / "operators.txt"
    recorded.write_text("add\ndot\n")
    stage.run("--hlo-only", "--operators", str(recorded))
    assert stage.checked == [("trn2", 2, {"add", "dot"})] * 2


def test_limits_count_as_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``neuron.check`` refuses is not compiled."""
    tiny = program("decode")
    monkeypatch.setattr("neuron.estimate.MAX_INSTRUCTIONS", -1)
    found = command.broken_rules(tiny, find_target("trn2"), 2, None)
    assert "instruction-count" in {finding.rule.name for finding in found}


def test_the_number_of_programs_is_said_and_limited(stage: Stage) -> None:
    result = stage.run("--hlo-only")
    assert "2 programs (1 decode, 1 prefill)" in result.stderr
    result = stage.run("--hlo-only", "--max-programs", "1")
    assert result.exit_code == 2
    assert "too many" in result.output and "max_programs=1" in result.output


def test_an_interrupted_run_leaves_no_manifest_of_an_earlier_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would describe files that have changed."""
    stage.run()

    def interrupted(*arguments: object, **others: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "compile_all", interrupted)
    assert stage.run().exit_code == 1
    with pytest.raises(ManifestError, match="writes it last"):
        load_manifest(stage.output)


def test_flags_of_the_plugin_are_not_used_in_silence(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O3")
    result = stage.run()
    assert "NEURON_CC_FLAGS is for the PJRT plugin" in result.stderr
    assert all("NEURON_CC_FLAGS" not in call["env"] for call in stage.fake.calls)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "trn1"), "trn1"),
        (("--lnc", "3"), "logical core size.*lnc=3"),
        (("--dcp", "3"), "decode_context_parallel_size=3"),
        (("--attempts", "0"), "attempts=0"),
        (("--compiler-option=--target=trn1",), "sets itself"),
        (("--memory-per-job", "0"), "memory"),
    ],
)
def test_wrong_settings(stage: Stage, arguments: tuple[str, ...], words: str) -> None:
    result = stage.run(*arguments)
    assert result.exit_code == 2
    assert re.search(words, result.output)
    assert stage.asked == []  # nothing was lowered for it


@pytest.mark.parametrize("in_the_way", ["compiled", "cache"])
def test_a_folder_that_cannot_be_made_is_said(stage: Stage, in_the_way: str) -> None:
    (stage.fake.home.parent / in_the_way).touch()
    result = stage.run()
    assert result.exit_code == 2
    assert f"{in_the_way}'" in result.output and "can be written" in result.output


def test_a_file_that_cannot_be_written_ends_the_run(stage: Stage) -> None:
    """The output has no manifest then, so nothing half-written is taken as whole."""
    (stage.output / "decode.neff").mkdir(parents=True)
    result = stage.run()
    assert result.exit_code == 2
    assert "the output folder can be written" in result.output
    assert stage.files() == {"decode.neff", "decode.hlo_module.pb", "prefill.hlo_module.pb", "logs"}
    (stage.output / "decode.neff").rmdir()
    assert stage.run().exit_code == 0
    load_manifest(stage.output)


@pytest.mark.parametrize(
    ("full", "words"), [("output", "output folder"), ("cache", "cache folder")]
)
def test_a_full_disk_is_said(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, full: str, words: str
) -> None:
    sync = os.fsync

    def no_space(descriptor: int) -> None:
        folder = stage.output if full == "output" else stage.cache
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(folder):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        result = stage.run()
    assert result.exit_code == 2
    assert f"the {full} folder can be written" in result.output and "No space left" in result.output
    with pytest.raises(ManifestError, match="writes it last"):
        load_manifest(stage.output)
    assert not [name for name in stage.files() if name.endswith(".part")]
    assert stage.run().exit_code == 0
    load_manifest(stage.output)


def test_one_run_at_a_time_writes_a_folder(stage: Stage) -> None:
    stage.run()
    before = load_manifest(stage.output)
    with open_output(stage.output):
        write_manifest(before, stage.output)
        result = stage.run()
        assert load_manifest(stage.output) == before
    assert result.exit_code == 2
    assert "one run at a time" in result.output
    assert stage.run().exit_code == 0


def test_two_programs_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="different names.*decode"):
        write_programs([program("decode"), program("decode", order="fail")], tmp_path)


_INTERRUPTED = """
import signal, sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
for number in (signal.SIGINT, signal.SIGTERM):  # a background shell ignores SIGINT
    signal.signal(number, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
from neuron import compile as command
from tests.neuron.test_compile import Call
from tests.neuron.tiny_programs import program
made = [program("decode"), program("stuck", order="hang")]
command.engine_calls = lambda *ignored: [Call(item) for item in made]
command.broken_rules = lambda *ignored: []
command.main(sys.argv[2:])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_the_compilers(stage: Stage, number: signal.Signals) -> None:
    root = str(Path(__file__).parents[2])
    options = ["--output", str(stage.output), "--cache-dir", str(stage.cache)]
    driver = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, root, *SETTINGS, *options]
        + ["--compiler", str(stage.fake.path), "--jobs", "2"],
        env={**os.environ, "PYTHONPATH": root},
        stderr=subprocess.DEVNULL,
    )
    wait_for(stage.fake.home / "pid")
    driver.send_signal(number)
    assert driver.wait() == 1
    assert ends(int((stage.fake.home / "pid").read_text()))
    assert list((stage.cache / "work").iterdir()) == []
