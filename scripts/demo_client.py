"""The demo's HTTP client: only what Python brings, so that nothing is hidden in a library."""

import http
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


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


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == http.HTTPStatus.OK
    except OSError:  # not listening yet, or an HTTP error status
        return False


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
