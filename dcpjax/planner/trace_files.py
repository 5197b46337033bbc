"""The formats of traces that others publish. Every error names the file and the line."""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from dcpjax.errors import ConfigError

MOONCAKE_BLOCK = 512
"""Tokens of a block in Mooncake's traces."""
LONGEST_PAUSE = 300.0
"""Seconds that a recorded pause is cut to: people leave conversations open overnight."""


class TraceError(ConfigError):
    """A trace that cannot be read."""


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        blocks: ids of the full blocks of the prompt.
        think: seconds between the end of the turn before and this one.
    """

    num_input: int
    num_output: int
    blocks: tuple[int, ...] = ()
    think: float = 0.0


@dataclass(frozen=True)
class Session:
    """Turns that follow each other. ``start``: seconds at which the first may be sent."""

    start: float
    turns: tuple[Turn, ...]


def read_mooncake(path: Path) -> tuple[Sequence[Session], int]:
    """JSON lines: timestamp (ms), input_length, output_length, hash_ids.

    There are ceil(input_length / 512) ids; that of a block that is not full is left out.
    """
    sessions: list[Session] = []
    last = 0.0
    for where, row in _json_lines(path):
        time = _number(row, "timestamp", where)
        if sessions and time < last:
            raise TraceError("timestamps do not fall", **where, timestamp=time, before=last)
        last = time
        num_input = int(_number(row, "input_length", where, least=1))
        num_output = int(_number(row, "output_length", where))
        ids = _ids({"hash_ids": [], **row}, where)
        if len(ids) != -(-num_input // MOONCAKE_BLOCK):
            raise TraceError(
                f"hash_ids has an id for each {MOONCAKE_BLOCK} tokens of the prompt",
                **where,
                input_length=num_input,
            )
        blocks = tuple(ids[: num_input // MOONCAKE_BLOCK])
        turn = Turn(num_input, max(1, num_output), blocks)
        sessions.append(Session(time / 1000, (turn,)))
    return sessions, MOONCAKE_BLOCK


def read_azure(path: Path) -> tuple[Sequence[Session], int]:
    """CSV with TIMESTAMP, ContextTokens and GeneratedTokens; nothing about prefixes."""
    sessions: list[Session] = []
    first: datetime | None = None
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            where = {"path": str(path), "line": reader.line_num}
            time = _timestamp(row.get("TIMESTAMP"), where)
            first = first or time
            start = (time - first).total_seconds()
            if sessions and start < sessions[-1].start:
                raise TraceError("timestamps do not fall", **where, TIMESTAMP=row["TIMESTAMP"])
            num_input = int(_number(row, "ContextTokens", where, least=1))
            num_output = int(_number(row, "GeneratedTokens", where))
            sessions.append(Session(start, (Turn(num_input, max(1, num_output)),)))
    return sessions, 0


def _timestamp(text: str | None, where: dict[str, Any]) -> datetime:
    try:
        return datetime.fromisoformat((text or "")[:26])  # seven decimals; six are understood
    except ValueError as error:
        raise TraceError("TIMESTAMP is a date and time", **where, TIMESTAMP=text) from error


def read_weka(path: Path) -> tuple[Sequence[Session], int]:
    """Conversations of agents: a JSON file, a delta-encoded one, or a folder of them.

    A sub-agent is a session of its own that starts when its parent's entry says so; it does not
    hold up its parent. Ids are local to a conversation and made distinct here.
    """
    files = sorted([*path.glob("*.json"), *path.glob("*.jsonl")]) if path.is_dir() else [path]
    sessions: list[Session] = []
    sizes: set[int] = set()
    for number, file in enumerate(files):
        trace = _weka_trace(file)
        sizes.add(int(_number(trace, "block_size", {"path": str(file)}, least=1)))
        sessions += _conversation(trace, number << 40, {"path": str(file)})
    if len(sizes) > 1:
        raise TraceError("conversations of one trace have one block_size", sizes=sorted(sizes))
    return sessions, sizes.pop() if sizes else 0


def _conversation(trace: dict[str, Any], first_id: int, where: dict[str, Any]) -> list[Session]:
    requests = _entries(trace, where)
    own = [entry for entry in requests if entry.get("type") != "subagent"]
    sessions = [Session(0.0, _turns(own, first_id, where))]
    for entry in requests:
        if entry.get("type") == "subagent":
            length = _number(
                {**entry, "duration_ms": entry.get("duration_ms") or 0}, "duration_ms", where
            )
            start = _number(entry, "t", where) - length / 1000
            turns = _turns(_entries(entry, where), first_id, where)
            sessions.append(Session(max(0.0, start), turns))
    return [session for session in sessions if session.turns]


def _turns(
    entries: Sequence[dict[str, Any]], first_id: int, where: dict[str, Any]
) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    last = 0.0
    for index, entry in enumerate(entries):
        at = {**where, "request": index}
        time = _number(entry, "t", at)
        if time < last:
            raise TraceError("the times of a conversation do not fall", **at, t=time, before=last)
        think = min(LONGEST_PAUSE, _number({"think_time": 0.0, **entry}, "think_time", at))
        ids = _ids(entry, at)
        num_input = int(_number(entry, "in", at, least=1))
        num_output = max(1, int(_number(entry, "out", at)))
        blocks = tuple(first_id + block for block in ids)
        turns.append(Turn(num_input, num_output, blocks, think if index else 0.0))
        last = time
    return tuple(turns)


def _weka_trace(file: Path) -> dict[str, Any]:
    if file.suffix == ".json":
        return _json_object(file.read_text(encoding="utf-8"), {"path": str(file), "line": 1})
    lines = _json_lines(file)
    next(lines, None)  # where the file comes from
    nothing: dict[str, Any] = {}
    where, head = next(lines, ({"path": str(file)}, nothing))
    head["requests"] = _delta_entries(lines, int(_number(head, "requests", where)), where)
    return head


def _delta_entries(
    lines: Iterator[tuple[dict[str, Any], dict[str, Any]]], count: int, where: dict[str, Any]
) -> list[dict[str, Any]]:
    """Entries whose ids are ``[shared, [[start, count], …]]``: the first ``shared`` ids of the
    entry before, then runs of consecutive ones."""
    entries: list[dict[str, Any]] = []
    before: list[int] = []
    for _ in range(count):
        nothing: dict[str, Any] = {}
        where, entry = next(lines, (where, nothing))
        if entry.get("type") == "subagent":
            count_inside = int(_number(entry, "requests", where))
            entry["requests"] = _delta_entries(lines, count_inside, where)
        else:
            before = entry["hash_ids"] = _delta_ids(entry, before, where)
        entries.append(entry)
    return entries


def _delta_ids(entry: dict[str, Any], before: list[int], where: dict[str, Any]) -> list[int]:
    try:
        shared, runs = entry["hash_ids"]
        ids = before[:shared]
        for start, length in runs:
            ids.extend(range(start, start + length))
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError("hash_ids is [shared, [[start, count], ...]]", **where) from error
    return ids


def _json_lines(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(path and line number, object) of each line that is not empty."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = {"path": str(path), "line": number}
                yield where, _json_object(line, where)


def _json_object(text: str, where: dict[str, Any]) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TraceError(f"a line of a trace is JSON: {error}", **where) from error
    if not isinstance(value, dict):
        raise TraceError("a line of a trace is a JSON object", **where)
    return cast(dict[str, Any], value)


def _list(entry: dict[str, Any], key: str, where: dict[str, Any]) -> list[Any]:
    value = entry.get(key)
    if not isinstance(value, list):
        raise TraceError(f"{key} is a list", **where, **{key: value})
    return cast(list[Any], value)


def _entries(entry: dict[str, Any], where: dict[str, Any]) -> list[dict[str, Any]]:
    requests = _list(entry, "requests", where)
    if not all(isinstance(request, dict) for request in requests):
        raise TraceError("requests is a list of JSON objects", **where)
    return requests


def _ids(entry: dict[str, Any], where: dict[str, Any]) -> list[int]:
    ids = _list(entry, "hash_ids", where)
    wrong = [one for one in ids if isinstance(one, bool) or not isinstance(one, int)]
    if wrong:
        raise TraceError("hash_ids is a list of whole numbers", **where, found=wrong[0])
    return ids


def _number(entry: dict[str, Any], key: str, where: dict[str, Any], least: float = 0) -> float:
    """A field that is a number, or the text of one."""
    value = entry.get(key)
    try:
        number = float(cast(Any, value)) if not isinstance(value, bool) else None
    except (TypeError, ValueError):
        number = None
    if number is None or not least <= number < float("inf"):
        raise TraceError(f"{key} is a number of at least {least}", **where, **{key: value})
    return number
