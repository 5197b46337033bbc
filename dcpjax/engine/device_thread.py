"""One thread for everything that runs on devices, so that somebody can stop waiting for it."""

import atexit
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

EXIT_STUCK = 1
"""Of a process whose devices still wait for another process when it leaves."""

_log = logging.getLogger(__name__)


class DeviceThread:
    """Calls functions one after the other, in the order in which they were handed over.

    A collective that another process never joins does not return. A process that leaves meanwhile
    leaves at once, with EXIT_STUCK: to free the devices, as JAX does at the exit, would wait for
    it. So does one that was abandoned, as JAX would wait for others.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self._exit_code: int | None = None
        self._thread = threading.Thread(target=self._run, name="dcpjax-devices", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """What the function will return or raise."""
        future: Future[Result] = Future()
        self._last = future
        self._calls.put((function, future))
        return future

    def abandon(self, exit_code: int) -> None:
        """Somebody says why this process is about to leave; it leaves without JAX's own end."""
        self._exit_code = exit_code

    def _run(self) -> None:
        while True:
            function, future = self._calls.get()
            try:
                future.set_result(function())
            except BaseException as error:  # whoever waits raises it
                future.set_exception(error)

    def _leave(self) -> None:
        exit_code = self._exit_code
        if exit_code is None:
            if self._last is None or self._last.done():
                return
            _log.error("the devices still wait for another process: leaving without them")
            exit_code = EXIT_STUCK
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(exit_code)
