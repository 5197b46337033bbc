"""What is written down about the project agrees with the project."""

import dataclasses
import importlib.machinery
import importlib.util
import os
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pre_commit.clientlib import load_config

import dcpjax
from dcpjax.config import EngineConfig

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dcpjax"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SERVER_OPTIONS = {"host", "port", "api-key", "served-model-name"}


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = listed.stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).exists()]


def readme_section(title: str) -> str:
    text = (ROOT / "README.md").read_text()
    return re.split(r"^## ", text.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def test_versions_agree():
    assert dcpjax.__version__ == PYPROJECT["project"]["version"]
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_readme_names_make_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)`?", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets


def test_readme_names_files_that_exist():
    named = re.findall(r"(?:scripts|notebooks)/[\w./]+\w", (ROOT / "README.md").read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_readme_lists_options_that_exist():
    fields = {item.name.replace("_", "-") for item in dataclasses.fields(EngineConfig)}
    rows = [line for line in readme_section("Options").splitlines() if line.startswith("| `")]
    listed = set(re.findall(r"`--([a-z-]+)", " ".join(row.split("|")[1] for row in rows)))
    assert len(listed) >= 10
    assert listed <= fields | SERVER_OPTIONS


def modules_of_the_package() -> set[str]:
    names = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    return {name for name in names if not name.endswith("__init__.py")}


def modules_of_the_architecture_page() -> list[str]:
    """Files and folders named in the first column; a bare file lies beside the one before it."""
    section = (PACKAGE / "README.md").read_text().split("\n## Modules\n")[1].split("\n## ")[0]
    listed: list[str] = []
    for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([^`]+)`", row):
            path = name if "/" in name else folder + name
            folder = path[: path.rfind("/") + 1] if path.endswith(".py") else ""
            listed.append(path)
    return listed


def test_the_architecture_page_lists_every_module_and_no_other():
    listed = modules_of_the_architecture_page()
    folders = tuple(name for name in listed if name.endswith("/"))
    assert [name for name in listed if not (PACKAGE / name).exists()] == []
    unlisted = {name for name in modules_of_the_package() if not name.startswith(folders)}
    assert sorted(unlisted - set(listed)) == []
    assert len(listed) == len(set(listed))


def test_the_import_contracts_are_there():
    contracts = {c["name"]: c for c in PYPROJECT["tool"]["importlinter"]["contracts"]}
    assert contracts["layers point downwards"]["exhaustive"] is True
    assert "jax" in contracts["host logic never imports jax"]["forbidden_modules"]
    assert contracts["the oracle depends on nothing that it judges"]["source_modules"]


def test_strictly_typed_modules_exist():
    """pyright says nothing about a strict path that does not exist."""
    strict = PYPROJECT["tool"]["pyright"]["strict"]
    assert [path for path in strict if not (ROOT / path).exists()] == []


def test_no_path_of_a_machine_is_tracked():
    machine = re.compile(rb"(?<![\w.])/(?:work|root|farm|home)/\w")
    found = [p.relative_to(ROOT) for p in tracked_files() if machine.search(p.read_bytes())]
    assert found == []


def shell_scripts() -> list[Path]:
    return [ROOT / ".ci" / "run", ROOT / "scripts" / "check", ROOT / "scripts" / "test"]


@pytest.mark.parametrize("script", shell_scripts(), ids=lambda path: path.name)
def test_shell_scripts_parse(script: Path):
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_commands_are_executable():
    commands = [p for p in tracked_files() if p.read_bytes().startswith(b"#!")]
    assert {*shell_scripts(), ROOT / "scripts" / "setup"} <= set(commands)
    assert [path.name for path in commands if not os.access(path, os.X_OK)] == []


def test_ci_runs_what_the_readme_says():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines.index("make setup") < lines.index("scripts/check") < lines.index("make test")


def test_pre_commit_runs_the_tools_of_scripts_check():
    config: dict[str, Any] = load_config(str(ROOT / ".pre-commit-config.yaml"))
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert all(repo["repo"] == "local" for repo in config["repos"])
    assert len({hook["id"] for hook in hooks}) == len(hooks)
    by_hooks = {re.sub(r" --.*", "", hook["entry"]).removeprefix(".venv/") for hook in hooks}
    checks = re.findall(r'^check "\w+" \$(bin/[^\n]*)', script_text("check"), re.MULTILINE)
    by_check = {re.sub(r" (--|\.$).*", "", command) for command in checks}
    assert by_hooks == {command.removeprefix(".venv/") for command in by_check}


def script_text(name: str) -> str:
    return (ROOT / "scripts" / name).read_text()


@pytest.fixture
def setup_script() -> ModuleType:
    """scripts/setup as a module. It has no suffix, so the loader is named."""
    loader = importlib.machinery.SourceFileLoader("setup_script", str(ROOT / "scripts" / "setup"))
    spec = importlib.util.spec_from_loader("setup_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_setup_accepts_the_pythons_of_pyproject(setup_script: ModuleType):
    oldest = ".".join(map(str, setup_script.OLDEST))
    assert PYPROJECT["project"]["requires-python"] == f">={oldest}"


@pytest.mark.parametrize("version", [(3, 10, 9), (3, 14, 0), (2, 7, 18)])
def test_setup_refuses_other_pythons_by_name(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
):
    monkeypatch.setattr(setup_script, "version_of", lambda path: version)
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 to 3\.13; .* is " + str(version[0])):
        setup_script.find_interpreter()


def test_setup_takes_the_python_that_is_asked_for(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked = tmp_path / "python"
    asked.write_text("#!/bin/sh\necho 3 12 1\n")
    asked.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(asked))
    assert setup_script.find_interpreter() == str(asked)
    monkeypatch.setenv("PYTHON", str(tmp_path / "missing"))
    assert setup_script.find_interpreter() != str(asked)
