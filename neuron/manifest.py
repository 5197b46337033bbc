"""What lies in a folder of compiled programs, and for which machine and engine it was made.

``manifest.json`` stands beside ``NAME.hlo_module.pb`` and ``NAME.neff``. It is written last and at
once, so a folder with a manifest is complete; everything in it is checked when it is read.

Names of a NEFF's tensors are an open point. nkipy sets the frontend attributes
``neff_input_names`` on each parameter and ``neff_output_names`` on the root; what the compiler
chooses without them was never seen by us. The order of ``inputs`` and ``outputs`` here is that of
the program's parameters and of its root's elements; ``neff_name`` is None where none was set.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from neuron.attempt import Attempt
from neuron.errors import ManifestError
from neuron.files import file_sha256, sha256, write_atomically
from neuron.hlo import entry as entry_computation
from neuron.hlo import root
from neuron.program import IndexRange, Program, ProgramKind, TensorSpec

MANIFEST_FILE = "manifest.json"
FORMAT = 1

FileName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.+-]*\Z", max_length=255)]
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Count = Annotated[int, msgspec.Meta(ge=1)]
Index = Annotated[int, msgspec.Meta(ge=0)]


class _Version(msgspec.Struct, frozen=True):
    """What is the same in every format; the rest may have another form."""

    format: int


class _Part(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """A part of the file: whatever is unknown or has another type is refused."""


class Tensor(_Part, frozen=True):
    """An input or output as one device has it; ``ranges`` are (start, stop, low, high)."""

    name: str
    shape: tuple[Index, ...]
    dtype: str
    ranges: tuple[tuple[Index, Index, int, int], ...] = ()
    neff_name: str | None = None

    def spec(self) -> TensorSpec:
        return TensorSpec(
            self.name, self.shape, self.dtype, tuple(IndexRange(*part) for part in self.ranges)
        )


class Neff(_Part, frozen=True):
    """A compiled program. ``arguments`` are the compiler's options; of the ``attempts`` the last
    one made it, and all are kept: a retry that helped is worth knowing."""

    file: FileName
    num_bytes: Count
    sha256: Digest
    arguments: tuple[str, ...]
    compiler: str
    cache_key: Digest
    attempts: tuple[Attempt, ...]


class ProgramRecord(_Part, frozen=True):
    """A program. ``aliases`` are (output, input) that share memory. Without ``neff`` it was not
    compiled: nobody asked, or, with ``failure``, it could not be."""

    name: FileName
    kind: ProgramKind
    num_ranks: Count
    hlo_file: FileName
    hlo_sha256: Digest
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    aliases: tuple[tuple[Index, Index], ...]
    neff: Neff | None = None
    failure: str | None = None


class Manifest(_Part, frozen=True):
    """A folder of programs for one engine on one kind of machine.

    ``settings`` are the engine's; ``world_size`` is the number of ranks, each a logical core of
    ``lnc`` physical ones.
    """

    format: int
    model: str
    target: str
    lnc: Count
    tp: Count
    dcp: Count
    world_size: Count
    settings: dict[str, int | float | str | bool | None]
    programs: tuple[ProgramRecord, ...]

    def program(self, name: str) -> ProgramRecord:
        """The program of this name.

        Raises:
            ManifestError: there is none.
        """
        for program in self.programs:
            if program.name == name:
                return program
        names = [program.name for program in self.programs]
        raise ManifestError("a program is one of the manifest's", name=name, programs=names)


def record_program(program: Program, hlo: bytes) -> ProgramRecord:
    """What the manifest says about a program before it is compiled. ``hlo`` is its file."""
    entry = entry_computation(program.module)
    parameters = sorted(
        (i for i in entry.instructions if i.opcode == "parameter"), key=lambda i: i.parameter_number
    )
    input_names = [_attribute(item, "neff_input_names") for item in parameters]
    joined = _attribute(root(entry), "neff_output_names")
    output_names = joined.split(",") if joined else [None] * len(program.outputs)
    aliases = [
        (next(iter(alias.output_shape_index), 0), alias.parameter_number)  # () is a lone output
        for alias in program.module.input_output_alias.entries
    ]
    return ProgramRecord(
        name=program.name,
        kind=program.kind,
        num_ranks=program.num_ranks,
        hlo_file=f"{program.name}.hlo_module.pb",
        hlo_sha256=sha256(hlo),
        inputs=_tensors(program.inputs, input_names),
        outputs=_tensors(program.outputs, output_names),
        aliases=tuple(aliases),
    )


def _attribute(instruction: Any, name: str) -> str | None:
    attributes = instruction.frontend_attributes.map
    return next((pair.value for pair in attributes if pair.key == name), None)


def _tensors(specs: Sequence[TensorSpec], names: Sequence[str | None]) -> tuple[Tensor, ...]:
    if len(names) != len(specs):
        raise ManifestError(
            "a program declares each of its tensors", declared=len(specs), found=len(names)
        )
    return tuple(
        Tensor(
            name=spec.name,
            shape=spec.shape,
            dtype=spec.dtype,
            ranges=tuple((r.start, r.stop, r.low, r.high) for r in spec.ranges),
            neff_name=name,
        )
        for spec, name in zip(specs, names, strict=True)
    )


def write_manifest(manifest: Manifest, folder: Path) -> Path:
    """Write the manifest, whole or not at all; its path."""
    path = folder / MANIFEST_FILE
    write_atomically(path, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    return path


def load_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, whose files are all there and as they were written.

    Raises:
        ManifestError: it is missing or broken, or a file is missing or was changed.
    """
    path = folder / MANIFEST_FILE
    try:
        content = path.read_bytes()
        found = msgspec.json.decode(content, type=_Version).format
        if found != FORMAT:
            raise ManifestError(
                "a manifest is of this version's format: compile again", wanted=FORMAT, found=found
            )
        manifest = msgspec.json.decode(content, type=Manifest)
    except OSError as error:
        raise ManifestError(
            f"a folder of compiled programs has a {MANIFEST_FILE}; python -m neuron.compile "
            "writes it last",
            folder=str(folder),
            why=str(error),
        ) from error
    except msgspec.DecodeError as error:
        raise ManifestError("a manifest has its form", path=str(path), why=str(error)) from error
    _check_names(manifest)
    for program in manifest.programs:
        _check_options(manifest, program)
        _check_file(folder / program.hlo_file, program.hlo_sha256)
        if program.neff is not None:
            _check_file(folder / program.neff.file, program.neff.sha256)
    return manifest


