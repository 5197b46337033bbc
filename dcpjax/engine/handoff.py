"""KV between this engine and others, as the engine's thread sees it.

What other threads do ends in a queue here, and ``apply`` carries it out between two steps: so the
scheduler still belongs to one thread.
"""

import dataclasses
import logging
import queue
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcpjax.config import KVTransferConfig
from dcpjax.engine.kv_local import LocalKV
from dcpjax.engine.kv_params import KVTransferParams
from dcpjax.engine.kv_source import KVSource
from dcpjax.engine.kv_target import KVTarget, LoadEnd
from dcpjax.engine.remote_kv import KVEvents, KVLoad, RemoteKV, prompt_digest
from dcpjax.engine.remote_work import RemoteWork
from dcpjax.engine.request import Request, TokenOutput
from dcpjax.errors import RequestError

_PARAM = "kv_transfer_params"

Event = Callable[[RemoteWork], None]

_log = logging.getLogger(__name__)


class Handoff:
    """The exports and loads of one engine.

    Args:
        wake: called, from any thread, when :meth:`apply` has something to do.
        land: called with each load that arrived, by the engine's thread, before it is used.
        check_alive: raises the EngineDeadError of an engine of which a process is gone or failed.
    """

    def __init__(
        self,
        local: LocalKV,
        config: KVTransferConfig,
        *,
        wake: Callable[[], None],
        land: Callable[[KVLoad], None],
        check_alive: Callable[[], None],
    ) -> None:
        self._local, self._land = local, land
        self._is_pipelined = config.pipelined_sends
        self._recomputes = config.kv_load_failure_policy == "recompute"
        self._wake = wake
        self._unsettled: dict[str, int] = {}  # pages of loads into which something may still write
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._source = (
            KVSource(local, config, self._export_ended, check_alive) if config.is_producer else None
        )
        self._target = (
            KVTarget(local, config, self._load_ended, self._waited_too_long)
            if config.is_consumer
            else None
        )

    def accept(self, request: Request) -> None:
        """Read what a new request says about its KV.

        Raises:
            RequestError: it asks for what this engine does not do, or makes no sense.
        """
        if request.kv_transfer_params is None:
            return
        params = KVTransferParams.read(request.kv_transfer_params)
        if params.do_remote_decode:
            self._check_role(self._source, "computes prompts for others", "kv_producer")
            request.exports_kv = True
            request.exports_early = bool(params.early_offer) and self._is_pipelined
        if params.do_remote_prefill:
            self._check_role(self._target, "loads KV from others", "kv_consumer")
            request.remote_kv = _remote_kv(params, request.prompt_token_ids)

    def expect(self, request: Request) -> None:
        """An accepted request was queued."""
        if self._target is None or request.remote_kv is None:
            return
        if request.remote_kv.is_same_prompt:
            self._target.expect(request.request_id, request.remote_kv)
        else:
            self._decline(request, request.remote_kv)

    def refuse(self, request: Request) -> None:
        """A request was not queued: nobody here wants its KV."""
        if self._target is not None and request.remote_kv is not None:
            self._target.cancel(request.request_id, request.remote_kv)

    def serve(self, events: KVEvents) -> dict[str, dict[str, Any]]:
        """Begin what the scheduler wants; returns the ``kv_transfer_params`` of new exports.

        These are of requests that have just ended, and of those that have just begun.
        """
        if self._target is not None:
            for load in events.loads:
                self._target.start(load)
            for request_id, remote in events.unwanted.items():
                self._target.cancel(request_id, remote)
            for request_id in events.abandoned:
                self._target.abandon(request_id)
        return {} if self._source is None else _offer(self._source, events)

    def apply(self, remote: RemoteWork) -> None:
        """Carry out what has ended since the last call."""
        while not self._events.empty():
            self._events.get()(remote)

    @property
    def num_offers(self) -> int:
        """Prompts whose KV other engines may still take."""
        return 0 if self._source is None else self._source.num_leases

    def stats(self) -> Mapping[str, Any]:
        return {
            **self._local.stats.shown(),
            "num_quarantined_pages": sum(list(self._unsettled.values())),
            "num_leases": self.num_offers,
            "last_transfer": self._local.last_transfer,
        }

    def close(self) -> None:
        """Leave all other engines. Idempotent; afterwards nothing touches the pool."""
        for part in (self._target, self._source, self._local):
            if part is not None:
                part.close()

    def _decline(self, request: Request, remote: RemoteKV) -> None:
        """Its KV is of another prompt. No fault of the client: a chat template may write the date,
        so the call is worth another attempt from its beginning."""
        self._local.stats.add(num_failed=1)
        rule = (
            "the engine that computed a prompt and the one that goes on read the same tokens "
            f"(remote_num_tokens={remote.num_tokens}, prompt_tokens={request.num_tokens})"
        )
        _log.warning("KV of request %s is not used: %s", request.request_id, rule)
        self.refuse(request)
        self._stop_waiting(request.request_id, rule)

    def _check_role(self, part: object | None, does: str, role: str) -> None:
        if part is None:
            raise RequestError(
                f"this engine {does}; it needs kv_role={role!r} or 'kv_both'",
                param=_PARAM,
            )

    def _use(self, remote: RemoteWork, load: KVLoad) -> None:
        self._land(load)
        remote.land(load)

    # By any thread.

    def _export_ended(self, request_id: str) -> None:
        self._post(lambda remote: _end_export(remote, request_id))

    def _load_ended(self, end: LoadEnd) -> None:
        if self._unsettled.pop(end.load.request_id, None) is not None:
            self._post(lambda remote: remote.settle_load(end.load))
        elif end.reason is None:
            self._post(lambda remote: self._use(remote, end.load))
        else:
            if not end.is_settled:
                self._unsettled[end.load.request_id] = len(end.load.page_ids)
            error = None if self._recomputes else end.reason
            self._post(
                lambda remote: remote.fail_load(end.load, error=error, is_settled=end.is_settled)
            )

    def _waited_too_long(self, request_id: str) -> None:
        self._stop_waiting(request_id, "there is room for the KV of a request in time")

    def _stop_waiting(self, request_id: str, rule: str) -> None:
        error = None if self._recomputes else rule
        self._post(lambda remote: remote.stop_waiting(request_id, error=error))

    def _post(self, event: Event) -> None:
        self._events.put(event)
        self._wake()


