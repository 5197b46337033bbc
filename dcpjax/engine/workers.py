"""Threads that compute several things and keep no process from leaving."""

import contextlib
import queue
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(
    function: Callable[[Item], Result], items: Collection[Item], num_threads: int
) -> list[Result]:
    """The results of ``items``, in their order.

    As with a ThreadPoolExecutor, but Python waits for the threads of one of those when it leaves,
    whatever has happened: here until everything is compiled.

    Raises:
        the first error of ``function`` in the order of items, when what was begun has ended; the
        rest is not begun.
    """
    futures: list[Future[Result]] = [Future() for _ in items]
    waiting: queue.SimpleQueue[tuple[Item, Future[Result]]] = queue.SimpleQueue()
    for call in zip(items, futures, strict=True):
        waiting.put(call)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while _call(function, *waiting.get_nowait()):
                pass
        _empty(waiting)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        return [future.result() for future in futures]
    finally:
        _empty(waiting)  # where the caller is interrupted
        for thread in threads:
            thread.join()


def _call(function: Callable[[Item], Result], item: Item, future: Future[Result]) -> bool:
    """Whether it went well."""
    try:
        future.set_result(function(item))
    except BaseException as error:  # whoever waits raises it
        future.set_exception(error)
        return False
    return True


def _empty(waiting: queue.SimpleQueue[Any]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            waiting.get_nowait()
