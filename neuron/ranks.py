"""The ranks of a program, each in a process of its own, as the runtime wants it."""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from neuron.errors import NeuronError
from neuron.inputs import dtype_of, make_inputs, match_names, shared_tensors
from neuron.manifest import ProgramRecord
from neuron.nrt import LoadedNeff, RunError

_END_SECONDS = 10.0  # a rank that has answered gets so long to end by itself


@dataclass(frozen=True)
class Measurement:
    """How a program is timed. ``mode``: "device" or "host", whose clock counts."""

    warmup: int = 5
    iterations: int = 20
    mode: str = "host"
    timeout: float = 600.0


@dataclass(frozen=True)
class RankJob:
    """What one process does. ``environ`` is set before the runtime starts."""

    neff: Path
    program: ProgramRecord
    core: int
    rank: int
    world_size: int
    measurement: Measurement
    environ: Mapping[str, str]


def time_ranks(jobs: Sequence[RankJob]) -> list[list[float]]:
    """Milliseconds of each iteration, for each of these ranks. They run at the same time.

    Raises:
        RunError: a rank failed, died or took too long; the others are ended, as they would wait
            for it in a collective.
    """
    with _started(jobs) as ranks:
        return _answers(jobs, ranks)


def run_rank(job: RankJob, connection: Connection) -> None:
    """The process of a rank: send its durations, or the words of what went wrong."""
    os.environ.update(job.environ)
    try:
        connection.send(time_program(job))
    except NeuronError as error:
        connection.send(str(error))


def time_program(job: RankJob) -> list[float]:
    """Load the program and run it, in this process."""
    program, measurement = job.program, job.measurement
    loaded = LoadedNeff(job.neff, core=job.core, rank=job.rank, world_size=job.world_size)
    inputs = match_names(program.inputs, loaded.inputs)
    outputs = match_names(program.outputs, loaded.outputs)
    arrays = make_inputs(program.inputs, rank=job.rank)
    empty = [np.zeros(tensor.shape, dtype_of(tensor.dtype)) for tensor in program.outputs]
    durations = loaded.durations_ms(
        dict(zip(inputs, arrays, strict=True)),
        dict(zip(outputs, empty, strict=True)),
        shared_tensors(program.aliases, inputs, outputs),
        warmup=measurement.warmup,
        iterations=measurement.iterations,
        mode=measurement.mode,
    )
    loaded.close()
    return durations


@contextlib.contextmanager
def _started(jobs: Sequence[RankJob]) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """Processes of the ranks with our ends of their pipes; none is left afterwards."""
    context = multiprocessing.get_context("spawn")
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        for job in jobs:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run_rank, args=(job, theirs), daemon=True)
            process.start()
            theirs.close()  # so that ours ends when the process does
            ranks.append((process, ours))
        yield ranks
        for process, _ in ranks:
            process.join(_END_SECONDS)
    finally:
        for process, connection in ranks:
            process.kill()
            process.join()
            connection.close()


def _answers(
    jobs: Sequence[RankJob], ranks: Sequence[tuple[BaseProcess, Connection]]
) -> list[list[float]]:
    timeout = jobs[0].measurement.timeout
    deadline = time.monotonic() + timeout
    waiting: dict[Any, int] = {connection: number for number, (_, connection) in enumerate(ranks)}
    durations: dict[int, list[float]] = {}
    while waiting:
        ready = wait_for_any(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [jobs[number].rank for number in waiting.values()]
            raise RunError(
                "all ranks answer in time; one may wait for another", ranks=missing, seconds=timeout
            )
        for connection in ready:
            number = waiting.pop(connection)
            durations[number] = _answer(jobs[number], *ranks[number])
    return [durations[number] for number in range(len(jobs))]


def _answer(job: RankJob, process: BaseProcess, connection: Connection) -> list[float]:
    try:
        answer = connection.recv()
    except EOFError as error:
        process.join()
        raise RunError(
            "a rank answers before it ends", rank=job.rank, exit_code=process.exitcode
        ) from error
    if isinstance(answer, str):
        raise RunError(f"rank {job.rank}: {answer}")
    return answer
