"""What a follower waits for, and when it says that it has."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dcpjax.engine.follower import follow
from dcpjax.engine.link_messages import Close, Confirm, Message, Publish, RowOf, RunStep

STEP = RunStep(0, b"", [], b"", None, b"", b"")


class Recorder:
    """A runner and the processes of a follower: what is asked of either, in order."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = iter(messages)
        self._num_steps = 0
        self.done: list[Any] = []

    # The processes

    def receive(self) -> Message:
        return next(self._messages)

    def run(self, function: Callable[[], Any]) -> Any:
        return function()

    def confirm(self, witness: Callable[[], int]) -> None:
        self.done.append(("confirm", witness()))

    def meet(self) -> None:
        self.done.append("meet")

    def close(self) -> None:
        self.done.append("close")

    # The runner

    def order_of(self, message: RunStep) -> int:
        self._num_steps += 1
        return self._num_steps

    def execute(self, order: int) -> "Step":
        self.done.append(("execute", order))
        return Step(self, order)

    def publish(self, page_ids: list[int], drafted: Any) -> None:
        self.done.append(("publish", page_ids, drafted))


class Step:
    """A step on its way."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder, self._number = recorder, number
        self.drafted = f"drafts behind {number}"

    def witness(self) -> int:
        self._recorder.done.append(("wait", self._number))
        return self._number


def done_with(*messages: Message) -> list[Any]:
    recorder: Any = Recorder(messages)
    follow(recorder, recorder)
    return recorder.done


def test_pages_are_published_behind_the_steps_that_were_confirmed():
    """The next step may be on its way: of that one nothing is read."""
    assert done_with(
        Publish([]), STEP, STEP, Confirm(), Publish([3, 1]), Confirm(), Publish([]), Close()
    ) == [
        ("publish", [], None),
        "meet",
        ("execute", 1),
        ("execute", 2),
        ("wait", 1),
        ("confirm", 1),
        ("publish", [3, 1], "drafts behind 1"),
        "meet",
        ("wait", 2),
        ("confirm", 2),
        ("publish", [], "drafts behind 2"),
        "meet",
        "close",
    ]


def test_what_no_leader_announces_is_a_bug():
    with pytest.raises(AssertionError, match="nothing that a leader announces"):
        done_with(RowOf(b""))
