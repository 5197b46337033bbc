"""neuronx-cc: where it is, which one it is, and how it is called.

It is found by running it. What a package manager says counts for nothing: the default public index
has placeholders of the same names, whose installation succeeds and which hold no compiler.

The command line and its options are those of the documentation of Neuron 2.32 (compiler 2.27).
Open until a Trainium machine was asked: how that compiler spells the target trn3, which other
public projects pass and its own list leaves out.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from neuron.errors import CompilerError
from neuron.program import ProgramKind
from neuron.targets import find_target

EXECUTABLE = "neuronx-cc"
INSTALL_HINT = (
    "install it from AWS's own Neuron package index (pip install neuronx-cc with that index as "
    "--extra-index-url, see the setup guide of the Neuron SDK), or write the programs alone with "
    "--hlo-only and compile them elsewhere: any x86-64 Linux machine will do"
)

OptLevel = Literal[1, 2, 3]
HLO_FILE, NEFF_FILE, LOG_FILE = "model.hlo_module.pb", "model.neff", "log-neuron-cc.txt"

_INTEGER_OPTIONS_SINCE = (2, 27)
_VERSION = re.compile(r"compiler version (\d+(?:\.\d+)+)(\S*)", re.IGNORECASE)
_WRONG_PACKAGE = "WRONG PACKAGE"
_VERSION_SECONDS = 120.0  # its first start after an installation compiles Python files
_OURS = (
    "--framework --target --lnc -lnc --logical-nc-config --model-type --auto-cast --optlevel -O "
    "--implicit-integer-downcast --native-int64 --output --logfile --verbose"
).split()


@dataclass(frozen=True)
class Compiler:
    """A neuronx-cc that answered. ``build`` is what follows its version, e.g. "+4a9b2326"."""

    path: str
    version: tuple[int, ...]
    build: str = ""

    def __str__(self) -> str:
        return ".".join(map(str, self.version)) + self.build


def default_optlevel(kind: ProgramKind) -> OptLevel:
    """Decode is run most and compiled at -O2; a large prefill program takes too long there."""
    return 1 if kind == "prefill" else 2


@dataclass(frozen=True)
class CompilerFlags:
    """What decides about the NEFF beside the program and the compiler.

    Attributes:
        lnc: physical cores of a logical one; the process that runs the NEFF must have the same.
        extra: further options, passed on as they are.
    """

    target: str
    lnc: int
    optlevel: OptLevel
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        find_target(self.target).check_lnc(self.lnc)
        if self.optlevel not in (1, 2, 3):
            raise CompilerError("the optimisation level is 1, 2 or 3", optlevel=self.optlevel)
        for option in self.extra:
            name = option.partition("=")[0]
            if name in _OURS or re.fullmatch(r"-O\d", name):
                raise CompilerError(
                    "a further compiler option is none that the driver sets itself", option=option
                )

    def arguments(self, version: tuple[int, ...]) -> tuple[str, ...]:
        """The options for a compiler of this version. Files are not among them."""
        # Chips before trn2 have no --lnc; they are no targets of ours.
        options = ["--framework", "XLA", "--target", self.target, "--lnc", str(self.lnc)]
        options += ["--model-type", "transformer", "--auto-cast", "none", f"-O{self.optlevel}"]
        if version >= _INTEGER_OPTIONS_SINCE:
            # As the release after 2.27 has them by default. The programs have no 64-bit integer.
            options += ["--implicit-integer-downcast", "none", "--native-int64", "enabled"]
        return (*options, *self.extra)


def command(compiler: Compiler, arguments: Sequence[str]) -> list[str]:
    """The command line, for a working directory that has the program as HLO_FILE."""
    files = ["--output", NEFF_FILE, "--logfile", LOG_FILE, "--verbose", "35"]
    return [compiler.path, "compile", HLO_FILE, *arguments, *files]


def child_environment(environ: Mapping[str, str], target: str) -> dict[str, str]:
    """The environment of the compiler.

    Without a device it takes the target from the override. An allocator that is preloaded for the
    server breaks it. NEURON_CC_FLAGS belongs to the PJRT plugin and is left out, so that what
    decides about a NEFF stands in its manifest.
    """
    child = {name: value for name, value in environ.items() if name != "NEURON_CC_FLAGS"}
    child["NEURON_PLATFORM_TARGET_OVERRIDE"] = target
    preloaded = re.split(r"[\s:]+", child.pop("LD_PRELOAD", "").strip())
    kept = [library for library in preloaded if library and "tcmalloc" not in library]
    if kept:
        child["LD_PRELOAD"] = ":".join(kept)
    return child


def find_compiler(name: str = EXECUTABLE, *, search: Iterable[str] | None = None) -> Compiler:
    """The compiler of this name on PATH, or at this path.

    Args:
        search: folders in which to look for a placeholder package, to explain a missing compiler;
            default: where Python looks for modules.

    Raises:
        CompilerError: there is none, or what has its name does not work.
    """
    path = shutil.which(name)
    if path is None:
        placeholder = find_placeholder(sys.path if search is None else search)
        if placeholder is not None:
            raise _placeholder_error(name, str(placeholder))
        raise CompilerError(f"{name} is not on PATH: {INSTALL_HINT}")
    said = _ask_version(path)
    found = _VERSION.search(said)
    if found is None:
        raise CompilerError(
            "neuronx-cc --version names the compiler's version", path=path, output=said[-500:]
        )
    version = tuple(int(part) for part in found[1].split("."))
    return Compiler(str(Path(path).absolute()), version, found[2])


def find_placeholder(search: Iterable[str]) -> Path | None:
    """The package on the default public index that has the compiler's name and nothing inside.

    Its folder has a hyphen, so no code can import it; the compiler's own is ``neuronxcc``.
    """
    for folder in search:
        guard = Path(folder) / EXECUTABLE / "__init__.py"
        if guard.is_file() and _WRONG_PACKAGE in guard.read_text(errors="replace"):
            return guard.parent
    return None


def _ask_version(path: str) -> str:
    try:
        answer = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError("neuronx-cc can be run", path=path, reason=str(error)) from error
    said = answer.stdout + answer.stderr
    if _WRONG_PACKAGE in said:
        raise _placeholder_error(path, said.strip()[-300:])
    if answer.returncode:
        raise CompilerError(
            "neuronx-cc --version works: PATH and PYTHONPATH belong to one environment",
            path=path,
            exit_code=answer.returncode,
            output=said[-500:],
        )
    return said


def _placeholder_error(name: str, evidence: str) -> CompilerError:
    return CompilerError(
        f"{name} is not there: the installed package of that name is the placeholder of the "
        f"default public index, which holds no compiler. Uninstall it, then {INSTALL_HINT}",
        found=evidence,
    )
