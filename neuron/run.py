"""``python -m neuron.run DIR``: load compiled programs on Trainium and time them.

The inputs are random: the results mean nothing, the times do. The manifest, the environment and the
cores are looked at before anything starts.

Exit code 1: a program failed on the device. 2: something to put right before it can start.

It has not run on a device yet: what is tested is everything around ``neuron/nrt.py``, with a
stand-in for nrtpy.
"""

import dataclasses
import json
import os
import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from dcpjax.cli.options import SectionCommand, option
from dcpjax.cli.progress import LoadingProgress
from dcpjax.config.neuron_settings import (
    COMPILER_FLAGS,
    LNC,
    PROCESS_DEVICES,
    PROCESS_INDEX,
    ROOT_COMM,
    VISIBLE_CORES,
    Situation,
    check_settings,
    require,
    visible_cores,
)
from neuron.errors import EnvironmentSettingError, ManifestError
from neuron.machine import neuron_chips
from neuron.manifest import Manifest, Neff, ProgramRecord, Wanted, check_cores, load_manifest
from neuron.nrt import RunError, require_nrtpy
from neuron.options import COMMAND
from neuron.ranks import Measurement, RankJob, time_ranks
from neuron.targets import find_target

MAX_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Timing:
    """A program's times over the iterations and the ranks of this node."""

    name: str
    ranks: int
    iterations: int
    mean_ms: float
    min_ms: float
    max_ms: float
    slowest_rank: int


@dataclass(frozen=True)
class Place:
    """Where programs run: the ranks of this node, the core and the environment of each."""

    world_size: int
    ranks: range
    cores: tuple[int, ...]
    environ: Mapping[str, str]

    def jobs(self, program: ProgramRecord, neff: Path, measurement: Measurement) -> list[RankJob]:
        """One process per rank."""
        return [
            RankJob(neff, program, core, rank, self.world_size, measurement, self.environ)
            for rank, core in zip(self.ranks, self.cores, strict=True)
        ]


@click.command("neuron.run", cls=SectionCommand, context_settings=COMMAND)
@option("Measurement", "--program", "names", multiple=True, help="only this one; repeatable")
@option("Measurement", "--iterations", type=click.IntRange(1), default=20, help="timed runs")
@option("Measurement", "--warmup", type=click.IntRange(0), default=5, help="runs before them")
@option(
    "Measurement",
    "--clock",
    type=click.Choice(["host", "device"]),
    default="host",
    help="host: as an engine sees it; device: without the way there and back",
)
@option(
    "Measurement",
    "--timeout",
    type=click.FloatRange(0, MAX_SECONDS, min_open=True),
    default=600.0,
    help="seconds for one program, loading included",
)
@option("Nodes", "--nodes", type=click.IntRange(1), default=1, help="machines that run it together")
@option("Nodes", "--node", type=click.IntRange(0), default=0, help="which of them this one is")
@option("Output", "--json", "as_json", is_flag=True, help="print one JSON object at the end")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(
    folder: Path,
    names: tuple[str, ...],
    iterations: int,
    warmup: int,
    clock: str,
    timeout: float,
    nodes: int,
    node: int,
    as_json: bool,
) -> None:
    """Time the programs that python -m neuron.compile has left in FOLDER."""
    require_nrtpy()
    manifest = load_manifest(folder)
    programs = choose_programs(manifest, names)
    place = find_place(manifest, os.environ, nodes, node)
    measurement = Measurement(warmup, iterations, clock, timeout)
    timings: list[Timing] = []
    with LoadingProgress() as progress:
        for number, (program, neff) in enumerate(programs):
            progress(f"running {program.name}", number, len(programs))
            jobs = place.jobs(program, folder / neff.file, measurement)
            try:
                durations = time_ranks(jobs)
            except RunError as error:
                raise click.ClickException(f"{program.name}: {error}") from error
            timings.append(summarise(program.name, place.ranks, durations))
    if as_json:
        click.echo(json.dumps({"programs": [dataclasses.asdict(timing) for timing in timings]}))
    else:
        Console().print(_table(timings))


