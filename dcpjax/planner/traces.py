"""Traces of requests: lengths, arrival or think times, and which prompts share a prefix.

A trace is a list of sessions. The turns of a session follow each other: a turn is sent when the one
before it has ended and its think time is over. Traces with arrival times have one turn a session.

Prefixes are block ids: equal ids stand for equal tokens, and an id stands for its block and all
blocks before it. A list has only the full blocks of a prompt.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dcpjax.errors import ConfigError
from dcpjax.planner.trace_files import (
    Session,
    TraceError,
    Turn,
    read_azure,
    read_mooncake,
    read_weka,
)


@dataclass(frozen=True)
class Trace:
    """Sessions in the order of the file, and what they come from."""

    name: str
    sessions: tuple[Session, ...]
    block_size: int = 0

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def turns(self) -> list[Turn]:
        return [turn for session in self.sessions for turn in session.turns]

    @property
    def span(self) -> float:
        """Seconds from the first session's start to the last one's."""
        starts = [session.start for session in self.sessions]
        return max(starts) - min(starts)

    def head(self, count: int) -> "Trace":
        """The first ``count`` sessions."""
        return replace(self, sessions=self.sessions[:count])

    def at_rate(self, requests_per_second: float) -> "Trace":
        """The same sessions, closer together or further apart.

        Raises:
            ConfigError: a rate that is not above 0, or sessions that all start at once.
        """
        if requests_per_second <= 0 or self.span <= 0:
            raise ConfigError(
                "sessions that start at different times have a rate above 0",
                rate=requests_per_second,
                span=self.span,
            )
        first = self.sessions[0].start
        scale = (len(self.sessions) - 1) / self.span / requests_per_second
        return replace(
            self,
            sessions=tuple(
                replace(s, start=first + (s.start - first) * scale) for s in self.sessions
            ),
        )

    def limited(self, max_context: int) -> "Trace":
        """Without what is longer: a session ends before its first turn that does not fit."""
        sessions = (_limited(session, max_context) for session in self.sessions)
        return replace(self, sessions=tuple(s for s in sessions if s.turns))


def _limited(session: Session, max_context: int) -> Session:
    for index, turn in enumerate(session.turns):
        if turn.num_input + turn.num_output > max_context:
            return replace(session, turns=session.turns[:index])
    return session


READERS: dict[str, Callable[[Path], tuple[Sequence[Session], int]]] = {
    "mooncake": read_mooncake,
    "weka": read_weka,
    "azure": read_azure,
}


def load_trace(path: str | Path, kind: str | None = None) -> Trace:
    """Read a trace.

    Args:
        path: a file, or for ``weka`` a folder of conversations.
        kind: ``mooncake`` (JSON lines), ``weka`` (agentic JSON, plain or delta-encoded) or
            ``azure`` (CSV); default: by the name of the file.

    Raises:
        TraceError: no such file or kind, no text, or a line that is wrong, with its number.
    """
    path = Path(path)
    if not path.exists():
        raise TraceError("the trace exists", path=str(path))
    if kind is not None and kind not in READERS:
        raise TraceError("the kind of trace is known", kind=kind, known=list(READERS))
    try:
        sessions, block_size = READERS[kind or _kind_of(path)](path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"a trace is a file of text: {error}", path=str(path)) from error
    if not sessions:
        raise TraceError("a trace has at least one request", path=str(path))
    return Trace(path.stem, tuple(sessions), block_size)


def _kind_of(path: Path) -> str:
    if path.is_dir() or path.suffix == ".json":
        return "weka"
    if path.suffix == ".csv":
        return "azure"
    with path.open(encoding="utf-8", errors="replace") as file:
        return "weka" if '"weka-delta/' in file.readline() else "mooncake"


def hit_tokens(trace: Trace, grain: int) -> int:
    """Prompt tokens that a cache without limits serves, in the order of the trace.

    Args:
        grain: tokens of the least prefix that is reused; a multiple of the block size, or less.
    """
    blocks = max(1, grain // trace.block_size) if trace.block_size else 1
    seen: set[int] = set()
    hits = 0
    for turn in trace.turns:
        shared = 0
        while shared < len(turn.blocks) and turn.blocks[shared] in seen:
            shared += 1
        hits += shared // blocks * blocks * trace.block_size
        seen.update(turn.blocks)
    return hits
