"""Traces: what the files say, their statistics, and errors that name the line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import ConfigError
from dcpjax.planner.generate import Workload, generate_trace
from dcpjax.planner.trace_files import LONGEST_PAUSE, TraceError
from dcpjax.planner.traces import hit_tokens, load_trace

TRACES = Path(__file__).resolve().parents[1] / "assets" / "traces"


def test_mooncake_rows():
    trace = load_trace(TRACES / "mooncake_conversation.jsonl")
    assert (len(trace.sessions), trace.num_requests, trace.block_size) == (200, 200, 512)
    first = trace.sessions[0].turns[0]
    assert (first.num_input, first.num_output) == (6758, 500)
    assert len(first.blocks) == 6758 // 512 == 13  # of 14 ids, the last is of a partial block
    assert trace.span == pytest.approx(66.0, abs=10)


def test_agentic_conversations():
    """Counts and hits of the files' own statistics."""
    trace = load_trace(TRACES / "agentic" / "trace_0130.jsonl")
    assert trace.num_requests == 4 and trace.block_size == 64
    assert sum(turn.num_input for turn in trace.turns) == 275_213
    assert sum(turn.num_output for turn in trace.turns) == 2_301
    folder = load_trace(TRACES / "agentic")
    assert len(folder.sessions) == 4
    ids = [set(session.turns[-1].blocks) for session in folder.sessions]
    assert not set.intersection(*ids)  # local to a conversation
    assert all(turn.think <= LONGEST_PAUSE for turn in folder.turns)
    assert all(len(turn.blocks) == turn.num_input // 64 for turn in folder.turns)


def test_azure_rows():
    trace = load_trace(TRACES / "azure23_conv.csv")
    assert trace.num_requests == 100 and trace.block_size == 0
    assert trace.sessions[0].start == 0 and not trace.turns[0].blocks
    assert 0 < trace.span < 3600


def weka_file(folder: Path, requests: list) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"id": "x", "block_size": 64, "requests": requests}))
    return path


def turn(t: float, num_input: int, **more) -> dict:
    ids = list(range(num_input // 64))
    return {"t": t, "type": "n", "in": num_input, "out": 3, "hash_ids": ids, **more}


def test_sub_agents_are_sessions_of_their_own(tmp_path):
    """They start when they did, not when their result came."""
    agent = {"type": "subagent", "t": 30.0, "duration_ms": 12_000, "requests": [turn(0, 64)]}
    path = weka_file(tmp_path, [turn(0, 64), agent, turn(40, 128, think_time=9999, out=0)])
    main, sub = load_trace(path).sessions
    assert [len(main.turns), len(sub.turns), sub.start] == [2, 1, 18.0]
    assert main.turns[1].think == LONGEST_PAUSE and main.turns[1].num_output == 1
    assert sub.turns[0].blocks == main.turns[0].blocks


def test_delta_encoded_sub_agents_share_with_their_own_list(tmp_path):
    rows = [
        {"format": "weka-delta/1"},
        {"block_size": 64, "requests": 3},
        {**turn(0, 128), "hash_ids": [0, [[1, 2]]]},
        {"type": "subagent", "t": 5, "duration_ms": None, "requests": 1},
        {**turn(0, 64), "hash_ids": [0, [[9, 1]]]},
        {**turn(9, 192), "hash_ids": [2, [[7, 1]]]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    main, sub = load_trace(path).sessions
    assert [turn.blocks for turn in main.turns] == [(1, 2), (1, 2, 7)]
    assert sub.turns[0].blocks == (9,) and sub.start == 5


ROW = {"timestamp": 5, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    "row, match",
    [
        ("{", "is JSON"),
        ("[1]", "JSON object"),
        ({**ROW, "timestamp": 1}, "do not fall"),
        ({**ROW, "timestamp": None}, "timestamp is a number"),
        ({**ROW, "input_length": 0}, "input_length is a number of at least 1"),
        ({**ROW, "input_length": True}, "input_length"),
        ({**ROW, "output_length": -1}, "output_length"),
        ({**ROW, "output_length": "many"}, "output_length"),
        ({**ROW, "hash_ids": [1]}, "an id for each 512 tokens"),
        ({**ROW, "hash_ids": None}, "hash_ids is a list"),
        ({**ROW, "hash_ids": [1, [2]]}, "list of whole numbers"),
        ({**ROW, "hash_ids": [1, True]}, "list of whole numbers"),
        ({key: value for key, value in ROW.items() if key != "timestamp"}, "timestamp"),
    ],
)
def test_wrong_mooncake_lines_are_named(row, match, tmp_path):
    text = row if isinstance(row, str) else json.dumps(row)
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n\n{text}\n")
    with pytest.raises(TraceError, match=match) as error:
        load_trace(path)
    assert error.value.values["line"] == 3


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = "2023-11-16 18:15:46.6805900,10,5\n"


@pytest.mark.parametrize(
    "line, match",
    [
        ("yesterday,10,5\n", "date and time"),
        ("2023-11-16 18:15:45.0,10,5\n", "do not fall"),
        ("2023-11-16 18:15:47.0,ten,5\n", "ContextTokens"),
        ("2023-11-16 18:15:47.0,10\n", "GeneratedTokens"),
    ],
)
def test_wrong_azure_lines_are_named(line, match, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + GOOD + line)
    with pytest.raises(TraceError, match=match) as error:
        load_trace(path)
    assert error.value.values["line"] == 3


@pytest.mark.parametrize(
    "requests, match",
    [
        ([turn(5, 64), turn(4, 64)], "do not fall"),
        ([{"t": 0, "in": 64, "out": 1}], "hash_ids is a list"),
        ([turn(0, 64, out=None)], "out is a number"),
        (5, "requests is a list"),
        ([turn(5, 64), 5], "list of JSON objects"),
        ([{**turn(0, 64), "hash_ids": ["x"]}], "list of whole numbers"),
        ([{"type": "subagent", "t": 1, "duration_ms": "x", "requests": []}], "duration_ms"),
        ([{"type": "subagent", "t": 1, "requests": [None]}], "list of JSON objects"),
    ],
)
def test_wrong_conversations_are_named(requests, match, tmp_path):
    with pytest.raises(TraceError, match=match):
        load_trace(weka_file(tmp_path, requests))


@pytest.mark.parametrize(
    "rows, match",
    [
        ([], "requests is a number"),
        ([{"block_size": 64, "requests": 2}, turn(0, 64)], "hash_ids is"),
        ([{"block_size": 64, "requests": 1}], "hash_ids is"),
        ([{"requests": 0}], "block_size"),
    ],
)
def test_broken_delta_files_are_named(rows, match, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"format": "weka-delta/1"}, *rows])))
    with pytest.raises(TraceError, match=match):
        load_trace(path)


