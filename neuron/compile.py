"""``python -m neuron.compile MODEL_OR_CONFIG``: an engine's steps to programs, and those to NEFFs.

Lowers and checks every program, compiles them with neuronx-cc, and writes them with a manifest.
Needs no Trainium device. Exit code 0: all programs are there. 1: some break a rule, then none is
compiled; or some did not compile, then the others are there. 2: something to put right first.
"""

import dataclasses
import os
import signal
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import click
from rich.console import Console

from dcpjax.cli.options import SectionCommand, option
from dcpjax.cli.progress import LoadingProgress
from dcpjax.config import EngineConfig
from neuron.buckets import MAX_PROGRAMS, refuse_too_many
from neuron.cache import NeffCache, default_folder
from neuron.compiler import CompilerFlags, OptLevel, default_optlevel, find_compiler
from neuron.jobs import (
    GIB,
    MEMORY_PER_JOB,
    Compiled,
    Driver,
    Failed,
    Job,
    compile_all,
    default_workers,
)
from neuron.lint import Finding
from neuron.manifest import FORMAT, Manifest, ProgramRecord, write_manifest
from neuron.options import (
    COMMAND,
    ENGINE_FIELDS,
    engine_config,
    engine_options,
    machine_options,
    program_options,
)
from neuron.output import add_result, open_output, write_programs
from neuron.program import Program, ProgramKind
from neuron.report_text import show_findings
from neuron.summary import show_summary
from neuron.targets import Target, find_target

EXIT_FAILED = 1


