"""The engines behind the router: which of them live, and which has the least to do.

Everything here runs on one event loop, so counting needs no lock.
"""

import asyncio
import contextlib
import enum
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence

import httpx

from dcpjax.server.errors import LegError
from dcpjax.server.router_calls import EndableBlocks

_SILENT_CHECKS = 3
"""Health checks in a row without any answer after which the legs of an engine are given up: its
machine may be gone without a word, and nothing else would end them."""

_log = logging.getLogger(__name__)


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Peer:
    """One engine. ``work_bytes`` is the size of the calls that it has not answered yet."""

    def __init__(self, role: Role, url: str) -> None:
        self.role = role
        self.url = url
        self.is_healthy = False
        self.work_bytes = 0
        self._legs = EndableBlocks()
        self._num_silent = 0

    @property
    def num_open(self) -> int:
        return len(self._legs)

    @contextlib.asynccontextmanager
    async def leg(self, work_bytes: int) -> AsyncIterator[None]:
        """Counts as load while it lasts.

        Raises:
            LegError: the engine was found dead meanwhile.
        """
        error = LegError("the engine has stopped answering its health checks", engine=self.url)
        self.work_bytes += work_bytes
        try:
            async with self._legs.block(error):
                yield
        finally:
            self.work_bytes -= work_bytes

    def note_answer(self, is_healthy: bool) -> None:
        """It, or at least its machine, answered a health check."""
        self._num_silent = 0
        self._set_healthy(is_healthy)

    def note_silence(self) -> None:
        """It did not, and enough of this ends what it still seems to work on."""
        self._num_silent += 1
        self._set_healthy(False)
        if self._num_silent >= _SILENT_CHECKS:
            self._legs.end_all()

    def note_unreachable(self) -> None:
        """A call could not be delivered: no more calls until it answers a health check."""
        self._set_healthy(False)

    def _set_healthy(self, is_healthy: bool) -> None:
        if is_healthy and not self.is_healthy:
            _log.info("the %s engine at %s is healthy", self.role.value, self.url)
        if self.is_healthy and not is_healthy:
            _log.warning("the %s engine at %s is not healthy", self.role.value, self.url)
        self.is_healthy = is_healthy


Load = Callable[[Peer], int]
LOADS: dict[Role, Load] = {
    Role.PREFILL: lambda peer: peer.work_bytes,
    Role.DECODE: lambda peer: peer.num_open,
}
"""What makes an engine busy: the prompts to compute, or the sequences that share each step. Bytes
stand for tokens: a word and the digits of a token id are about as long."""


class Peers:
    """All engines."""

    def __init__(self, prefill_urls: Sequence[str], decode_urls: Sequence[str]) -> None:
        self._of_role = {
            Role.PREFILL: [Peer(Role.PREFILL, url) for url in prefill_urls],
            Role.DECODE: [Peer(Role.DECODE, url) for url in decode_urls],
        }

    def of(self, role: Role) -> Sequence[Peer]:
        return self._of_role[role]

    def healthy(self, role: Role) -> Sequence[Peer]:
        return [peer for peer in self.of(role) if peer.is_healthy]

    def summary(self) -> str:
        """How many there are, and live, in words."""
        return ", ".join(
            f"{len(self.healthy(role))} of {len(self.of(role))} {role.value} engines"
            for role in Role
        )

    def choose(self, role: Role, tried: Collection[Peer]) -> Peer | None:
        """The healthy engine with the least to do that was not tried; the first among equals."""
        free = [peer for peer in self.healthy(role) if peer not in tried]
        return min(free, key=LOADS[role], default=None)


class HealthChecks:
    """Asks every engine how it is, each in its own rhythm.

    Args:
        interval: seconds between an answer and the next question.
    """

    def __init__(
        self, http: httpx.AsyncClient, peers: Peers, *, interval: float, timeout: float
    ) -> None:
        self._http = http
        self._peers = [peer for role in Role for peer in peers.of(role)]
        self._interval = interval
        self._timeout = timeout

    async def once(self) -> None:
        await asyncio.gather(*map(self._check, self._peers))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ask once, then for ever in the background."""
        await self.once()
        tasks = [asyncio.create_task(self._repeat(peer)) for peer in self._peers]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _repeat(self, peer: Peer) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self._check(peer)

    async def _check(self, peer: Peer) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._http.get(peer.url + "/health")
        except (httpx.HTTPError, TimeoutError) as error:
            if _is_refused(error):
                peer.note_answer(False)
            else:
                peer.note_silence()
        else:
            peer.note_answer(response.status_code == 200)


def _is_refused(error: BaseException | None) -> bool:
    """Whether the machine is there and nobody listens. A process that has died has no connections
    left to give up, and one that shuts down may be finishing its streams."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None