def choose_programs(manifest: Manifest, names: Sequence[str]) -> list[tuple[ProgramRecord, Neff]]:
    """The compiled programs, or those of these names.

    Raises:
        ManifestError: a name is none of them, or what was asked for is not compiled.
    """
    chosen = [manifest.program(name) for name in names] or list(manifest.programs)
    compiled = [(program, program.neff) for program in chosen if program.neff is not None]
    missing = [program for program in chosen if program.neff is None]
    if names and missing or not compiled:
        raise ManifestError(
            "programs that are run are compiled: python -m neuron.compile without --hlo-only",
            not_compiled=[program.name for program in missing],
            failures=[program.failure for program in missing if program.failure],
        )
    return compiled


def find_place(manifest: Manifest, environ: Mapping[str, str], nodes: int, node: int) -> Place:
    """Ranks, cores and environment of this node.

    Raises:
        DcpjaxError: the machine or its settings are not what the programs were compiled for.
    """
    ranks = local_ranks(manifest.world_size, nodes, node)
    return Place(
        world_size=manifest.world_size,
        ranks=ranks,
        cores=find_cores(manifest, len(ranks), environ, neuron_chips()),
        environ=rank_environment(manifest, environ, nodes),
    )


def local_ranks(world_size: int, nodes: int, node: int) -> range:
    """The ranks of this node: as many on each."""
    if world_size % nodes or node >= nodes:
        raise EnvironmentSettingError(
            "each node has as many ranks, and is one of the nodes",
            world_size=world_size,
            nodes=nodes,
            node=node,
        )
    each = world_size // nodes
    return range(node * each, (node + 1) * each)


def rank_environment(manifest: Manifest, environ: Mapping[str, str], nodes: int) -> dict[str, str]:
    """What a rank's process has to have set, beside what is set already.

    Raises:
        ConfigError: something is set that cannot be.
    """
    added: dict[str, str] = {}
    if LNC not in environ:
        added[LNC] = str(manifest.lnc)
    if ROOT_COMM not in environ and nodes == 1 and manifest.world_size > 1:
        added[ROOT_COMM] = f"127.0.0.1:{_free_port()}"
    findings = check_settings(Situation(nodes, manifest.lnc), {**environ, **added})
    of_the_plugin = (COMPILER_FLAGS, PROCESS_DEVICES, PROCESS_INDEX)
    require([item for item in findings if item.name not in of_the_plugin])
    return added


def find_cores(
    manifest: Manifest, num_ranks: int, environ: Mapping[str, str], chips: Mapping[str, int]
) -> tuple[int, ...]:
    """The logical core of each rank of this node: of those that are visible, the first ones.

    Args:
        chips: {kind: number} of this machine's Neuron devices.

    Raises:
        ManifestError: they are of another kind, or have fewer cores than there are ranks.
    """
    for chip in chips:
        Wanted(target=chip).check(manifest)
    count = sum(chips.values()) * find_target(manifest.target).cores(manifest.lnc)
    cores = tuple(range(count))
    if VISIBLE_CORES in environ:
        cores = tuple(core for core in visible_cores(environ[VISIBLE_CORES]) if core < count)
    check_cores(manifest, num_ranks, len(cores))
    return cores[:num_ranks]


def summarise(name: str, ranks: range, durations: Sequence[Sequence[float]]) -> Timing:
    """The times of a program; ``durations`` are those of each rank, in milliseconds."""
    means = [statistics.fmean(one) for one in durations]
    return Timing(
        name=name,
        ranks=len(ranks),
        iterations=len(durations[0]),
        mean_ms=round(statistics.fmean(means), 4),
        min_ms=round(min(map(min, durations)), 4),
        max_ms=round(max(map(max, durations)), 4),
        slowest_rank=ranks[means.index(max(means))],
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _table(timings: Sequence[Timing]) -> Table:
    table = Table("program", "ranks", "mean ms", "min ms", "max ms", "slowest rank")
    for timing in timings:
        times = (f"{value:.3f}" for value in (timing.mean_ms, timing.min_ms, timing.max_ms))
        table.add_row(timing.name, str(timing.ranks), *times, str(timing.slowest_rank))
    return table


if __name__ == "__main__":
    main(prog_name="python -m neuron.run")