def test_missing_and_empty_traces_are_refused(tmp_path):
    with pytest.raises(TraceError, match="exists"):
        load_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(TraceError, match="at least one request"):
        load_trace(tmp_path / "empty.jsonl")
    with pytest.raises(TraceError, match="kind of trace"):
        load_trace(tmp_path / "empty.jsonl", kind="csv")


@pytest.mark.parametrize("kind", ["mooncake", "weka", "azure"])
def test_files_that_are_no_text_are_refused(kind, tmp_path):
    names = {"mooncake": "x.jsonl", "weka": "x.json", "azure": "x.csv"}
    path = tmp_path / names[kind]
    path.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(TraceError, match="file of text"):
        load_trace(path, kind)
    if kind != "weka":  # whose traces may be folders
        with pytest.raises(TraceError, match="file of text"):
            load_trace(tmp_path, kind)


# Made-up traces, and what is done with traces


@given(st.integers(1, 60), st.integers(1, 6), st.integers(0, 3))
def test_generated_sessions_grow_by_what_was_said(num_requests, num_turns, seed):
    workload = Workload(num_requests=num_requests, num_turns=num_turns, shared=128)
    trace = generate_trace(workload, seed)
    assert trace.num_requests == num_requests
    assert trace == generate_trace(workload, seed)
    for session in trace.sessions:
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            assert after.num_input > before.num_input + before.num_output
            assert after.blocks[: len(before.blocks)] == before.blocks
    assert all(len(turn.blocks) == turn.num_input // 64 for turn in trace.turns)
    assert all(turn.blocks[:2] == (0, 1) for turn in trace.turns)


def test_lengths_and_rates_have_the_means_that_were_asked_for():
    workload = Workload(num_requests=20_000, rate=5, num_input=1000, num_output=100)
    trace = generate_trace(workload)
    assert sum(turn.num_input for turn in trace.turns) / 20_000 == pytest.approx(1000, rel=0.02)
    assert sum(turn.num_output for turn in trace.turns) / 20_000 == pytest.approx(100, rel=0.02)
    assert 20_000 / trace.span == pytest.approx(5, rel=0.05)


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"num_requests": 0}, "num_requests"),
        ({"rate": 0}, "rate"),
        ({"think": -1}, "think"),
        ({"num_input": -5}, "num_input"),
        ({"num_input": 10, "shared": 11}, "part of the prompt"),
    ],
)
def test_workloads_that_make_no_sense(settings, match):
    with pytest.raises(ConfigError, match=match):
        Workload(**settings)


def test_a_trace_at_another_rate_and_shortened():
    trace = load_trace(TRACES / "mooncake_conversation.jsonl")
    faster = trace.at_rate(10)
    assert (len(trace.sessions) - 1) / faster.span == pytest.approx(10)
    assert faster.turns == trace.turns and trace.head(3).num_requests == 3
    short = trace.limited(4096)
    assert 0 < short.num_requests < 200
    assert all(turn.num_input + turn.num_output <= 4096 for turn in short.turns)
    with pytest.raises(ConfigError, match="rate above 0"):
        trace.at_rate(0)
    with pytest.raises(ConfigError, match="rate above 0"):
        trace.head(1).at_rate(1)


def test_coarser_grains_hit_less():
    trace = load_trace(TRACES / "agentic")
    hits = [hit_tokens(trace, grain) for grain in (64, 512, 2048)]
    assert hits[0] > hits[1] > hits[2] > 0
    assert all(hit % grain == 0 for hit, grain in zip(hits, (64, 512, 2048), strict=True))
