"""One run of a (fake) compiler: however it ends, the driver says how, and nothing goes on."""

import io
import tarfile
import threading
from pathlib import Path

import pytest

from neuron.attempt import Attempt, Call, find_damage, log_tail, run_attempt
from neuron.compiler import CompilerFlags, find_compiler
from tests.neuron.fake_compiler import FakeCompiler, ends, wait_for

LONG = 300.0


@pytest.fixture
def fake(tmp_path: Path) -> FakeCompiler:
    return FakeCompiler(tmp_path / "fake")


def run(
    fake: FakeCompiler,
    order: str,
    *,
    timeout: float = LONG,
    stop: threading.Event | None = None,
    environ: dict[str, str] | None = None,
) -> tuple[Attempt, Path]:
    compiler = find_compiler(str(fake.path))
    flags = CompilerFlags("trn2", 2, 1)
    call = Call(compiler, flags.arguments(compiler.version), "trn2", timeout, environ or {})
    folder = fake.home / "work" / "attempt-1"
    program = f"order={order};".encode()
    return run_attempt(call, program, folder, stop or threading.Event()), folder


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_good_run_leaves_a_neff_and_its_logs(fake: FakeCompiler) -> None:
    attempt, folder = run(fake, "pass", environ={"LD_PRELOAD": "", "HOME": "/somewhere"})
    assert (attempt.failure, attempt.exit_code) == (None, 0)
    assert files(folder) == {"model.neff", "log-neuron-cc.txt", "output.txt"}
    assert "Compiler status PASS" in log_tail(folder) and "all went well" in log_tail(folder)
    (call,) = fake.calls
    assert call["cwd"] == str(folder)
    assert call["argv"][:2] == ["compile", "model.hlo_module.pb"]
    assert call["env"]["NEURON_PLATFORM_TARGET_OVERRIDE"] == "trn2"
    assert call["env"]["HOME"] == "/somewhere"
    assert "LD_PRELOAD" not in call["env"] and "PATH" not in call["env"]
    assert call["size"] == len(b"order=pass;")


def test_a_failure_keeps_the_end_of_both_logs(fake: FakeCompiler) -> None:
    attempt, folder = run(fake, "fail")
    assert attempt.failure == "ended with exit code 70" and attempt.exit_code == 70
    tail = log_tail(folder)
    assert "NCC_FAKE001" in tail and "log line 99" in tail and "log line 75" in tail
    assert "log line 74" not in tail
    assert files(folder) == {"log-neuron-cc.txt", "output.txt"}


def test_death_by_a_signal_is_named(fake: FakeCompiler) -> None:
    attempt, folder = run(fake, "die")
    assert attempt.failure == "was ended by signal 9 (SIGKILL)" and attempt.exit_code == -9
    assert log_tail(folder) == "it wrote nothing"


def test_one_that_hangs_is_ended_with_its_children(fake: FakeCompiler) -> None:
    attempt, _ = run(fake, "hang", timeout=1.0)
    assert attempt.failure == "took longer than 1 s"
    wait_for(fake.home / "pid")
    assert ends(int((fake.home / "pid").read_text()))


def test_one_that_is_stopped_is_ended_with_its_children(fake: FakeCompiler) -> None:
    stop = threading.Event()

    def interrupt() -> None:
        wait_for(fake.home / "pid")
        stop.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    attempt, _ = run(fake, "hang", stop=stop)
    thread.join()
    assert attempt.failure == "was stopped"
    assert ends(int((fake.home / "pid").read_text()))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("nothing", "said that it passed and wrote no NEFF"),
        ("short", "1024 bytes, which is not longer than its header"),
        ("torn", "wrote a torn NEFF"),
    ],
)
def test_passing_is_not_believed_without_a_whole_file(
    fake: FakeCompiler, order: str, words: str
) -> None:
    attempt, _ = run(fake, order)
    assert attempt.exit_code == 0
    assert attempt.failure is not None and words in attempt.failure


def test_a_container_that_is_not_understood_passes(fake: FakeCompiler) -> None:
    """The form of a NEFF is known from documents alone, so it is no reason to refuse one."""
    attempt, _ = run(fake, "other_container")
    assert attempt.failure is None


def test_every_cut_of_a_neff_is_found(fake: FakeCompiler, tmp_path: Path) -> None:
    _, folder = run(fake, "pass")
    whole = (folder / "model.neff").read_bytes()
    cut = tmp_path / "cut.neff"
    for length in (0, 1, 1024, 1026, 1100, len(whole) // 2, len(whole) - 9):
        cut.write_bytes(whole[:length])
        assert find_damage(cut) is not None, length
    cut.write_bytes(whole)
    assert find_damage(cut) is None


def test_an_archive_that_is_not_compressed_is_read_to_its_end(tmp_path: Path) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        item = tarfile.TarInfo("program")
        item.size = 10_000
        archive.addfile(item, io.BytesIO(b"x" * item.size))
    neff = tmp_path / "plain.neff"
    neff.write_bytes(bytes(1024) + content.getvalue())
    assert find_damage(neff) is None
    neff.write_bytes(bytes(1024) + content.getvalue()[:9000])
    assert find_damage(neff) is not None


def test_one_that_cannot_start(fake: FakeCompiler) -> None:
    compiler = find_compiler(str(fake.path))
    fake.path.chmod(0o644)
    call = Call(compiler, (), "trn2", LONG, {})
    attempt = run_attempt(call, b"", fake.home / "work", threading.Event())
    assert attempt.exit_code is None
    assert attempt.failure is not None and "could not be started" in attempt.failure