class Lowerable(Protocol):
    """A program before it is lowered."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> ProgramKind: ...
    def lower(self) -> Program: ...


def engine_calls(
    config: EngineConfig, target: Target, lnc: int, draft_tokens: int
) -> Sequence[Lowerable]:
    """What an engine of these settings compiles on this chip."""
    from neuron.programs import Deployment, find_calls

    return find_calls(Deployment(config, target, lnc, draft_tokens))


def broken_rules(
    program: Program, target: Target, lnc: int, operators: Collection[str] | None
) -> list[Finding]:
    """What ``python -m neuron.check`` finds."""
    from neuron.report import find_broken

    return find_broken(program, target, lnc=lnc, operators=operators)


@click.command("neuron.compile", cls=SectionCommand, context_settings=COMMAND)
@machine_options
@engine_options
@program_options
@option("Programs", "--max-programs", default=MAX_PROGRAMS, help="more are refused")
@option("Programs", "--check/--no-check", "checks", default=True, help="check them first")
@option("Output", "--output", type=click.Path(path_type=Path), required=True, help="folder")
@option("Output", "--hlo-only", is_flag=True, help="write the programs and compile nothing")
@option("Output", "--json", "as_json", is_flag=True, help="print one JSON object at the end")
@option("Compiler", "--compiler", default="neuronx-cc", help="name on PATH, or path")
@option(
    "Compiler",
    "--optlevel",
    "-O",
    type=click.IntRange(1, 3),
    help="for all programs; default: 1 for prefill, 2 for the others",
)
@option(
    "Compiler",
    "--compiler-option",
    "extra",
    multiple=True,
    help="passed on as it is, e.g. --compiler-option=--enable-fast-loading-neuron-binaries",
)
@option("Compiler", "--jobs", type=click.IntRange(1), help="compilers at a time; default: by cores")
@option(
    "Compiler",
    "--memory-per-job",
    default=MEMORY_PER_JOB // GIB,
    help="GiB of host memory that a compiler is thought to take, for the default of --jobs",
)
@option("Compiler", "--attempts", default=1, help="runs of the compiler for a program at most")
@option("Compiler", "--timeout", default=4 * 3600.0, help="seconds that one run may take")
@option(
    "Compiler",
    "--cache-dir",
    type=click.Path(path_type=Path),
    default=default_folder,
    help="NEFFs of earlier runs",
    show_default="in the user's cache folder",
)
def main(**options: Any) -> None:
    """Compile the steps of an engine for MODEL to NEFFs.

    MODEL is what dcpjax serve takes, or a config.json alone: weights are inputs of the programs.

    \b
    Example
        python -m neuron.compile ./model --tp 32 --dcp 4 --output ./compiled
    """
    flags = CompilerFlags(options["target"], options["lnc"], 1, options["extra"])
    workers = options["jobs"] or default_workers(memory_per_job=options["memory_per_job"] * GIB)
    driver = None if options["hlo_only"] else _driver(options)
    target, config = find_target(options["target"]), engine_config(options)
    calls = engine_calls(config, target, options["lnc"], options["draft_tokens"])
    _announce(calls, driver, options["max_programs"])
    programs = _lower(calls)
    if options["checks"]:
        _check(programs, target, options)
    with open_output(options["output"]):
        written = write_programs(programs, options["output"])
        jobs = [_job(record, hlo, flags, options["optlevel"]) for record, hlo in written]
        results = () if driver is None else _compile(driver, jobs, workers)
        records = _with_results([record for record, _ in written], results, options["output"])
        write_manifest(_manifest(config, options, records), options["output"])
    show_summary(records, results, as_json=options["as_json"])
    if any(isinstance(result, Failed) for result in results):
        raise click.exceptions.Exit(EXIT_FAILED)


def _with_results(
    records: Sequence[ProgramRecord], results: Sequence[Compiled | Failed], folder: Path
) -> Sequence[ProgramRecord]:
    """The records with their NEFFs, copied into the folder; as they are without results."""
    if not results:
        return records
    return [add_result(*pair, folder) for pair in zip(records, results, strict=True)]


def _driver(options: dict[str, Any]) -> Driver:
    if "NEURON_CC_FLAGS" in os.environ:
        click.echo(
            "NEURON_CC_FLAGS is for the PJRT plugin; here --compiler-option counts", err=True
        )
    return Driver(
        compiler=find_compiler(options["compiler"]),
        cache=NeffCache(options["cache_dir"]),
        attempts=options["attempts"],
        timeout=options["timeout"],
    )


def _announce(calls: Sequence[Lowerable], driver: Driver | None, max_programs: int) -> None:
    """Say how often the compiler will run, or refuse that."""
    counts = Counter[str](call.kind for call in calls)
    refuse_too_many(counts, max_programs)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    by = "written only" if driver is None else f"for neuronx-cc {driver.compiler}"
    click.echo(f"{len(calls)} programs ({kinds}), {by}", err=True)


def _lower(calls: Sequence[Lowerable]) -> list[Program]:
    programs: list[Program] = []
    with LoadingProgress() as progress:
        for number, call in enumerate(calls):
            progress(f"lowering {call.name}", number, len(calls))
            programs.append(call.lower())
    return programs


def _check(programs: Sequence[Program], target: Target, options: dict[str, Any]) -> None:
    """Show all that is broken, and end before anything is compiled if that would fail."""
    console = Console(stderr=True, soft_wrap=True)
    num_errors = 0
    for program in programs:
        findings = broken_rules(program, target, options["lnc"], options["operators"])
        if findings:
            click.echo(program.name, err=True)
            show_findings(findings, console)
        num_errors += sum(finding.rule.severity == "error" for finding in findings)
    if num_errors:
        click.echo(
            f"rules are broken at {num_errors} places; --no-check compiles all the same", err=True
        )
        raise click.exceptions.Exit(EXIT_FAILED)


def _job(record: ProgramRecord, hlo: bytes, flags: CompilerFlags, optlevel: OptLevel | None) -> Job:
    level = optlevel or default_optlevel(record.kind)
    return Job(record.name, hlo, dataclasses.replace(flags, optlevel=level))


def _compile(driver: Driver, jobs: Sequence[Job], workers: int) -> tuple[Compiled | Failed, ...]:
    done, lock = 0, threading.Lock()
    with LoadingProgress() as progress:
        progress("compiling", 0, len(jobs))

        def show(result: Compiled | Failed) -> None:
            nonlocal done
            with lock:
                done += 1
                progress(f"{result.state} {result.job.name}", done, len(jobs))

        def report(line: str) -> None:
            click.echo(line, err=True)

        return compile_all(driver, jobs, workers=workers, report=report, on_result=show)


def _manifest(
    config: EngineConfig, options: dict[str, Any], records: Sequence[ProgramRecord]
) -> Manifest:
    return Manifest(
        format=FORMAT,
        model=config.model,
        target=options["target"],
        lnc=options["lnc"],
        tp=config.tensor_parallel_size,
        dcp=config.decode_context_parallel_size,
        world_size=config.tensor_parallel_size,
        settings={name: getattr(config, name) for name in (*ENGINE_FIELDS, "apply_prefill_dcp")},
        programs=tuple(records),
    )


if __name__ == "__main__":
    # As Ctrl-C: the running compilers are ended first.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main(prog_name="python -m neuron.compile")