def _check_names(manifest: Manifest) -> None:
    names = [program.name for program in manifest.programs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ManifestError("programs have different names", repeated=repeated)
    for program in manifest.programs:
        if program.num_ranks != manifest.world_size:
            raise ManifestError(
                "a program is for the manifest's ranks",
                name=program.name,
                num_ranks=program.num_ranks,
                world_size=manifest.world_size,
            )


def _check_options(manifest: Manifest, program: ProgramRecord) -> None:
    """Raise where a NEFF was compiled for another chip or core size than its folder says."""
    if program.neff is None:
        return
    options = program.neff.arguments
    given = dict(zip(options, options[1:], strict=False))
    for option, wanted in (("--target", manifest.target), ("--lnc", str(manifest.lnc))):
        if given.get(option) != wanted:
            raise ManifestError(
                "a NEFF was compiled with the options that its folder says: compile again",
                name=program.name,
                option=option,
                wanted=wanted,
                compiled=given.get(option),
            )


def _check_file(path: Path, wanted: str) -> None:
    try:
        found = file_sha256(path)
    except OSError as error:
        raise ManifestError(
            "the files of a manifest are there: compile again", missing=str(path), why=str(error)
        ) from error
    if found != wanted:
        raise ManifestError(
            "the files of a manifest are as they were written: compile again",
            path=str(path),
            written=wanted,
            found=found,
        )


@dataclass(frozen=True)
class Wanted:
    """What programs are wanted for; None: whatever it is."""

    target: str | None = None
    lnc: int | None = None
    tp: int | None = None
    dcp: int | None = None

    def check(self, manifest: Manifest) -> None:
        """Raise ManifestError, with both values, where the programs are for something else."""
        for name in ("target", "lnc", "tp", "dcp"):
            wanted, found = getattr(self, name), getattr(manifest, name)
            if wanted not in (None, found):
                raise ManifestError(
                    f"the programs were compiled for another {name}: compile them again, or use "
                    "them as they are",
                    wanted=wanted,
                    compiled=found,
                )


def check_cores(manifest: Manifest, num_ranks: int, num_cores: int) -> None:
    """Raise ManifestError where so many ranks of the programs find fewer logical cores."""
    if num_cores < num_ranks:
        raise ManifestError(
            "each rank has a logical core of its own",
            ranks=num_ranks,
            cores=num_cores,
            world_size=manifest.world_size,
            lnc=manifest.lnc,
        )
