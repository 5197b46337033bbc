"""The processes that an engine is: this one alone, or one of several.

The engine asks this module alone what other processes have to do with it. Everything that may wait
for another process, which is whatever runs on the devices, goes through :meth:`Processes.run`.
"""

import logging
from collections.abc import Callable
from concurrent.futures import wait
from typing import Protocol, TypeVar

import numpy as np

from dcpjax.config import DistributedConfig, EngineConfig, Progress
from dcpjax.engine.consensus import Consensus, Statement
from dcpjax.engine.device_thread import EXIT_STUCK, DeviceThread
from dcpjax.engine.jax_service import JaxService
from dcpjax.engine.joining import facts_of, join
from dcpjax.engine.link import Link
from dcpjax.engine.link_messages import Close, Confirm, Message
from dcpjax.engine.link_reduction import LinkReduction, gather_bytes
from dcpjax.errors import ConsensusError, DcpjaxError, EngineDeadError
from dcpjax.models.checkpoint import Checkpoint

Result = TypeVar("Result")

STEP_SECONDS = 60.0
"""For so long a process waits for the others once it has ended a step itself."""
EXIT_REFUSED = 2
"""Of a process that settings or files keep from starting, as where it is alone."""
_GRACE_SECONDS = 2.0
"""A collective breaks when another process dies, and a little later the link says which."""
_GLANCE_SECONDS = 0.05  # between two looks at the link while the devices work
_CAPACITY = 1  # polls and claims of a tick; an engine without host tiers has none

_log = logging.getLogger(__name__)


class Processes(Protocol):
    """What an engine needs of the processes that it is."""

    def run(self, function: Callable[[], Result]) -> Result:
        """Call a function that uses devices.

        Raises:
            EngineDeadError: another process is gone or failed, or this one failed in a way that the
                others cannot know.
        """
        ...

    def check(self) -> None:
        """Raise the EngineDeadError of a process that is gone or failed."""
        ...

    def on_failure(self, function: Callable[[], None]) -> None:
        """Have ``function`` called, from any thread, when :meth:`check` has something to raise."""
        ...

    def least(self, number: int) -> int:
        """The least of the numbers that all processes bring; they wait for each other."""
        ...

    def agree(self, what: str, witness: Callable[[], int]) -> None:
        """See that ``witness`` is the same on all processes, which are waited for.

        Raises:
            ConsensusError: it is not; says that the processes have to ``what``.
        """
        ...

    def gather(self, found: bytes) -> list[bytes]:
        """What all processes bring, by node rank; they wait for each other."""
        ...

    def settle(self) -> None:
        """Every program ran once: nothing new is asked of the other processes from now on."""
        ...

    def announce(self, message: Callable[[], Message]) -> None:
        """Tell the followers, in this order, what the leader does now."""
        ...

    def confirm(self, witness: Callable[[], int]) -> None:
        """See that all processes got the same out of the oldest step that is not confirmed.

        Each of them has waited until the step has ended on all of its devices.
        """
        ...

    def meet(self) -> None:
        """Wait until all processes have done what was announced before."""
        ...

    def fail(self, error: BaseException) -> None:
        """Tell the other processes of an error that ends this one."""
        ...

    def close(self) -> None:
        """End the engine on all processes. Idempotent."""
        ...


class OneProcess:
    """An engine in this process alone."""

    def run(self, function: Callable[[], Result]) -> Result:
        return function()

    def check(self) -> None:
        """Nobody else can fail."""

    def on_failure(self, function: Callable[[], None]) -> None:
        """Never called."""

    def least(self, number: int) -> int:
        return number

    def agree(self, what: str, witness: Callable[[], int]) -> None:
        """Nobody else to ask."""

    def gather(self, found: bytes) -> list[bytes]:
        return [found]

    def settle(self) -> None:
        """Nobody else to ask."""

    def announce(self, message: Callable[[], Message]) -> None:
        """Nobody follows."""

    def confirm(self, witness: Callable[[], int]) -> None:
        """Nothing to compare with."""

    def meet(self) -> None:
        """Nobody to wait for."""

    def fail(self, error: BaseException) -> None:
        """Nobody else to tell."""

    def close(self) -> None:
        """Nobody else to tell."""


