"""Prefill and decode as two engines that shard the KV cache each in its own way.

Starts ``dcpjax serve`` twice, a prefill engine and a decode engine of another shape, and ``dcpjax
router`` before them, as a user would. Sends one chat request about a long document through the
OpenAI API, prints the answer as it comes, and then what moved from which rank to which, and what
each rank holds. Ctrl-C ends everything.
"""

import argparse
import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from demo_client import Answer, DemoError, get_json, is_healthy, print_answer, stream_events
from demo_tables import rank_table, read_pool, reshard_table, summary
from rich.console import Console

HOST = "127.0.0.1"
POLL_SECONDS = 0.2
STOP_SECONDS = 20.0
INTERRUPTED = 128 + signal.SIGINT
SCRIPTS = Path(__file__).resolve().parent
DOCUMENT = SCRIPTS / "assets" / "harbour_log.txt"
QUESTION = "Who is the harbour master of Brannock Bay?"
NAMES = ("prefill", "decode", "router")
NIXL_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")

Ports = dict[str, int]
Process = subprocess.Popen[str]


def main() -> int:
    options = parse_options()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    console = Console()
    try:
        document = read_document(options.document)
        ports = {name: free_port() for name in NAMES}
        with running(commands(options, ports), ports):
            answer = ask(url_of(ports["router"]), document, options)
            decode = url_of(ports["decode"])
            console.print(reshard_table(decode))
            pool = read_pool(decode)
            console.print(rank_table(answer, pool, dcp=options.dcp, interleave=options.block_size))
            console.print(summary(answer))
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped", file=sys.stderr)
        return INTERRUPTED
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="folder, .gguf file or known name")
    parser.add_argument("--prefill-tp", type=int, default=3, help="ranks of the prefill engine")
    parser.add_argument("--tp", type=int, default=3, help="ranks of the decode engine")
    parser.add_argument("--dcp", type=int, default=3, help="of these, ranks that share the tokens")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a page, both engines")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="a text file")
    parser.add_argument(
        "--question",
        default="Who is the harbour master of Brannock Bay?",
        help="about the document",
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="of the answer")
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="both engines in one process; the default where NIXL is not installed",
    )
    return parser.parse_args()


def read_document(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(f"the document cannot be read: {error}") from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def url_of(port: int) -> str:
    return f"http://{HOST}:{port}"


def commands(options: argparse.Namespace, ports: Ports) -> dict[str, list[str]]:
    """What to start, by name. A name without a command is served by another one's process."""
    dcpjax = str(Path(sys.executable).with_name("dcpjax"))
    shapes = {
        "prefill": ["-tp", str(options.prefill_tp)],
        "decode": ["-tp", str(options.tp), "-dcp", str(options.dcp)],
    }
    roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
    connector = "NixlConnector"
    if options.in_process or not any(map(importlib.util.find_spec, NIXL_MODULES)):
        connector = "InProcessConnector"
    engines: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        transfer = json.dumps({"kv_connector": connector, "kv_role": roles[name]})
        engines[name] = [
            *(options.model, "--device", "cpu", "--host", HOST, "--port", str(ports[name])),
            *(*shape, "--block-size", str(options.block_size), "--max-num-seqs", "1"),
            *("--kv-transfer-config", transfer),
        ]
    router = [dcpjax, "router", "--host", HOST, "--port", str(ports["router"])]
    router += ["--prefill", url_of(ports["prefill"]), "--decode", url_of(ports["decode"])]
    if connector == "InProcessConnector":
        pair = [sys.executable, str(SCRIPTS / "serve_pair.py"), *engines["prefill"], "--and"]
        return {"decode": [*pair, *engines["decode"]], "router": router}
    served = {name: [dcpjax, "serve", *arguments] for name, arguments in engines.items()}
    return {**served, "router": router}


@contextlib.contextmanager
def running(commands: dict[str, list[str]], ports: Ports) -> Iterator[None]:
    """Processes that are ready. They are stopped on every way out.

    Each has its own process group, so that Ctrl-C reaches only this program, which then asks all of
    them to stop.
    """
    processes: dict[str, Process] = {}
    try:
        for name, command in commands.items():
            print(f"$ {' '.join(map(shown, command))}", flush=True)
            processes[name] = start(name, command)
        for name in ports:
            wait_until_ready(processes, url_of(ports[name]))
        yield
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
        for process in processes.values():
            stop(process)


def shown(argument: str) -> str:
    """An argument as a shell would take it, programs by their names."""
    if argument == sys.executable or argument.endswith("/dcpjax"):
        return Path(argument).name
    return f"'{argument}'" if " " in argument else argument


def start(name: str, command: list[str]) -> Process:
    """A process whose lines appear here under its name."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    def copy() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{name:>7} | {line}", end="", flush=True)

    threading.Thread(target=copy, daemon=True).start()
    return process


def wait_until_ready(processes: dict[str, Process], url: str) -> None:
    """Return when /health answers 200. Loading may take minutes; the engines show how it goes."""
    while not is_healthy(url):
        for name, process in processes.items():
            if process.poll() is not None:
                time.sleep(POLL_SECONDS)  # for its last lines
                raise DemoError(
                    f"{name} ended with exit code {process.returncode}; its message stands above"
                )
        time.sleep(POLL_SECONDS)


def stop(process: Process) -> None:
    """Wait for a process that was asked to end, and only then kill it."""
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ask(url: str, document: str, options: argparse.Namespace) -> Answer:
    """Send the document and the question; print the answer piece by piece."""
    body = {
        "model": get_json(f"{url}/v1/models")["data"][0]["id"],
        "messages": [{"role": "user", "content": f"{document}\n\n{options.question}"}],
        "max_tokens": options.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    print(f"\nDocument: {options.document.name}, {len(document.split())} words")
    print(f"Question: {options.question}\nAnswer:   ", end="", flush=True)
    answer = print_answer(stream_events(f"{url}/v1/chat/completions", body))
    print("\n")
    return answer


if __name__ == "__main__":
    sys.exit(main())
