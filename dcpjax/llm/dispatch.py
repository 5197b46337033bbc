"""One engine for several callers in one thread: each gets its own requests' outputs.

Whoever waits steps the engine for all; what arrives for others is kept until they ask. So a stream
may be left alone for a while, and go on after other calls.
"""

from collections import deque
from collections.abc import Sequence

from dcpjax.engine.request import Request, TokenOutput
from dcpjax.errors import EngineDeadError
from dcpjax.llm.interfaces import TokenEngine


class Dispatcher:
    """Steps an engine and files every output by its request."""

    def __init__(self, engine: TokenEngine) -> None:
        self._engine = engine
        self._mailboxes: dict[str, Mailbox] = {}

    def open(self, requests: Sequence[Request]) -> "Mailbox":
        """Hand requests to the engine, all or none.

        Raises:
            RequestError: the engine refused one of them.
        """
        mailbox = Mailbox(self)
        try:
            for request in requests:
                self._engine.add(request)
                self._mailboxes[request.request_id] = mailbox
                mailbox.request_ids.add(request.request_id)
        except BaseException:  # also when the caller is interrupted here
            mailbox.close()
            raise
        return mailbox

    def step(self) -> None:
        """Run one step of the engine.

        Raises:
            EngineDeadError: it has nothing to do, so nobody gets what is waited for.
        """
        if not self._engine.has_work:
            raise EngineDeadError("the engine works until every request has ended")
        for output in self._engine.step():
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:  # aborted earlier
                continue
            mailbox.put(output)
            if output.finish_reason is not None:
                self._forget(output.request_id, mailbox)

    def abort(self, request_id: str) -> None:
        """End a request whose outputs nobody wants any more; an ended one stays as it is."""
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None:
            self._engine.abort(request_id)
            self._forget(request_id, mailbox)

    def _forget(self, request_id: str, mailbox: "Mailbox") -> None:
        del self._mailboxes[request_id]
        mailbox.request_ids.discard(request_id)


class Mailbox:
    """The outputs of the requests of one call, in the order of arrival.

    ``request_ids`` are those that the engine still works on. Whoever opened it closes it.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.request_ids: set[str] = set()
        self._dispatcher = dispatcher
        self._arrived: deque[TokenOutput] = deque()

    def put(self, output: TokenOutput) -> None:
        self._arrived.append(output)

    def take(self) -> TokenOutput:
        """The next output; steps the engine until there is one."""
        while not self._arrived:
            self._dispatcher.step()
        return self._arrived.popleft()

    def close(self) -> None:
        """Abort what has not ended."""
        for request_id in list(self.request_ids):
            self._dispatcher.abort(request_id)
