"""What is under way, and how it is ended from outside: calls at shutdown, legs of a dead engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from dcpjax.errors import DcpjaxError
from dcpjax.server.errors import UnavailableError


class EndableBlocks:
    """``async with`` blocks that somebody else can end."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()

    def __len__(self) -> int:
        return len(self._limits)

    @contextlib.asynccontextmanager
    async def block(self, error: DcpjaxError) -> AsyncIterator[None]:
        """A block out of which ``error`` is raised when it is ended; it never limits itself."""
        limit = asyncio.timeout(None)
        self._limits.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():  # somebody else's
                raise
            raise error from None
        finally:
            self._limits.discard(limit)

    def end_all(self) -> None:
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)


class OpenCalls:
    """The calls that the router works on; :class:`dcpjax.server.run.GracefulServer` ends them."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._blocks = EndableBlocks()
        self._is_accepting = True
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        return len(self._blocks)

    def check_accepting(self) -> None:
        """Raise UnavailableError where another call would be too much."""
        if not self._is_accepting:
            raise UnavailableError("the router is shutting down")
        if self.num_open >= self._max_open:
            raise UnavailableError(
                "too many requests are under way; try again later", limit=self._max_open
            )

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """One call, from its body to the end of its answer.

        Raises:
            UnavailableError: it is not accepted, or was ended by a shutdown.
        """
        self.check_accepting()
        self._idle.clear()
        try:
            async with self._blocks.block(UnavailableError("the router is shutting down")):
                yield
        finally:
            if not self.num_open:
                self._idle.set()

    def stop_accepting(self) -> None:
        self._is_accepting = False

    def abort_all(self) -> None:
        self._blocks.end_all()

    def abandon(self) -> None:
        """Nothing runs outside the event loop: there is nothing to leave behind."""

    async def wait_idle(self) -> None:
        """Until no call is open."""
        await self._idle.wait()

    async def wait_handed_over(self) -> None:
        """The router has nothing that an engine might still take."""
