"""What a producer offers, as its threads see it. Host only; whoever shares one has a lock."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from dcpjax.engine.remote_kv import KVExport
from dcpjax.errors import PeerError
from dcpjax.transfer.messages import Computed


@dataclass
class Offer:
    """A prompt whose pages are held, the engines that want it, and how far it is computed.

    ``waiting`` are answered when there is more than ``num_ready``, or nothing more will come.
    """

    export: KVExport
    num_ready: int
    targets: set[str] = field(default_factory=set[str])
    waiting: list[Future[Computed]] = field(default_factory=list[Future[Computed]])
    is_withdrawn: bool = False

    @property
    def is_computing(self) -> bool:
        return self.num_ready < self.export.num_tokens and not self.is_withdrawn

    def check_computed(self, num_tokens: int) -> None:
        """Raise PeerError unless the first ``num_tokens`` tokens are in the pages."""
        if num_tokens > self.num_ready:
            raise PeerError(
                "only tokens that were computed are sent",
                num_tokens=num_tokens,
                computed=self.num_ready,
            )

    def check_not_withdrawn(self) -> None:
        """Raise PeerError where the rest of the prompt will not come."""
        if self.is_withdrawn:
            raise _withdrawn(self.export.request_id)

    def answer(self, waiting: Sequence[Future[Computed]]) -> None:
        """Tell those that have waited."""
        for future in waiting:
            if self.is_withdrawn:
                future.set_exception(_withdrawn(self.export.request_id))
            else:
                future.set_result(Computed(num_tokens=self.num_ready))


def _withdrawn(request_id: str) -> PeerError:
    return PeerError("a prompt that is offered early is computed", request_id=request_id)