class SeveralProcesses:
    """This process as one of several: the leader, or a follower.

    Raises:
        ConfigError: the processes do not make an engine.
        EngineDeadError: one of them is gone.
    """

    def __init__(
        self, config: DistributedConfig, facts: dict[str, str], progress: Progress | None = None
    ) -> None:
        self._link = Link(config)
        self._reduction = LinkReduction(self._link)
        self._consensus = Consensus(self._reduction, capacity=_CAPACITY, page_size=1)
        self._thread = DeviceThread()
        self._progress = progress
        self._service = JaxService(config)
        try:
            coordinator = join(self._link, config, facts, progress)
            self.run(lambda: self._service.enter(coordinator))
        except BaseException:  # also when the user interrupts it
            self._link.close()
            raise

    def run(self, function: Callable[[], Result]) -> Result:
        """See :class:`Processes`.

        The function runs in a thread of its own: a collective that another process never joins
        does not return, and nobody can interrupt it.
        """
        future = self._thread.submit(function)
        try:
            while not wait([future], _GLANCE_SECONDS).done:
                self._link.check()
            error = future.exception()
            if error is not None:
                self._fail(error)
            return future.result()
        except EngineDeadError:
            self._link.close()
            raise

    def _fail(self, error: BaseException) -> None:
        """An error of this process ends the engine, unless it is only what another's end caused."""
        if isinstance(error, DcpjaxError):
            self._link.fail(str(error))
            self._link.close()
            return
        self._link.wait_for_failure(_GRACE_SECONDS)
        _log.error("a step failed", exc_info=error)
        self._link.fail(f"{type(error).__name__}: {error}")
        self._link.check()

    def check(self) -> None:
        self._link.check()

    def on_failure(self, function: Callable[[], None]) -> None:
        self._link.on_failure(function)

    def _tell(self, what: str) -> None:
        if self._progress is not None:
            self._progress(what, self._link.ranks, self._link.ranks)

    def least(self, number: int) -> int:
        self._tell("agree on what all processes can hold")
        return int(self._reduction.exchange(np.asarray([number], np.int64)).min())

    def agree(self, what: str, witness: Callable[[], int]) -> None:
        self._tell(f"see that all processes {what}")
        found = self._reduction.exchange(np.asarray([witness()], np.int64))[:, 0].tolist()
        if len(set(found)) > 1:
            raise ConsensusError(f"all processes of an engine {what}", by_node_rank=found)

    def gather(self, found: bytes) -> list[bytes]:
        return gather_bytes(self._reduction, found)

    def settle(self) -> None:
        """Leave JAX's own service, through which its processes have found each other.

        Collectives go on over the connections that their first run has made. Whoever fails before
        leaves the process without JAX's own end, which would wait for those that are gone.
        """
        self.run(self._service.leave)
        self._reduction.timeout = STEP_SECONDS

    def announce(self, message: Callable[[], Message]) -> None:
        self._link.send(message())

    def receive(self) -> Message:
        """A follower: what the leader does next."""
        return self._link.receive()[1]

    def confirm(self, witness: Callable[[], int]) -> None:
        if self._link.rank == 0:
            self._link.send(Confirm())
        self._tick(witness)

    def meet(self) -> None:
        self._tick(lambda: 0)

    def _tick(self, witness: Callable[[], int]) -> None:
        try:
            self._consensus.tick(lambda: Statement(witness=witness()))
        except ConsensusError as error:
            self._link.fail(str(error))
            self._link.close()
            raise

    def fail(self, error: BaseException) -> None:
        """See :class:`Processes`; those that came out of :meth:`run` are known already."""
        if self._service.is_entered:
            is_dead = isinstance(error, EngineDeadError) or not isinstance(error, DcpjaxError)
            self._thread.abandon(EXIT_STUCK if is_dead else EXIT_REFUSED)
        self._link.fail(f"{type(error).__name__}: {error}")
        self._link.close()

    def close(self) -> None:
        if self._link.rank == 0:
            self._link.send(Close())
        self._link.close()


def join_processes(
    config: EngineConfig, checkpoint: Checkpoint, progress: Progress | None = None
) -> OneProcess | SeveralProcesses:
    """The processes of an engine, when all of them are there and JAX knows them.

    ``progress`` hears what is waited for.

    Raises:
        ConfigError: they do not make an engine; the same on all of them.
        EngineDeadError: one of them is gone.
    """
    if config.distributed.is_alone:
        return OneProcess()
    return SeveralProcesses(config.distributed, facts_of(config, checkpoint), progress)
