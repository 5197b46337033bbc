"""Replay a trace through simulated engines. The same inputs give the same result, always."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dcpjax.errors import ConfigError
from dcpjax.planner.events import EventQueue
from dcpjax.planner.sim_cluster import Cluster, ClusterState
from dcpjax.planner.sim_job import Job
from dcpjax.planner.sim_report import Objective, Report, make_report
from dcpjax.planner.trace_files import Session
from dcpjax.planner.traces import Trace

Observer = Callable[["Simulation"], None]
"""Looks at a simulation after each of its events."""


@dataclass
class Simulation:
    """A run: the engines, and all requests that were sent so far."""

    state: ClusterState
    events: EventQueue
    jobs: list[Job]
    num_present: int = 0
    area: float = 0.0
    changed: float = 0.0

    def count(self, change: int) -> None:
        """A request came or went; ``area`` is the time integral of how many are here."""
        self.area += self.num_present * (self.events.now - self.changed)
        self.changed = self.events.now
        self.num_present += change


def simulate(
    trace: Trace,
    cluster: Cluster,
    *,
    concurrency: int | None = None,
    think_times: bool = True,
    objective: Objective | None = None,
    observer: Observer | None = None,
) -> Report:
    """Replay a trace.

    Args:
        concurrency: so many sessions at a time, each followed at once by the next of the trace;
            None: every session starts when the trace says.
        think_times: pause between the turns of a session as the trace says.

    Raises:
        ConfigError: a sequence that no engine could ever hold, or a concurrency below 1.
    """
    if concurrency is not None and concurrency < 1:
        raise ConfigError("concurrency is at least 1", concurrency=concurrency)
    cluster.check_fits(max(turn.num_input + turn.num_output for turn in trace.turns))
    events = EventQueue()
    run = Simulation(ClusterState(cluster, events, trace.block_size), events, [])
    _Replay(run, trace, concurrency, think_times).begin()
    events.run(None if observer is None else lambda: observer(run))
    return make_report(
        trace.name,
        cluster,
        run.jobs,
        run.state,
        area=run.area,
        end=run.changed,
        objective=objective,
    )


class _Replay:
    """Sends turns, each when the one before has ended."""

    def __init__(
        self, run: Simulation, trace: Trace, concurrency: int | None, think_times: bool
    ) -> None:
        self._run, self._think_times = run, think_times
        self._sessions = trace.sessions
        self._concurrency = concurrency
        self._left: Iterator[Session] = iter(trace.sessions)
        self._where: dict[int, tuple[Session, int]] = {}
        run.state.on_finished = self._finished

    def begin(self) -> None:
        if self._concurrency is None:
            for session in self._sessions:
                self._run.events.at(session.start, lambda session=session: self._send(session, 0))
            return
        for _ in range(self._concurrency):
            self._run.events.at(0.0, self._next_session)

    def _next_session(self) -> None:
        session = next(self._left, None)
        if session is not None:
            self._send(session, 0)

    def _send(self, session: Session, index: int) -> None:
        run = self._run
        job = Job(len(run.jobs), session.turns[index], run.events.now)
        run.jobs.append(job)
        self._where[job.number] = (session, index)
        run.count(1)
        run.state.submit(job)

    def _finished(self, job: Job) -> None:
        run = self._run
        run.count(-1)
        session, index = self._where.pop(job.number)
        index += 1
        if index < len(session.turns):
            think = session.turns[index].think if self._think_times else 0.0
            run.events.after(think, lambda: self._send(session, index))
        elif self._concurrency is not None:
            run.events.after(0.0, self._next_session)
