"""``dcpjax router`` as a command."""

import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from click.testing import CliRunner, Result

from dcpjax.cli import main
from tests.server.stand_in_engine import TOKENS, stand_in

ENGINES = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")


def route(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["router", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "at least one prefill engine"),
        (ENGINES[:2], "at least one decode engine"),
        (ENGINES[2:], "at least one prefill engine"),
        ((*ENGINES, "--decode", "127.0.0.1:3"), "http://host:port"),
        ((*ENGINES, "--decode", "localhost:3"), "http://host:port"),
        ((*ENGINES, "--prefill", "http://127.0.0.1:1/"), "named once"),
        ((*ENGINES, "--prefill", "http://127.0.0.1:2"), "named once"),
        ((*ENGINES, "--port", "70000"), "port is in"),
        ((*ENGINES, "--host", "host.invalid"), "address to listen on"),
        ((*ENGINES, "--api-key", ""), "API key"),
        ((*ENGINES, "--health-interval", "0"), "more than 0"),
        ((*ENGINES, "--prefill-fallback", "wait"), "Invalid value"),
        ((*ENGINES, "--prefil", "x"), "No such option"),
    ],
)
def test_what_is_wrong_is_one_message_and_exit_code_2(
    arguments: tuple[str, ...], words: str
) -> None:
    result = route(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = route(*ENGINES, "--port", str(port))
    assert result.exit_code == 2
    assert f"port={port}" in result.stderr


def test_help_says_how_engines_are_named() -> None:
    output = route("--help").output
    for word in ("Engines:", "--prefill URL", "--decode URL", "kv_producer", "Server:"):
        assert word in output


def test_route_until_a_signal() -> None:
    with stand_in("p") as prefill, stand_in("d") as decode:
        command = ["router", "--prefill", prefill.url, "--decode", decode.url, "--port", "0"]
        process = subprocess.Popen(
            [sys.executable, "-c", "from dcpjax.cli import main; main()", *command],
            env=os.environ | {"PYTHONUNBUFFERED": "1", "http_proxy": "http://127.0.0.1:1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            expected = "ready: 1 of 1 prefill engines, 1 of 1 decode engines at http://127.0.0.1:"
            assert ready.startswith(expected)
            url = ready.split(" at ")[1].split()[0]
            answer = httpx.post(f"{url}/completions", json={"prompt": "a"})
            assert answer.json()["choices"][0]["text"] == "".join(TOKENS)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
            process.communicate()
    assert (process.returncode, errors) == (0, "")
