"""Connections to another process that stay open on this side when that process is gone.

JAX ends a process, with a stack and SIGABRT, as soon as the connection to its coordination service
is lost, and nothing can be put into the place of that. The engine's own link notices the same and
says which process is gone and why; behind a relay it has the time to.
"""

import contextlib
import socket
import threading
from collections.abc import Callable

_HOST = "127.0.0.1"
_CHUNK = 1 << 16


class Relay:
    """Passes on what is said at :attr:`address` to ``host`` and ``port``, and the answers.

    Until the first connection is made, one that cannot be made is closed, to be tried again.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._is_found = False
        self._listener = socket.create_server((_HOST, 0))
        self.address = f"{_HOST}:{self._listener.getsockname()[1]}"
        _start(self._accept)

    def close(self) -> None:
        """Take no further connections; those that are there stay until this side closes them."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                _start(self._connect, near)

    def _connect(self, near: socket.socket) -> None:
        """Pass on until the near side closes, whatever becomes of the far one."""
        with near:
            try:
                far = socket.create_connection(self._target)
            except OSError:
                if self._is_found:
                    _pump(near, None)
                return
            self._is_found = True
            with far:
                _start(_pump, far, near)
                _pump(near, far)
                with contextlib.suppress(OSError):  # a close alone would not wake the other thread
                    far.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, target: socket.socket | None) -> None:
    """Pass on until ``source`` ends; what its receiver does not take any more is dropped."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            if target is not None:
                with contextlib.suppress(OSError):
                    target.sendall(data)


def _start(function: Callable[..., None], *arguments: socket.socket) -> None:
    threading.Thread(target=function, args=arguments, daemon=True, name="dcpjax-relay").start()
