"""Many programs to NEFFs: from the cache, else by several compilers at a time.

A program that does not compile keeps none of the others from it.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from neuron.attempt import Attempt, Call, log_tail, run_attempt
from neuron.cache import Entry, NeffCache, entry_key, writing_cache
from neuron.compiler import NEFF_FILE, Compiler, CompilerFlags
from neuron.errors import CompilerError, ManifestError
from neuron.files import file_sha256, sha256

GIB = 2**30
MEMORY_PER_JOB = 16 * GIB
"""Host memory that one compiler may take. A guess: large prefill programs are known to run out of
the host's memory, and nobody has measured ours."""
CORES_PER_JOB = 4
"""The compiler's own threads. A guess too."""

Report = Callable[[str], None]
"""Gets a line for a person, from any thread."""


@dataclass(frozen=True)
class Job:
    """A program to compile. ``program`` is the file that the compiler reads."""

    name: str
    program: bytes
    flags: CompilerFlags


@dataclass(frozen=True)
class Compiled:
    """``neff`` lies in the cache; ``is_cached``: it was there before."""

    job: Job
    entry: Entry
    neff: Path
    is_cached: bool

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return self.entry.attempts

    @property
    def state(self) -> str:
        return "cached" if self.is_cached else "compiled"


@dataclass(frozen=True)
class Failed:
    """``logs``: the folder with everything that the compiler wrote; ``tail``: its end."""

    job: Job
    attempts: tuple[Attempt, ...]
    logs: Path
    tail: str

    @property
    def state(self) -> str:
        return "failed"

    @property
    def failure(self) -> str:
        """Why the last attempt made no NEFF."""
        return self.attempts[-1].failure or ""


@dataclass(frozen=True)
class Driver:
    """How programs are compiled.

    Attributes:
        attempts: runs of the compiler for a program at most; each one is reported and counted.
        timeout: seconds for one run.
    """

    compiler: Compiler
    cache: NeffCache
    attempts: int = 1
    timeout: float = 4 * 3600.0
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def __post_init__(self) -> None:
        if self.attempts < 1 or not self.timeout > 0:
            raise CompilerError(
                "a program gets at least one attempt and a time above zero",
                attempts=self.attempts,
                timeout=self.timeout,
            )

    def compile(self, job: Job, stop: threading.Event, report: Report) -> Compiled | Failed:
        """The NEFF of one program, from the cache or new.

        Raises:
            CompilerError: the cache cannot be written.
        """
        key = entry_key(job.program, job.flags.arguments(self.compiler.version), self.compiler)

        def say_waiting() -> None:
            report(f"{job.name}: waits for another compiler of the same program")

        with writing_cache(self.cache.folder), self.cache.lock(key, stop, say_waiting):
            entry = self._cached(job, key, report)
            if entry is not None:
                return Compiled(job, entry, self.cache.neff_path(key), is_cached=True)
            with self.cache.work_folder(key) as work:
                return self._compile(job, key, work, stop, report)

    def _cached(self, job: Job, key: str, report: Report) -> Entry | None:
        try:
            return self.cache.read(key)
        except ManifestError as error:
            report(f"{job.name}: compiled again, the cache is damaged: {error}")
            self.cache.discard(key)
            return None

    def _compile(
        self, job: Job, key: str, work: Path, stop: threading.Event, report: Report
    ) -> Compiled | Failed:
        attempts, last = self._attempt(job, work, stop, report)
        if attempts[-1].failure is not None:
            tail, kept = log_tail(last), self.cache.keep_failure(key, work)
            return Failed(job, attempts, kept, tail)
        (last / NEFF_FILE).rename(work / NEFF_FILE)
        neff = work / NEFF_FILE
        entry = Entry(
            key=key,
            program_sha256=sha256(job.program),
            arguments=job.flags.arguments(self.compiler.version),
            compiler=str(self.compiler),
            neff_bytes=neff.stat().st_size,
            neff_sha256=file_sha256(neff),
            attempts=attempts,
        )
        self.cache.store(work, entry)
        return Compiled(job, entry, self.cache.neff_path(key), is_cached=False)

    def _attempt(
        self, job: Job, work: Path, stop: threading.Event, report: Report
    ) -> tuple[tuple[Attempt, ...], Path]:
        """Run the compiler until it succeeds or may not again: all attempts, the last's folder."""
        call = Call(
            compiler=self.compiler,
            arguments=job.flags.arguments(self.compiler.version),
            target=job.flags.target,
            timeout=self.timeout,
            environ=self.environ,
        )
        attempts: list[Attempt] = []
        while True:
            folder = work / f"attempt-{len(attempts) + 1}"
            attempts.append(run_attempt(call, job.program, folder, stop))
            failure = attempts[-1].failure
            if failure is not None:
                report(f"{job.name}: attempt {len(attempts)} of {self.attempts}: {failure}")
            if failure is None or len(attempts) == self.attempts or stop.is_set():
                return tuple(attempts), folder


def compile_all(
    driver: Driver,
    jobs: Sequence[Job],
    *,
    workers: int,
    report: Report,
    on_result: Callable[[Compiled | Failed], None],
) -> tuple[Compiled | Failed, ...]:
    """The results, in the order of the jobs. An interruption ends the running compilers first.

    Args:
        workers: compilers at a time.
        on_result: is called with each result when it is there, from any thread.
    """
    stop = threading.Event()

    def run(job: Job) -> Compiled | Failed:
        result = driver.compile(job, stop, report)
        on_result(result)
        return result

    with ThreadPoolExecutor(workers, thread_name_prefix="neuronx-cc") as pool:
        try:
            futures = [pool.submit(run, job) for job in jobs]
            ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in ended:
                future.result()  # raises what ended it, while others may still run
            return tuple(future.result() for future in futures)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def default_workers(
    *, memory_per_job: int = MEMORY_PER_JOB, cores: int | None = None, free: int | None = None
) -> int:
    """Compilers at a time, so that their memory and their threads fit into this machine.

    Args:
        memory_per_job: bytes.
        cores, free: of this machine unless given; ``free`` in bytes.
    """
    if memory_per_job < 1:
        raise CompilerError("a compiler needs memory", memory_per_job=memory_per_job)
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    free = psutil.virtual_memory().available if free is None else free
    return max(1, min(cores // CORES_PER_JOB, free // memory_per_job))
