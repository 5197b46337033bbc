"""A process of an engine that another one leads: the same programs in the same order."""

from collections import deque

from jax import Array

from dcpjax.engine.dispatched import Executed
from dcpjax.engine.link_messages import Close, Confirm, Publish, RunStep
from dcpjax.engine.processes import SeveralProcesses
from dcpjax.engine.runner import Runner


def follow(runner: Runner, processes: SeveralProcesses) -> None:
    """Run what the leader announces until it closes the engine.

    A step is dispatched when it is announced, and waited for when the leader waits for it too; by
    then the next one may be on its way.

    Raises:
        EngineDeadError: a process of the engine is gone or failed, this one included.
    """
    unconfirmed: deque[Executed] = deque()
    drafted: Array | None = None  # of the last step that was waited for
    while True:
        match processes.receive():
            case RunStep() as message:
                order = runner.order_of(message)
                unconfirmed.append(processes.run(lambda order=order: runner.execute(order)))
            case Confirm():
                executed = unconfirmed.popleft()
                witness = processes.run(executed.witness)
                processes.confirm(lambda witness=witness: witness)
                drafted = executed.drafted
            case Publish() as message:
                pages = message.page_ids
                processes.run(lambda pages=pages, drafted=drafted: runner.publish(pages, drafted))
                processes.meet()
            case Close():
                processes.close()
                return
            case other:
                raise AssertionError(f"{other} is nothing that a leader announces")
