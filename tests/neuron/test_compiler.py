"""The compiler is found by running it, and called with the options that its version has."""

from pathlib import Path

import pytest

from neuron.compiler import (
    Compiler,
    CompilerFlags,
    child_environment,
    command,
    default_optlevel,
    find_compiler,
    find_placeholder,
)
from neuron.errors import CompilerError, TargetError
from tests.neuron.fake_compiler import FakeCompiler

GUARD = 'raise ImportError("WRONG PACKAGE. Use the index of AWS.")\n'
NEW, OLD = (2, 27, 5334, 0), (2, 26, 6360)


def placeholder(folder: Path) -> Path:
    package = folder / "neuronx-cc"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(GUARD)
    return folder


def option(arguments: tuple[str, ...], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_it_is_found_on_path_and_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCompiler(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_compiler()
    assert found == Compiler(str(fake.path), (2, 27, 5334, 0), "+abc123")
    assert str(found) == "2.27.5334.0+abc123"


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run in another folder."""
    FakeCompiler(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert Path(find_compiler("./neuronx-cc").path).is_absolute()


def test_versions_are_compared_as_numbers() -> None:
    flags = CompilerFlags("trn2", 2, 2)
    assert "--native-int64" not in flags.arguments((2, 9, 0))
    assert "--native-int64" in flags.arguments((2, 100))


def test_a_missing_one_is_said_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerError, match="not on PATH.*AWS's own.*--hlo-only") as error:
        find_compiler(search=[str(tmp_path)])
    assert "placeholder" not in str(error.value)


def test_the_placeholder_package_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its installation succeeds and brings no compiler."""
    monkeypatch.setenv("PATH", str(tmp_path))
    search = placeholder(tmp_path / "site-packages")
    with pytest.raises(CompilerError, match="is the placeholder.*holds no compiler"):
        find_compiler(search=["", "/nowhere", str(search)])


def test_the_real_package_is_no_placeholder(tmp_path: Path) -> None:
    (tmp_path / "neuronxcc").mkdir()
    (tmp_path / "neuronxcc" / "__init__.py").touch()
    assert find_placeholder([str(tmp_path)]) is None
    assert find_placeholder([str(placeholder(tmp_path))]) == tmp_path / "neuronx-cc"


def test_a_compiler_that_answers_as_a_placeholder(tmp_path: Path) -> None:
    fake = FakeCompiler(tmp_path, "ImportError: WRONG PACKAGE", version_exit=1)
    with pytest.raises(CompilerError, match="is the placeholder"):
        find_compiler(str(fake.path))


def test_one_that_fails_shows_what_it_said(tmp_path: Path) -> None:
    fake = FakeCompiler(tmp_path, "No module named neuronxcc", version_exit=1)
    with pytest.raises(CompilerError, match="belong to one environment.*No module named"):
        find_compiler(str(fake.path))


def test_one_that_says_no_version(tmp_path: Path) -> None:
    fake = FakeCompiler(tmp_path, "hello\nPython version 3.11.2")
    with pytest.raises(CompilerError, match="names the compiler's version.*hello"):
        find_compiler(str(fake.path))


def test_one_that_cannot_run(tmp_path: Path) -> None:
    broken = tmp_path / "neuronx-cc"
    broken.write_text("#!/nowhere/python\n")
    broken.chmod(0o755)
    with pytest.raises(CompilerError, match="can be run"):
        find_compiler(str(broken))


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("lnc", [1, 2])
def test_the_options_that_are_always_there(target: str, lnc: int) -> None:
    for version in (OLD, NEW):
        arguments = CompilerFlags(target, lnc, 1).arguments(version)
        assert option(arguments, "--framework") == "XLA"
        assert option(arguments, "--target") == target
        assert option(arguments, "--lnc") == str(lnc)
        assert option(arguments, "--auto-cast") == "none"
        assert option(arguments, "--model-type") == "transformer"
        assert "-O1" in arguments


def test_integer_options_only_where_they_exist() -> None:
    flags = CompilerFlags("trn2", 2, 2)
    new, old = flags.arguments(NEW), flags.arguments(OLD)
    assert option(new, "--implicit-integer-downcast") == "none"
    assert option(new, "--native-int64") == "enabled"
    assert not {"--implicit-integer-downcast", "--native-int64"} & set(old)
    assert set(old) < set(new)


def test_prefill_is_optimised_less() -> None:
    assert default_optlevel("prefill") == 1
    assert default_optlevel("decode") == default_optlevel("segment") == 2


@pytest.mark.parametrize(
    ("target", "lnc", "words"),
    [("trn1", 1, "one of trn2, trn3.*trn1"), ("trn2", 4, "logical core size.*4")],
)
def test_wrong_targets_are_refused(target: str, lnc: int, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        CompilerFlags(target, lnc, 1)


@pytest.mark.parametrize("extra", ["--target=trn1", "--lnc", "-lnc", "-O3", "--output=x"])
def test_further_options_do_not_contradict(extra: str) -> None:
    with pytest.raises(CompilerError, match="sets itself"):
        CompilerFlags("trn2", 2, 1, (extra,))


def test_further_options_come_last() -> None:
    extra = ("--enable-fast-context-switch", "--hbm-scratchpad-page-size=1024")
    assert CompilerFlags("trn2", 2, 1, extra).arguments(NEW)[-2:] == extra


def test_an_optimisation_level_that_is_none() -> None:
    with pytest.raises(CompilerError, match="1, 2 or 3"):
        CompilerFlags("trn2", 2, 4)  # pyright: ignore[reportArgumentType]


def test_the_command_line() -> None:
    words = command(Compiler("/opt/neuronx-cc", NEW), ("--target", "trn2"))
    assert words[:3] == ["/opt/neuronx-cc", "compile", "model.hlo_module.pb"]
    assert words[3:5] == ["--target", "trn2"]
    assert words[5:] == [
        *("--output", "model.neff"),
        *("--logfile", "log-neuron-cc.txt"),
        *("--verbose", "35"),
    ]


@pytest.mark.parametrize(
    ("preloaded", "kept"),
    [
        ("/usr/lib/libtcmalloc.so.4", None),
        ("/usr/lib/libtcmalloc_minimal.so.4:/lib/other.so", "/lib/other.so"),
        ("/lib/a.so /usr/lib/libtcmalloc.so /lib/b.so", "/lib/a.so:/lib/b.so"),
        ("/lib/a.so", "/lib/a.so"),
        ("", None),
    ],
)
def test_the_allocator_of_the_server_is_not_preloaded(preloaded: str, kept: str | None) -> None:
    child = child_environment({"LD_PRELOAD": preloaded, "HOME": "/root"}, "trn2")
    assert child.get("LD_PRELOAD") == kept
    assert child["HOME"] == "/root"


def test_the_target_is_overridden_and_flags_of_the_plugin_left_out() -> None:
    environ = {"NEURON_CC_FLAGS": "-O3", "NEURON_PLATFORM_TARGET_OVERRIDE": "inf2"}
    assert child_environment(environ, "trn3") == {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3"}
    assert environ["NEURON_CC_FLAGS"] == "-O3"  # not changed for others
