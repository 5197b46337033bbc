"""A page as a headless Chromium shows it: sizes, messages, requests. By its DevTools' pipe."""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAM = "chromium"
SECONDS = 120.0
"""A busy machine takes long to start a browser."""
_MESSAGES = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
_LOOK = """JSON.stringify({
  figures: [...document.querySelectorAll("figure")].map(figure => {
    const box = figure.querySelector("svg").getBoundingClientRect();
    const drawn = figure.querySelectorAll("svg path, svg use").length;
    return {name: figure.getAttribute("aria-label"), width: box.width, height: box.height, drawn};
  }),
  width: document.documentElement.scrollWidth,
  text: document.body.innerText,
})"""


@dataclass(frozen=True)
class Shown:
    """What a page has become in a window of one width.

    Attributes:
        figures: name, width, height and number of drawn shapes of each.
        width: of all that can be scrolled to.
        messages: of the console, errors included.
        requests: addresses that it asked for.
    """

    figures: list[dict[str, Any]]
    width: int
    text: str
    messages: list[Any]
    requests: list[str]


@dataclass
class Browser:
    """A running browser, and the events that it has told of."""

    to_browser: int
    from_browser: int
    events: list[dict[str, Any]] = field(default_factory=list)
    _unread: bytes = b""
    _number: int = 0

    def show(self, url: str, width: int) -> Shown:
        """Open a page in a window of this width."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable", session)
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", session, **metrics)
        self.events.clear()
        self._call("Page.navigate", session, url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()
        found = self._call("Runtime.evaluate", session, expression=_LOOK)["result"]["value"]
        asked = self._of("Network.requestWillBeSent")
        return Shown(
            messages=self._of(*_MESSAGES),
            requests=[event["request"]["url"] for event in asked],
            **json.loads(found),
        )

    def _of(self, *methods: str) -> list[Any]:
        return [event["params"] for event in self.events if event["method"] in methods]

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        """The next answer or event; events are kept."""
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self.from_browser], [], [], deadline - time.monotonic())
            assert ready, f"the browser said nothing for {SECONDS} s"
            read = os.read(self.from_browser, 1 << 16)
            assert read, "the browser has ended"
            self._unread += read
        text, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message


@contextlib.contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """A browser with its profile in ``folder``, which is stopped on every way out."""
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    options += ["--no-first-run", f"--user-data-dir={folder}"]
    # It reads from file descriptor 3 and writes to 4.
    script = f'exec "$@" 3<&{their_in} 4>&{their_out}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", PROGRAM, *options],
        pass_fds=(their_in, their_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_in)
    os.close(their_out)
    try:
        yield Browser(our_out, our_in)
    finally:
        process.terminate()
        process.wait()
        os.close(our_out)
        os.close(our_in)
