"""With which exit code a process leaves whose devices, or whose JAX, would wait for others."""

import subprocess
import sys

import pytest

LEAVE = """
import threading
from dcpjax.engine.device_thread import DeviceThread
thread = DeviceThread()
{what}
raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("thread.submit(int).result()", 3),
        ("thread.submit(threading.Event().wait)", 1),
        ("thread.abandon(2)", 2),
        ("thread.submit(threading.Event().wait); thread.abandon(2)", 2),
    ],
)
def test_the_exit_code(what: str, code: int):
    done = subprocess.run(
        [sys.executable, "-c", LEAVE.format(what=what)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, "still wait" in done.stderr) == (code, code == 1)
