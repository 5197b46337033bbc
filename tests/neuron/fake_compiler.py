"""A fake neuronx-cc. It compiles nothing.

It is there for what the driver does around a compiler: command line, environment, caching and
error handling. What it does stands in the program's bytes, after "order=", so one run of the driver
can meet a compiler that passes, fails, hangs and dies.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from neuron.cache import NeffCache
from neuron.compiler import CompilerFlags, find_compiler
from neuron.jobs import Compiled, Driver, Failed, Job

_SOURCE = """#!{python} -IS
import gzip, io, json, os, re, signal, sys, tarfile, time
home = {home!r}
if sys.argv[1:] == ["--version"]:
    print({version!r})
    sys.exit({version_exit})
program = open(sys.argv[2], "rb").read()
with open(os.path.join(home, "calls.jsonl"), "a") as calls:
    call = dict(argv=sys.argv[1:], cwd=os.getcwd(), env=dict(os.environ), size=len(program))
    calls.write(json.dumps(call) + "\\n")
order = re.search(rb"order=([a-z_]+)", program)
order = order[1].decode() if order else "pass"

def first_time():
    try:
        os.close(os.open(os.path.join(home, "was_" + order), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def neff():
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        item = tarfile.TarInfo("sg00/program")
        item.size = 4096
        archive.addfile(item, io.BytesIO(os.urandom(4096)))
    return b"\\x01" * 1024 + content.getvalue()

def hang():
    if os.fork() == 0:  # the compiler has children of its own
        with open(os.path.join(home, "pid.part"), "w") as file:
            file.write(str(os.getpid()))
        os.rename(os.path.join(home, "pid.part"), os.path.join(home, "pid"))
    time.sleep(600)

target = sys.argv[sys.argv.index("--output") + 1]
log = sys.argv[sys.argv.index("--logfile") + 1]
os.makedirs("sg00/deep")
open("sg00/deep/litter.bin", "wb").write(b"x" * 100)
open("litter.txt", "w").write("x")
if order == "fail" or (order == "fail_once" and first_time()):
    open(log, "w").write("".join(f"log line {{n}}\\n" for n in range(100)))
    print("ERROR: internal error NCC_FAKE001")
    sys.exit(70)
if order == "hang" or (order == "hang_once" and first_time()):
    hang()
if order == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if order == "torn":
    open(target, "wb").write(neff()[:-2000])
elif order == "short":
    open(target, "wb").write(b"x" * 1024)
elif order == "other_container":
    open(target, "wb").write(b"x" * 5000)
elif order != "nothing":
    open(target, "wb").write(neff())
open(log, "w").write("all went well\\n")
print("Compiler status PASS")
"""


class FakeCompiler:
    """A file that can be run as neuronx-cc, and what it was asked."""

    def __init__(
        self,
        home: Path,
        version: str = "NeuronX Compiler version 2.27.5334.0+abc123\n\nPython version 3.11.2",
        version_exit: int = 0,
    ) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.path = home / "neuronx-cc"
        source = _SOURCE.format(
            python=sys.executable, home=str(home), version=version, version_exit=version_exit
        )
        self.path.write_text(source)
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The compilations so far: argv, cwd, env, size of the program."""
        path = self.home / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


FLAGS = CompilerFlags("trn2", 2, 2)


def job(order: str, flags: CompilerFlags = FLAGS) -> Job:
    return Job(order, f"order={order};".encode(), flags)


def compile_one(
    fake: FakeCompiler,
    cache: NeffCache,
    order: str,
    said: list[str] | None = None,
    *,
    attempts: int = 1,
    flags: CompilerFlags = FLAGS,
) -> Compiled | Failed:
    driver = Driver(find_compiler(str(fake.path)), cache, attempts, 60.0, {})
    said = [] if said is None else said
    return driver.compile(job(order, flags), threading.Event(), said.append)


def ends(pid: int) -> bool:
    """Whether a process ends soon, or is a zombie that its parent has not asked about."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