def new_engine_id(name: str | None) -> str:
    """An identity of this process alone: what peers keep of an engine must not outlive it.

    Args:
        name: how its identity begins.
    """
    unique = uuid.uuid4().hex
    return unique if name is None else f"{name}-{unique}"


def with_offers(outputs: list[TokenOutput], offers: dict[str, dict[str, Any]]) -> list[TokenOutput]:
    """Say with the last output of a request where its KV is; or, if it goes on, with one more."""
    shown = [
        dataclasses.replace(output, kv_transfer_params=offers.pop(output.request_id, None))
        if output.finish_reason is not None
        else output
        for output in outputs
    ]
    return [TokenOutput(name, (), kv_transfer_params=offers[name]) for name in offers] + shown


def _offer(source: KVSource, events: KVEvents) -> dict[str, dict[str, Any]]:
    offers = {export.request_id: source.export(export) for export in events.exports}
    for export in events.early_exports:
        num_ready = events.progress.pop(export.request_id)
        offers[export.request_id] = source.export(export, num_ready=num_ready)
    for request_id, num_ready in events.progress.items():
        source.advance(request_id, num_ready)
    for request_id in events.withdrawn:
        source.withdraw(request_id)
    return offers


def _end_export(remote: RemoteWork, request_id: str) -> None:
    remote.end_export(request_id)


def _remote_kv(params: KVTransferParams, prompt: Sequence[int]) -> RemoteKV:
    if params.remote_num_tokens is None:
        raise RequestError("do_remote_prefill says how many tokens there are", param=_PARAM)
    digest = prompt_digest(prompt)
    theirs = params.remote_num_tokens, params.remote_prompt_digest or digest
    return RemoteKV(
        engine_id=params.remote_engine_id or "",
        request_id=params.remote_request_id or "",
        host=params.remote_host or "",
        port=params.remote_port or 0,
        page_ids=_page_ids(params.remote_block_ids or []),
        num_tokens=params.remote_num_tokens,
        prompt_digest=digest,
        is_partial=params.remote_is_partial is True,
        is_same_prompt=theirs == (len(prompt), digest),
    )


def _page_ids(listed: Sequence[int | list[int]]) -> tuple[int, ...]:
    """Page ids, which some engines list by groups of layers."""
    groups = [item for item in listed if isinstance(item, list)]
    if len(groups) > 1:
        raise RequestError(
            "all layers of a model here are one group of pages",
            param=_PARAM,
            groups=len(groups),
        )
    return tuple(groups[0] if groups else [item for item in listed if isinstance(item, int)])
