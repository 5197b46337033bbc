"""What a producer does with each message that reaches it."""

from concurrent.futures import Future
from typing import Protocol

from dcpjax.transfer.messages import (
    Abort,
    Aborted,
    AnyCall,
    Claim,
    Claimed,
    Computed,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Landed,
    Push,
    Pushed,
    Released,
    Reply,
    Wait,
    Welcome,
)


class Handler(Protocol):
    """What a producer does with each message.

    The methods are called by the listener's thread and return soon: what takes time returns a
    future, which any thread may complete. An error becomes the answer ``Failed``, with rule and
    values if it is a DcpjaxError, without any detail if not. The caller of a ``push`` takes it to
    mean that nothing writes any more, so an error is raised only when that is so.
    """

    def hello(self, call: Hello) -> Welcome | Future[Welcome]: ...

    def claim(self, call: Claim) -> Claimed | Future[Claimed]: ...

    def wait(self, call: Wait) -> Computed | Future[Computed]: ...

    def push(self, call: Push) -> Pushed | Future[Pushed]: ...

    def landed(self, call: Landed) -> Released | Future[Released]: ...

    def heartbeat(self, call: Heartbeat) -> HeartbeatReply | Future[HeartbeatReply]: ...

    def abort(self, call: Abort) -> Aborted | Future[Aborted]: ...


def dispatch(handler: Handler, call: AnyCall) -> tuple[Reply | Future, type[Reply]]:
    """What a handler answers to a call, now or later, and the type that the answer has."""
    match call:
        case Hello():
            return handler.hello(call), Welcome
        case Claim():
            return handler.claim(call), Claimed
        case Wait():
            return handler.wait(call), Computed
        case Push():
            return handler.push(call), Pushed
        case Landed():
            return handler.landed(call), Released
        case Heartbeat():
            return handler.heartbeat(call), HeartbeatReply
        case Abort():
            return handler.abort(call), Aborted
