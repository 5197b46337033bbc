"""The command line: its options, its exit codes, and a server that is started and stopped by it."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from click.testing import CliRunner, Result

import dcpjax
from dcpjax import llm
from dcpjax.cli import main
from dcpjax.cli import progress as progress_module
from dcpjax.cli.progress import LoadingProgress
from dcpjax.config import EngineConfig
from dcpjax.errors import AuditError, CheckpointError
from dcpjax.llm import offline
from dcpjax.server.run import EXIT_FORCED
from tests.fakes import CountUpEngine, byte_tokenizer

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = """
import sys
from dcpjax import llm
from tests.fakes import CountUpEngine, byte_tokenizer
def load_engine(config, progress):
    progress("loading the weights", 1, 2)
    return CountUpEngine(), byte_tokenizer()
llm.load_engine = load_engine
from dcpjax.cli import main
main(sys.argv[1:])
"""


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The settings of the engines that commands asked for; they get a fake one."""
    configs: list[EngineConfig] = []

    def load_engine(config: EngineConfig, progress: Any) -> Any:
        configs.append(config)
        progress("loading", 1, 1)
        return CountUpEngine(), byte_tokenizer()

    monkeypatch.setattr(llm, "load_engine", load_engine)
    monkeypatch.setattr(offline, "load_engine", load_engine)
    return configs


def test_the_version() -> None:
    assert dcpjax.__version__ in run("--version").output


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_every_setting_is_an_option_with_help(command: str) -> None:
    parameters = {parameter.name: parameter for parameter in main.commands[command].params}
    for item in dataclasses.fields(EngineConfig):
        parameter = parameters[item.name]
        if isinstance(parameter, click.Option):
            assert "--" + item.name.replace("_", "-") in parameter.opts
            assert set(item.metadata["flags"]) <= set(parameter.opts)
            assert parameter.help == item.metadata["help"]
            assert parameter.default == item.default


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_help_groups_the_options(command: str) -> None:
    output = run(command, "--help").output
    for heading in ("Parallelism:", "KV cache and batching:", "Model:"):
        assert heading in output
    assert "-dcp, --decode-context-parallel-size" in output


