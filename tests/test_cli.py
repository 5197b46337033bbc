"""The command line: its options, its exit codes, and a server that is started and stopped by it."""

import dataclasses
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
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
from dcpjax.errors import CheckpointError
from dcpjax.llm import offline
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


def test_a_port_in_use_is_found_before_anything_is_loaded(loaded: list[EngineConfig]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "fake", "--port", str(port))
    assert result.exit_code == 2
    assert f"port={port}" in result.stderr
    assert loaded == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_until_a_signal(number: signal.Signals) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "serve", "fake", "--port", "0", "--api-key", "k"],
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
        url = ready.split()[3]
        headers = {"Authorization": "Bearer k"}
        body = {"prompt": "a", "max_tokens": 2}
        answer = httpx.post(f"{url}/completions", json=body, headers=headers).json()
        assert answer["choices"][0]["text"] == "bc"
        server.send_signal(number)
        _, errors = server.communicate(timeout=30)
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 0
    assert "loading the weights (1/2)" in errors
    assert "Traceback" not in errors


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
        silence = "still working after weights (2/3)"
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
