"""A cached NEFF is whole or not there, for every process that looks, whatever happened before."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from neuron.attempt import Attempt
from neuron.cache import Entry, NeffCache, entry_key, file_sha256
from neuron.compiler import Compiler, find_compiler
from neuron.errors import CompilerError, ManifestError
from neuron.files import sha256
from neuron.jobs import Compiled, Driver, Failed, Job
from tests.neuron.fake_compiler import FLAGS, FakeCompiler, compile_one, ends, wait_for

COMPILER = Compiler("/opt/neuronx-cc", (2, 27, 5334, 0), "+abc")
NEVER = threading.Event()


def unexpected() -> None:
    pytest.fail("another one has the lock")


def stored(cache: NeffCache, key: str = "ab" * 32, data: bytes = b"neff" * 1000) -> Entry:
    entry = Entry(
        key=key,
        program_sha256=sha256(b"program"),
        arguments=("--target", "trn2"),
        compiler=str(COMPILER),
        neff_bytes=len(data),
        neff_sha256=sha256(data),
        attempts=(Attempt(None, 0, 1.5),),
    )
    with cache.lock(key, NEVER, unexpected), cache.work_folder(key) as work:
        (work / "model.neff").write_bytes(data)
        (work / "attempt-1").mkdir()
        cache.store(work, entry)
    return entry


def test_what_was_stored_is_read(tmp_path: Path) -> None:
    cache = NeffCache(tmp_path)
    assert cache.read("ab" * 32) is None
    entry = stored(cache)
    assert NeffCache(tmp_path).read(entry.key) == entry
    assert file_sha256(cache.neff_path(entry.key)) == entry.neff_sha256
    assert list((tmp_path / "work").iterdir()) == []


def test_the_key_says_everything_that_decides() -> None:
    key = entry_key(b"program", ("-O1",), COMPILER)
    others = [
        entry_key(b"program!", ("-O1",), COMPILER),
        entry_key(b"program", ("-O2",), COMPILER),
        entry_key(b"program", ("-O1", "--x"), COMPILER),
        entry_key(b"program", ("-O1",), Compiler("/opt/neuronx-cc", (2, 27, 5335), "+abc")),
        entry_key(b"program", ("-O1",), Compiler("/opt/neuronx-cc", (2, 27, 5334, 0), "+abd")),
    ]
    assert len({key, *others}) == 6
    assert entry_key(b"program", ("-O1",), Compiler("/usr/bin/cc", COMPILER.version, "+abc")) == key


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize("file", ["model.neff", "entry.json"])
def test_damage_is_found_and_compiled_again(tmp_path: Path, damage: object, file: str) -> None:
    fake = FakeCompiler(tmp_path / "fake")
    cache = NeffCache(tmp_path / "cache")
    first = compile_one(fake, cache, "pass")
    assert isinstance(first, Compiled)
    damage(first.neff.parent / file)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ManifestError):
        cache.read(first.entry.key)
    said: list[str] = []
    again = compile_one(fake, cache, "pass", said)
    assert isinstance(again, Compiled) and not again.is_cached
    assert len(said) == 1 and "compiled again, the cache is damaged" in said[0]
    assert cache.read(again.entry.key) == again.entry
    assert len(fake.calls) == 2


def test_an_entry_under_another_key_is_damage(tmp_path: Path) -> None:
    cache = NeffCache(tmp_path)
    entry = stored(cache)
    other = "ab" + "cd" * 31
    cache.neff_path(entry.key).parent.rename(cache.neff_path(other).parent)
    with pytest.raises(ManifestError, match="described by its own entry"):
        cache.read(other)


def test_both_values_of_a_damage_are_named(tmp_path: Path) -> None:
    cache = NeffCache(tmp_path)
    entry = stored(cache)
    cut(cache.neff_path(entry.key))
    with pytest.raises(ManifestError, match="written=4000, found=3999"):
        cache.read(entry.key)


def test_a_lock_keeps_others_waiting_until_they_are_stopped(tmp_path: Path) -> None:
    cache, other = NeffCache(tmp_path), NeffCache(tmp_path)
    stop = threading.Event()
    stop.set()
    waited: list[str] = []

    def note() -> None:
        waited.append("once")

    with cache.lock("key", NEVER, unexpected):
        with pytest.raises(CompilerError, match="another process"):
            with other.lock("key", stop, note):
                pytest.fail("two have the lock")
        assert waited == ["once"]
        with other.lock("another key", stop, unexpected):
            pass
    with other.lock("key", stop, unexpected):
        pass


_KILLED_DRIVER = """
import sys, threading
from pathlib import Path
from neuron.cache import NeffCache
from neuron.compiler import CompilerFlags, find_compiler
from neuron.jobs import Driver, Job, compile_all
driver = Driver(find_compiler(sys.argv[1]), NeffCache(Path(sys.argv[2])))
flags = CompilerFlags("trn2", 2, 2)
jobs = [Job(order, f"order={order};".encode(), flags) for order in ("pass", "hang_once")]
compile_all(driver, jobs, workers=1, report=sys.stderr.write, on_result=lambda result: None)
"""


def test_a_driver_that_is_killed_leaves_a_cache_that_can_be_used(tmp_path: Path) -> None:
    """``kill -9`` in the middle: what was ready is there, the rest is compiled by the next one,
    which also ends the compiler that was left alone."""
    fake = FakeCompiler(tmp_path / "fake")
    folder = tmp_path / "cache"
    root = Path(__file__).parents[2]
    killed = subprocess.Popen(
        [sys.executable, "-c", _KILLED_DRIVER, str(fake.path), str(folder)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    wait_for(fake.home / "pid")
    orphan = int((fake.home / "pid").read_text())
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not _is_gone(orphan)

    cache = NeffCache(folder)
    ready = compile_one(fake, cache, "pass")
    assert isinstance(ready, Compiled) and ready.is_cached
    assert len(list((folder / "work").iterdir())) == 1
    rest = compile_one(fake, cache, "hang_once")
    assert isinstance(rest, Compiled) and not rest.is_cached
    assert ends(orphan)
    assert list((folder / "work").iterdir()) == []
    assert len(fake.calls) == 3


def _is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_several_processes_compile_a_program_once(tmp_path: Path) -> None:
    fake = FakeCompiler(tmp_path / "fake")
    script = _KILLED_DRIVER.replace('("pass", "hang_once")', '("pass",) * 2')
    root = Path(__file__).parents[2]
    drivers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(fake.path), str(tmp_path / "cache")],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        for _ in range(3)
    ]
    assert [driver.wait() for driver in drivers] == [0, 0, 0]
    assert len(fake.calls) == 1


def test_logs_of_a_failure_are_kept_and_replaced(tmp_path: Path) -> None:
    fake = FakeCompiler(tmp_path / "fake")
    cache = NeffCache(tmp_path / "cache")
    for _ in range(2):
        failed = compile_one(fake, cache, "fail")
        assert isinstance(failed, Failed)
        assert "NCC_FAKE001" in (failed.logs / "attempt-1" / "output.txt").read_text()
    driver = Driver(find_compiler(str(fake.path)), cache, environ={})
    assert driver.compile(Job("p", b"order=pass;", FLAGS), NEVER, print)
    assert len(list((tmp_path / "cache" / "failed").iterdir())) == 1
