"""Which engines answer a call: prefill first, then decode, and who else is asked if one fails.

Another engine is asked only as long as the client has seen nothing.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing

import httpx
import msgspec

from dcpjax.server.errors import LegError, UnavailableError
from dcpjax.server.router_bodies import (
    Fields,
    decode_body,
    prefill_body,
    read_fields,
    transfer_params_of,
    transfer_params_of_events,
)
from dcpjax.server.router_config import PrefillFallback
from dcpjax.server.router_legs import Answer, Call, opened
from dcpjax.server.router_metrics import RouterMetrics
from dcpjax.server.router_peers import Peer, Peers, Role

CHAT = "/v1/chat/completions"
_UNAVAILABLE = 503

_log = logging.getLogger(__name__)


class NoAnswerError(LegError):
    """Every engine that could be asked failed. ``answer`` is the last one's own words, if any."""

    def __init__(self, role: Role, failures: list[LegError | Answer]) -> None:
        last = failures[-1] if failures else None
        self.answer = last if isinstance(last, Answer) and last.status >= 500 else None
        reason = str(last) if isinstance(last, LegError) else "none is healthy"
        super().__init__(f"a {role.value} engine can answer", asked=len(failures), reason=reason)

    @property
    def is_overload(self) -> bool:
        return self.answer is not None and self.answer.status == _UNAVAILABLE


class Ways:
    """The ways of calls through the engines."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        peers: Peers,
        metrics: RouterMetrics,
        prefill_fallback: PrefillFallback,
        *,
        is_pipelined: bool = False,
    ) -> None:
        self._http = http
        self._peers = peers
        self._metrics = metrics
        self._prefill_fallback = prefill_fallback
        self._is_pipelined = is_pipelined

    def check_decode(self) -> None:
        """Raise UnavailableError where nobody could answer."""
        if not self._peers.healthy(Role.DECODE):
            raise UnavailableError("no decode engine is healthy")

    async def generate(self, call: Call, legs: AsyncExitStack) -> Answer:
        """The answer to a completion or a chat, which streams as long as ``legs`` is open.

        Raises:
            LegError, UnavailableError: nobody answers.
        """
        self.check_decode()
        fields = read_fields(call.body)
        if fields is None:
            return await self.direct(call, legs)
        prefilled = await self._prefill(call, fields, legs if self._is_pipelined else None)
        if isinstance(prefilled, Answer):
            return prefilled
        try:
            return await self._decode(call, fields, prefilled, legs)
        except NoAnswerError as error:
            if prefilled is None or error.is_overload:
                raise
        # The KV may have been lost with its engine, or used up by a decode engine that failed.
        self._metrics.repeated_prefills.inc()
        prefilled = await self._prefill(call, fields)
        if isinstance(prefilled, Answer):
            return prefilled
        return await self._decode(call, fields, prefilled, legs)

    async def direct(self, call: Call, legs: AsyncExitStack) -> Answer:
        """The answer of a decode engine to a call as it came; also to what is not a generation."""
        return await self._first_good(Role.DECODE, call, legs, _is_final)

    async def _prefill(
        self, call: Call, fields: Fields, early: AsyncExitStack | None = None
    ) -> msgspec.Raw | Answer | None:
        """Where the KV of the prompt is; or the answer to a call that is wrong; or None where
        decode has to compute the prompt.

        Args:
            early: do not wait until it is computed, which goes on as long as this is open.
        """
        body = prefill_body(fields, is_chat=call.path == CHAT, is_early=early is not None)
        leg_call = dataclasses.replace(call, body=body)
        try:
            if early is None:
                async with AsyncExitStack() as legs:
                    answer = await self._first_good(Role.PREFILL, leg_call, legs, _is_prefilled)
            else:
                answer = await self._begin_prefill(leg_call, early)
        except NoAnswerError:
            if self._prefill_fallback == "error":
                raise
            self._metrics.fallbacks.inc()
            return None
        return _params_of(answer) if answer.status == 200 else answer

    async def _begin_prefill(self, call: Call, legs: AsyncExitStack) -> Answer:
        """The first events of a prefill engine, whose leg ends when it has computed the prompt, or
        with ``legs``.

        Raises:
            NoAnswerError: no engine begins.
        """
        begun: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._watch_prefill(call, begun))
        legs.push_async_callback(_cancel, task)
        return await begun

    async def _watch_prefill(self, call: Call, begun: "asyncio.Future[Answer]") -> None:
        try:
            async with AsyncExitStack() as legs:
                answer = await self._first_good(Role.PREFILL, call, legs, _is_begun)
                begun.set_result(answer)
                if answer.rest is not None:
                    async with aclosing(answer.rest) as rest:
                        async for _ in rest:
                            pass
        except LegError as error:
            if (
                begun.done()
            ):  # the decode engine will hear of it from the prefill engine, or miss it
                _log.warning("a prompt that was offered early broke off: %s", error)
            else:
                begun.set_exception(error)

    async def _decode(
        self, call: Call, fields: Fields, params: msgspec.Raw | None, legs: AsyncExitStack
    ) -> Answer:
        body = decode_body(fields, params)
        return await self.direct(dataclasses.replace(call, body=body), legs)

    async def _first_good(
        self, role: Role, call: Call, legs: AsyncExitStack, is_good: Callable[[Answer], bool]
    ) -> Answer:
        """Ask one engine after the other, each once.

        Raises:
            NoAnswerError: no answer was good.
        """
        tried: set[Peer] = set()
        failures: list[LegError | Answer] = []
        while (peer := self._peers.choose(role, tried)) is not None:
            tried.add(peer)
            with self._metrics.leg_seconds[role].time():
                outcome = await self._ask(peer, call, legs, is_good)
            if isinstance(outcome, Answer) and is_good(outcome):
                return outcome
            self._note_failure(peer, outcome)
            failures.append(outcome)
        raise NoAnswerError(role, failures)

    def _note_failure(self, peer: Peer, outcome: Answer | LegError) -> None:
        self._metrics.failed_legs[peer.role].inc()
        if isinstance(outcome, Answer):
            _log.warning(
                "the %s engine at %s answered %s", peer.role.value, peer.url, outcome.summary
            )
        else:
            _log.warning(
                "the %s engine at %s did not answer: %s", peer.role.value, peer.url, outcome
            )

    async def _ask(
        self, peer: Peer, call: Call, legs: AsyncExitStack, is_good: Callable[[Answer], bool]
    ) -> Answer | LegError:
        """The answer of one engine, whose leg stays open in ``legs`` if it is good."""
        try:
            async with AsyncExitStack() as leg:
                answer = await leg.enter_async_context(opened(self._http, peer, call))
                if is_good(answer):
                    await legs.enter_async_context(leg.pop_all())
                return answer
        except LegError as error:
            return error


def _is_final(answer: Answer) -> bool:
    return answer.status < 500


def _is_prefilled(answer: Answer) -> bool:
    """A refusal of the call, or a success that says where the KV is."""
    return answer.rest is None and _is_begun(answer)


def _is_begun(answer: Answer) -> bool:
    """The same, or a stream that begins with saying so."""
    if answer.status != 200:
        return 400 <= answer.status < 500
    return _params_of(answer) is not None


def _params_of(answer: Answer) -> msgspec.Raw | None:
    read = transfer_params_of if answer.rest is None else transfer_params_of_events
    return read(answer.body)


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait({task})
