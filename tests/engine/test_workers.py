"""Several things computed by threads: results in order, errors, and a process that leaves."""

import subprocess
import sys
import threading

import pytest

from dcpjax.engine.workers import map_in_threads
from tests.engine.processes import PATIENCE, ROOT

LEAVING = """
import threading
from dcpjax.engine.workers import map_in_threads
begun = threading.Event()
def work(item):
    begun.set()
    threading.Event().wait()
mapping = threading.Thread(target=map_in_threads, args=(work, range(5), 2), daemon=True)
mapping.start()
begun.wait()
"""


@pytest.mark.parametrize("num_items", [0, 1, 2, 3, 20])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_results_come_in_the_order_of_the_items(num_items: int, num_threads: int):
    assert map_in_threads(lambda x: x * x, range(num_items), num_threads) == [
        x * x for x in range(num_items)
    ]


def test_threads_work_at_the_same_time():
    together = threading.Barrier(2)
    assert map_in_threads(lambda _: together.wait(PATIENCE) < 2, range(4), 2) == [True] * 4


def test_after_an_error_nothing_else_is_begun():
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        return 1 // (item - 2)

    with pytest.raises(ZeroDivisionError):
        map_in_threads(work, range(1000), 1)
    assert begun[:3] == [0, 1, 2] and len(begun) < 1000


def test_a_process_leaves_without_them():
    subprocess.run([sys.executable, "-c", LEAVING], cwd=ROOT, check=True, timeout=PATIENCE)