def test_help_does_not_import_jax() -> None:
    """Nor does anything else that takes long; in a process that has not imported it."""
    code = (
        "import sys; from dcpjax.cli import main\n"
        "main(['serve', '--help'], standalone_mode=False)\n"
        "sys.exit(bool({'jax', 'starlette', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_options_reach_the_engine(loaded: list[EngineConfig]) -> None:
    result = run(
        *("generate", "fake", "a", "-tp", "4", "-dcp", "2", "--block-size", "8"),
        *("--no-enable-prefix-caching", "--max-model-len", "64", "--dcp-comm-backend", "a2a"),
    )
    assert result.exit_code == 0, result.output
    assert loaded == [
        EngineConfig(
            "fake",
            tensor_parallel_size=4,
            decode_context_parallel_size=2,
            block_size=8,
            enable_prefix_caching=False,
            max_model_len=64,
            dcp_comm_backend="a2a",
        )
    ]


def test_generate_prints_the_text(loaded: list[EngineConfig]) -> None:
    assert run("generate", "fake", "a", "--max-tokens", "4").stdout == "bcde\n"
    assert run("generate", "fake", "-", "--max-tokens", "2", stdin="k").stdout == "lm\n"
    assert run("generate", "fake", "hi", "--chat", "--max-tokens", "1").stdout == ";\n"
    assert run("generate", "fake", "a", "--stop", "e").stdout == "bcd\n"


@pytest.mark.parametrize(("prompt", "stdin"), [("", ""), ("-", "")])
def test_generate_refuses_an_empty_prompt_before_it_loads(prompt, stdin, loaded) -> None:
    result = run("generate", "fake", prompt, stdin=stdin)
    assert result.exit_code == 2 and "at least one token" in result.output
    assert loaded == []


def test_generate_prints_json(loaded: list[EngineConfig]) -> None:
    result = json.loads(run("generate", "fake", "a", "--max-tokens", "2", "--json").stdout)
    timings = result.pop("timings")
    assert result == {
        "prompt": "a",
        "prompt_token_ids": [97],
        "text": "bc",
        "token_ids": [98, 99],
        "finish_reason": "length",
        "stop_reason": None,
        "num_cached_tokens": 0,
    }
    assert 0 <= timings["first_token_seconds"] <= timings["total_seconds"]
    assert timings["load_seconds"] >= 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "m", "-tp", "3", "-dcp", "2"), "is a multiple of"),
        (("serve", "m", "--block-size", "0"), "at least 1"),
        (("serve", "m", "--block-size", "x"), "not a valid integer"),
        (("serve", "m", "--dcp-comm-backend", "a2a"), "needs decode_context_parallel_size > 1"),
        (("serve", "m", "--device", "tpu"), "Invalid value"),
        (("serve", "m", "--blok-size", "8"), "No such option"),
        (("serve", "m", "--port", "70000"), "port is in"),
        (("serve", "m", "--max-queued-requests", "-1"), "at least 0"),
        (("serve",), "Missing argument"),
        (("generate", "m", "a", "-tp", "3", "-dcp", "2"), "is a multiple of"),
        (("generate", "m", "a", "--temperature", "-1"), "temperature is"),
        (("generate", "m", "a" * 600), "maximum context length"),
        (("generate", "m", ""), "at least one token"),
        (("serve", "m", "--seed", "-1", "--load-format", "dummy"), "seed is in"),
        (("serve", ""), "model is not empty"),
        (("serve", "m", "--host", "a" * 70), "address to listen on"),
        (("serve", "m", "-pcp", "2", "--prefill-kv", "sharded"), "spreads tokens over DCP ranks"),
        (
            ("serve", "m", "-tp", "4", "-dcp", "4", "--max-num-batched-tokens", "3"),
            "max_num_batched_tokens is at least",
        ),
        (("generate", "m", "a", "--sampling-seed", str(2**63)), "seed is an int64"),
        (("generate", "m", "a", "--top-k", str(2**31)), "top_k is an int32"),
    ],
)
def test_what_is_wrong_is_one_message_and_exit_code_2(
    loaded: list[EngineConfig], arguments: tuple[str, ...], words: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_a_broken_checkpoint_is_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_engine(config: EngineConfig, progress: Any) -> Any:
        raise CheckpointError("the file is whole", path="x.gguf", missing_bytes=3)

    monkeypatch.setattr(llm, "load_engine", load_engine)
    result = run("serve", "x.gguf", "--port", "0")
    assert result.exit_code == 2
    assert "Error: the file is whole (path='x.gguf', missing_bytes=3)" in result.stderr


@pytest.mark.parametrize("command", [("serve", "m", "--port", "0"), ("generate", "m", "a")])
def test_any_error_of_ours_at_the_start_is_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    def load_engine(config: EngineConfig, progress: Any) -> Any:
        raise AuditError("the step makes copies of the KV pool", step="4x1")

    monkeypatch.setattr(llm, "load_engine", load_engine)
    monkeypatch.setattr(offline, "load_engine", load_engine)
    result = run(*command)
    assert result.exit_code == 2
    assert "Error: the step makes copies of the KV pool (step='4x1')" in result.stderr


def test_standard_input_that_is_no_text_is_exit_code_2(loaded: list[EngineConfig]) -> None:
    result = CliRunner().invoke(main, ["generate", "fake", "-"], input=b"a\xff")
    assert result.exit_code == 2
    assert "standard input is UTF-8 text" in result.stderr
    assert loaded == []


def test_a_port_in_use_is_found_before_anything_is_loaded(loaded: list[EngineConfig]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "fake", "--port", str(port))
    assert result.exit_code == 2
    assert f"port={port}" in result.stderr
    assert loaded == []


@contextlib.contextmanager
def started_server(launcher: str = LAUNCHER) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server of the fake engine that is ready, and the URL of its API."""
    server = subprocess.Popen(
        [sys.executable, "-c", launcher, "serve", "fake", "--port", "0", "--api-key", "k"],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        ready = server.stdout.readline()
        assert ready.startswith("ready: fake at http://127.0.0.1:")
        yield server, ready.split()[3]
    finally:
        server.kill()
        server.communicate()


def complete(url: str) -> httpx.Response:
    headers = {"Authorization": "Bearer k"}
    return httpx.post(f"{url}/completions", json={"prompt": "a", "max_tokens": 2}, headers=headers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_until_a_signal(number: signal.Signals) -> None:
    with started_server() as (server, url):
        assert complete(url).json()["choices"][0]["text"] == "bc"
        server.send_signal(number)
        _, errors = server.communicate(timeout=30)
    assert server.returncode == 0
    assert "loading the weights (1/2)" in errors
    assert "Traceback" not in errors


def test_a_dead_engine_is_exit_code_1() -> None:
    launcher = LAUNCHER.replace("CountUpEngine()", "CountUpEngine(fail_at_step=1)")
    with started_server(launcher) as (server, url):
        assert complete(url).status_code == 503
        _, errors = server.communicate(timeout=30)
    assert server.returncode == 1
    assert "the device is lost" in errors  # the log says why
    assert errors.splitlines()[-1].startswith("Error: the engine stopped")


def test_the_third_signal_leaves_in_the_middle_of_a_step() -> None:
    """The engine's step never ends."""
    launcher = LAUNCHER.replace(
        "CountUpEngine()", "CountUpEngine(gate=lambda: (print('in a step'), time.sleep(600)))"
    ).replace("import sys", "import sys, time")
    with started_server(launcher) as (server, url):
        with ThreadPoolExecutor() as pool:
            pool.submit(complete, url)
            assert server.stdout is not None
            assert server.stdout.readline() == "in a step\n"
            while server.poll() is None:  # signals that come at once may be merged to one
                server.send_signal(signal.SIGINT)
                time.sleep(0.01)  # some come while it leaves
    assert server.returncode == EXIT_FORCED


class TestProgress:
    def test_elsewhere_than_on_a_terminal_each_thing_has_one_line(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with LoadingProgress() as progress:
            for done in (1, 2, 3):
                progress("weights", done, 3)
            progress("compiling decode 8", 1, 2)
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition("] ")[2] for line in lines] == [
            "weights (1/3)",
            "compiling decode 8 (1/2)",
        ]

    def test_a_silence_is_broken_by_what_was_reached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        silence = "still at weights (2/3)"
        lines: list[str] = []
        has_silence = threading.Event()

        def echo(text: str, *, err: bool) -> None:
            assert err
            lines.append(text.partition("] ")[2])
            if lines[-1] == silence:
                has_silence.set()

        monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.001)
        monkeypatch.setattr(progress_module.click, "echo", echo)
        with LoadingProgress() as progress:
            progress("weights", 1, 3)
            progress("weights", 2, 3)
            assert has_silence.wait(60)
        assert "weights (1/3)" in lines
        assert lines[lines.index(silence) - 1] == "weights (2/3)"

    def test_on_a_terminal_there_is_a_bar(self, monkeypatch: pytest.MonkeyPatch) -> None:
        screen = io.StringIO()
        console = progress_module.Console(file=screen, force_terminal=True, width=100)
        monkeypatch.setattr(progress_module, "Console", lambda stderr: console)
        with LoadingProgress() as progress:
            progress("compiling decode 8", 1, 2)
        assert "compiling decode 8" in screen.getvalue()
        assert "1/2" in screen.getvalue()
