"""Serve a small model, its KV cache sharded over virtual CPU devices; ask it about a document.

Starts ``dcpjax serve`` as a user would, waits until it is ready, sends one chat request through the
OpenAI API, prints the answer as it comes and then what each rank holds. Ctrl-C ends both.
"""

import argparse
import contextlib
import http
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from dcpjax.layout import local_filled

HOST = "127.0.0.1"
POLL_SECONDS = 0.2
STOP_SECONDS = 20.0
INTERRUPTED = 128 + signal.SIGINT
DOCUMENT = Path(__file__).resolve().parent / "assets" / "harbour_log.txt"


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


@dataclass(frozen=True)
class Answer:
    """Counts as the server reports them; times in seconds, measured here."""

    prompt_tokens: int
    completion_tokens: int
    seconds_to_first: float
    seconds_after_first: float

    @property
    def tokens_per_second(self) -> float:
        """Rate after the first token; 0 when there is only one."""
        following = self.completion_tokens - 1
        return following / self.seconds_after_first if self.seconds_after_first > 0 else 0.0


@dataclass(frozen=True)
class Pool:
    """The KV pool of one rank, as the server's metrics describe it."""

    num_bytes: int
    num_pages: int
    page_size: int

    @property
    def bytes_per_token(self) -> float:
        """The pool has one page more than it can use, the scratch page."""
        return self.num_bytes / ((self.num_pages + 1) * self.page_size)


def main() -> int:
    options = parse_options()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    console = Console()
    try:
        document = read_document(options.document)
        with running_server(options, free_port()) as url:
            answer = ask(url, document, options)
            console.print(rank_table(answer, read_pool(url), options))
            console.print(summary(answer))
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped", file=sys.stderr)
        return INTERRUPTED
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="folder, .gguf file or known name")
    parser.add_argument("--tp", type=int, default=3, help="ranks, DCP ranks included")
    parser.add_argument("--dcp", type=int, default=3, help="ranks that share the tokens")
    parser.add_argument("--interleave", type=int, default=16, help="tokens in a row on one rank")
    parser.add_argument("--num-pages", type=int, default=256, help="pages of the pool, per rank")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="a text file")
    parser.add_argument("--question", default="Who is the harbour master of Brannock Bay?")
    parser.add_argument("--max-tokens", type=int, default=64)
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


def serve_command(options: argparse.Namespace, port: int) -> list[str]:
    return [
        *(str(Path(sys.executable).with_name("dcpjax")), "serve", options.model),
        *("--device", "cpu", "--host", HOST, "--port", str(port)),
        *("-tp", str(options.tp), "-dcp", str(options.dcp)),
        *("--cp-kv-cache-interleave-size", str(options.interleave)),
        *("--num-pages", str(options.num_pages), "--max-num-seqs", "1"),
    ]


@contextlib.contextmanager
def running_server(options: argparse.Namespace, port: int) -> Iterator[str]:
    """The base URL of a server that is ready. It is stopped on every way out.

    The server writes to this terminal itself. It has its own process group, so that Ctrl-C reaches
    only this program, which then asks the server to stop.
    """
    command = serve_command(options, port)
    print("$ dcpjax " + " ".join(command[1:]), flush=True)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        url = f"http://{HOST}:{port}"
        wait_until_ready(server, url)
        yield url
    finally:
        stop(server)


def wait_until_ready(server: "subprocess.Popen[bytes]", url: str) -> None:
    """Return when /health answers 200. Loading may take minutes; the server shows its progress."""
    while not is_healthy(url):
        if server.poll() is not None:
            raise DemoError(
                f"the server ended with exit code {server.returncode}; its message stands above"
            )
        time.sleep(POLL_SECONDS)


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == http.HTTPStatus.OK
    except OSError:  # not listening yet, or an HTTP error status
        return False


def stop(server: "subprocess.Popen[bytes]") -> None:
    """Ask, wait, and only then kill."""
    if server.poll() is None:
        server.terminate()
    try:
        server.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


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


def print_answer(events: Iterator[dict[str, Any]]) -> Answer:
    """Print the text of a chat stream as it comes. The last event has the token counts."""
    usage, first, last = None, None, 0.0
    started = time.perf_counter()
    for event in events:
        if "error" in event:
            raise DemoError(event["error"]["message"])
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if choice["delta"].get("content"):
                last = time.perf_counter()
                first = first or last
                print(choice["delta"]["content"], end="", flush=True)
    if usage is None or first is None:
        raise DemoError("the stream ended without an answer")
    return Answer(usage["prompt_tokens"], usage["completion_tokens"], first - started, last - first)


def stream_events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to its [DONE]."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with open_url(request) as response:
        try:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    yield json.loads(data)
        except (OSError, http.client.HTTPException) as error:
            raise DemoError(f"the connection to the server broke: {error}") from error


def get_json(url: str) -> dict[str, Any]:
    with open_url(urllib.request.Request(url)) as response:
        return json.load(response)


def open_url(request: urllib.request.Request) -> http.client.HTTPResponse:
    """Open it; an HTTP error becomes the message that the server gave with it."""
    try:
        return urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        raise DemoError(f"{request.full_url}: {error}: {error.read().decode()}") from error
    except OSError as error:
        raise DemoError(f"{request.full_url}: {error}") from error


def read_pool(url: str) -> Pool:
    with open_url(urllib.request.Request(f"{url}/metrics")) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = {sample.name: sample for family in families for sample in family.samples}
    shape = samples["vllm:cache_config_info"].labels
    return Pool(
        int(samples["dcpjax:kv_bytes_per_rank"].value),
        int(shape["num_gpu_blocks"]),
        int(shape["block_size"]),
    )


def rank_table(answer: Answer, pool: Pool, options: argparse.Namespace) -> Table:
    """What each rank holds of this conversation, and of the pool that was allocated for it.

    The last token was sampled and never computed, so it has no keys and values.
    """
    length = answer.prompt_tokens + answer.completion_tokens - 1
    table = Table(title=f"KV cache of {length} tokens over {options.dcp} ranks")
    for column in ("rank", "tokens", "bytes of them", "bytes of the pool"):
        table.add_column(column, justify="right")
    for rank in range(options.dcp):
        held = local_filled(length, rank, ranks=options.dcp, interleave=options.interleave)
        table.add_row(
            str(rank), str(held), mebibytes(held * pool.bytes_per_token), mebibytes(pool.num_bytes)
        )
    return table


def mebibytes(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


def summary(answer: Answer) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("tokens of the prompt", str(answer.prompt_tokens))
    table.add_row("time to first token", f"{answer.seconds_to_first:.2f} s")
    table.add_row("decode", f"{answer.tokens_per_second:.1f} tokens/s")
    return table


if __name__ == "__main__":
    sys.exit(main())
