"""The demo against a stand-in server: the demo's own part, in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAND_IN = ROOT / "tests" / "assets" / "stand_in_server.py"
LAUNCHER = """
import signal, sys
import demo
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
stand_in, pid_file, behaviour = sys.argv[1:4]
server = [sys.executable, stand_in, pid_file, behaviour]
demo.commands = lambda options, ports: {
    "decode": [*server, str(ports["decode"])],
    "router": [sys.executable, stand_in, pid_file + ".router", behaviour, str(ports["router"])],
}
demo.NAMES = ("decode", "router")
del sys.argv[1:]
sys.exit(demo.main())
"""


def start_demo(pid_file: Path, behaviour: str) -> "subprocess.Popen[str]":
    path = os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(STAND_IN), str(pid_file), behaviour],
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_server(pid_file: Path) -> int:
    """The server's process id, once it has written it."""
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline, "the demo started no server"
        time.sleep(0.05)
    return int(pid_file.read_text())


def assert_ended(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_shows_the_server_s_progress_the_answer_and_what_each_rank_holds(tmp_path: Path):
    demo = start_demo(tmp_path / "pid", "answer")
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 0, output
    assert "loading the weights" in output
    assert "It is here." in output
    assert "reshard: 6.0 MiB over nixl in 12 ms" in output
    assert "1.0 MiB in 4" in output and "3.0 MiB in 6" in output
    assert "latent 5.0 MiB, indexer 1.0 MiB" in output
    assert "KV cache of 103 tokens over 3 decode ranks" in output  # 100 + 4, less the last one
    rows = [line.replace("│", " ").split() for line in output.splitlines() if "│" in line]
    held = {row[0]: (row[1], row[2]) for row in rows if row[0].isdigit()}
    # 103 tokens in runs of 16: two rounds of 48, and 7 more for rank 0. A token takes 1 MiB.
    assert held == {"0": ("39", "39.0"), "1": ("32", "32.0"), "2": ("32", "32.0")}
    assert "tokens/s" in output
    assert_ended(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("die", "error: no such model (model='nowhere')"),
        ("refuse", "the prompt is too long"),
        ("fail", "the engine stopped"),
        ("break", "the stream ended without an answer"),
    ],
)
def test_a_failure_is_shown_without_a_traceback(tmp_path: Path, behaviour: str, message: str):
    demo = start_demo(tmp_path / "pid", behaviour)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1, output
    assert message in output
    assert "Traceback" not in output
    assert_ended(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_server_too(tmp_path: Path, number: signal.Signals, code: int):
    demo = start_demo(tmp_path / "pid", "load")
    server = wait_for_server(tmp_path / "pid")
    demo.send_signal(number)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == code, output
    assert "Traceback" not in output
    assert_ended(server)
