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
"""Of a process whose devices or whose JAX still wait for another process when it leaves."""

_log = logging.getLogger(__name__)


class DeviceThread:
    """Calls functions one after the other, in the order in which they were handed over.

    A collective that another process never joins does not return. A process that leaves meanwhile
    leaves at once, with EXIT_STUCK: to free the devices, as JAX does at the exit, would wait for
    it. So does one whose call to :meth:`abandon` says that JAX would wait for others.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name="dcpjax-devices", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """What the function will return or raise."""
        future: Future[Result] = Future()
        self._last = future
        self._calls.put((function, future))
        return future

    def abandon(self) -> None:
        """Somebody has said why this process is about to leave; it leaves without JAX's own end."""
        self._is_abandoned = True

    def _run(self) -> None:
        while True:
            function, future = self._calls.get()
            try:
                future.set_result(function())
            except BaseException as error:  # whoever waits raises it
                future.set_exception(error)

    def _leave(self) -> None:
        is_stuck = self._last is not None and not self._last.done()
        if not is_stuck and not self._is_abandoned:
            return
        if not self._is_abandoned:
            _log.error("the devices still wait for another process: leaving without them")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(EXIT_STUCK)
