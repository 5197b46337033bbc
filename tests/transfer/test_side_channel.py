"""Real sockets on the loopback: whatever is sent, each call gets its own answer or an error."""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from dcpjax.errors import ConfigError, PeerError, TransferError
from dcpjax.transfer import side_channel
from dcpjax.transfer.frames import MessageError, PeerRefusedError, decode_reply, encode
from dcpjax.transfer.messages import (
    MAX_FRAME_BYTES,
    Abort,
    Aborted,
    AnyReply,
    Failed,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Landed,
    OtherEngine,
    Push,
    Pushed,
    Released,
    Reply,
    Welcome,
)
from dcpjax.transfer.side_channel import CUT_OFF_BYTES, SideChannelServer, channel_address
from dcpjax.transfer.side_channel_client import (
    PeerGoneError,
    PeerSilentError,
    SideChannelClient,
)

LONG = 60.0
"""Seconds, for answers that come: the tests are over long before, unless something is broken."""
DIGEST = "0" * 64
LANDED = Landed(engine_id="p", request_id="r", target_ranks=(0,), num_target_ranks=1)
ABORT = Abort(engine_id="p", target_engine_id="d", request_id="r")
PUSH = Push(
    engine_id="p", request_id="r", target_engine_id="d", first_token=0, num_tokens=0, page_ids=b""
)
HELLO = Hello(engine_id="p", connector_version=1, compatibility=DIGEST, factors={}, metadata=b"")


class FakeProducer:
    """Counts calls; pushes stay open until the test completes them."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.pushes: dict[str, Future[Pushed]] = {}
        self.has_push = threading.Semaphore(0)
        self.abort_answer: Callable[[], Any] = Aborted

    def hello(self, call: Hello) -> Welcome:
        self.num_calls += 1
        return Welcome(
            connector_version=1, compatibility=DIGEST, factors={}, metadata=call.metadata
        )

    def push(self, call: Push) -> Future[Pushed]:
        self.num_calls += 1
        self.pushes[call.request_id] = Future()
        self.has_push.release()
        return self.pushes[call.request_id]

    def landed(self, call: Landed) -> Released:
        self.num_calls += 1
        return Released(ok=self.num_calls == 1)

    def heartbeat(self, call: Heartbeat) -> HeartbeatReply:
        self.num_calls += 1
        return HeartbeatReply(request_ids=call.request_ids)

    def abort(self, call: Abort) -> Any:
        self.num_calls += 1
        return self.abort_answer()


@pytest.fixture
def producer() -> FakeProducer:
    return FakeProducer()


@pytest.fixture
def server(producer: FakeProducer) -> Iterator[SideChannelServer]:
    with closing(SideChannelServer(producer, engine_id="p")) as server:
        yield server


@pytest.fixture
def client(server: SideChannelServer) -> Iterator[SideChannelClient]:
    with closing(SideChannelClient(server.address)) as client:
        yield client


@contextmanager
def raw_socket(kind: int, address: str, *, bind: bool = False) -> Iterator[zmq.Socket]:
    context = zmq.Context()
    raw = context.socket(kind)
    raw.setsockopt(zmq.RCVTIMEO, int(1000 * LONG))
    if bind:
        raw.bind(address)
    else:
        raw.connect(address)
    try:
        yield raw
    finally:
        context.destroy(linger=0)


def answer(frames: list[bytes]) -> AnyReply:
    return decode_reply(frames[-1])


# One call, one answer.


def test_every_message_has_its_answer(producer: FakeProducer, client: SideChannelClient) -> None:
    metadata = secrets.token_bytes(MAX_FRAME_BYTES // 2)
    greeting = msgspec.structs.replace(HELLO, metadata=metadata)
    assert client.hello(greeting, timeout_s=LONG).metadata == metadata
    producer.num_calls = 0
    assert client.landed(LANDED, timeout_s=LONG) == Released(ok=True)
    assert client.landed(LANDED, timeout_s=LONG) == Released(ok=False)
    assert client.abort(ABORT, timeout_s=LONG) == Aborted()
    beat = Heartbeat(engine_id="p", target_engine_id="d", request_ids=("a", "b"))
    assert client.heartbeat(beat, timeout_s=LONG).request_ids == ("a", "b")
    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(client.push, PUSH, timeout_s=LONG)
        producer.has_push.acquire()
        producer.pushes["r"].set_result(Pushed())
        assert pushed.result() == Pushed()


def test_many_threads_share_a_client_and_no_message_is_torn(
    producer: FakeProducer, client: SideChannelClient
) -> None:
    def call_often(thread: int) -> None:
        for number in range(1000):
            ids = (f"{thread}", f"{number}", "x" * (number % 200 + 1))
            beat = Heartbeat(engine_id="p", target_engine_id="d", request_ids=ids)
            assert client.heartbeat(beat, timeout_s=LONG).request_ids == ids

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call_often, range(8)))
    assert producer.num_calls == 8000


def test_many_threads_complete_answers_at_once(
    producer: FakeProducer, server: SideChannelServer
) -> None:
    """Answers are sent by one thread, whoever completes them: 800 come back whole."""
    count, ids = 800, {}
    with raw_socket(zmq.DEALER, server.address) as raw, ThreadPoolExecutor(8) as pool:
        for number in range(count):
            call = msgspec.structs.replace(PUSH, request_id=str(number))
            ids[number.to_bytes(16)] = number
            raw.send_multipart([number.to_bytes(16), encode(call)])
            producer.has_push.acquire()
        futures = [producer.pushes[str(number)] for number in range(count)]
        list(pool.map(lambda future: future.set_result(Pushed()), futures))
        answers = [raw.recv_multipart() for _ in range(count)]
    assert sorted(ids[call_id] for call_id, _ in answers) == list(range(count))
    assert {payload for _, payload in answers} == {encode(Pushed())}


def test_others_are_served_while_a_call_takes_long(
    producer: FakeProducer, server: SideChannelServer, client: SideChannelClient
) -> None:
    with ThreadPoolExecutor(3) as pool, closing(SideChannelClient(server.address)) as other:
        names = ("a", "b", "c")
        calls = [msgspec.structs.replace(PUSH, request_id=name) for name in names]
        open_calls = [pool.submit(client.push, call, timeout_s=LONG) for call in calls]
        for _ in names:
            producer.has_push.acquire()
        for caller in (other, client):
            assert caller.abort(ABORT, timeout_s=LONG) == Aborted()
        assert not any(call.done() for call in open_calls)
        for name in reversed(names):  # and they end in any order
            producer.pushes[name].set_result(Pushed())
        assert [call.result() for call in open_calls] == [Pushed()] * 3


# What is no call.

CALL_ID = bytes(range(16))
FOREIGN: dict[str, list[bytes]] = {
    "nothing": [b"xx"],
    "only an id": [CALL_ID],
    "only a payload": [encode(ABORT)],
    "torn": [CALL_ID, encode(ABORT)[:7], encode(ABORT)[7:]],
    "two calls in one": [CALL_ID, encode(ABORT)] * 2,
    "short id": [CALL_ID[:-1], encode(ABORT)],
    "long id": [CALL_ID + b"x", encode(ABORT)],
    "frames in another order": [encode(ABORT), CALL_ID],
    "empty payload": [CALL_ID, b""],
    "not msgpack": [CALL_ID, b"\xc1"],
    "half a payload": [CALL_ID, encode(ABORT)[:-1]],
    "a reply": [CALL_ID, encode(Aborted())],
    "unknown tag": [CALL_ID, msgspec.msgpack.encode({"type": "format", "engine_id": "p"})],
    "negative rank": [
        CALL_ID,
        msgspec.msgpack.encode({**msgspec.to_builtins(LANDED), "target_ranks": [-1]}),
    ],
    "another connector": [msgspec.msgpack.encode((b"get_meta_msg", 0, 0))],
    "another engine": [CALL_ID, encode(msgspec.structs.replace(ABORT, engine_id="q"))],
    "too long": [CALL_ID, bytes(MAX_FRAME_BYTES + 1)],
    "a hundred frames": [b"x"] * 100,
}


@pytest.mark.parametrize("frames", FOREIGN.values(), ids=FOREIGN.keys())
@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
def test_what_is_no_call_is_answered_and_the_listener_goes_on(
    producer: FakeProducer, server: SideChannelServer, kind: int, frames: list[bytes]
) -> None:
    with raw_socket(kind, server.address) as raw:
        raw.send_multipart(frames)
        reply = answer(raw.recv_multipart())
        assert isinstance(reply, Failed | OtherEngine)
        assert producer.num_calls == 0
        raw.send_multipart([CALL_ID, encode(ABORT)])
        assert raw.recv_multipart() == [CALL_ID, encode(Aborted())]


def test_a_damaged_payload_is_answered_to_its_call(server: SideChannelServer) -> None:
    with raw_socket(zmq.DEALER, server.address) as raw:
        raw.send_multipart([CALL_ID, b"\xc1"])
        assert raw.recv_multipart()[0] == CALL_ID


def test_what_is_far_too_long_costs_its_connection(
    server: SideChannelServer, client: SideChannelClient
) -> None:
    with raw_socket(zmq.DEALER, server.address) as raw:
        with raw.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            raw.send_multipart([CALL_ID, bytes(CUT_OFF_BYTES + 1)])
            assert monitor.poll(int(1000 * LONG))
            raw.disable_monitor()
    assert client.abort(ABORT, timeout_s=LONG) == Aborted()


def test_what_speaks_no_zeromq_is_left_alone(
    server: SideChannelServer, client: SideChannelClient
) -> None:
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00" * 1000):
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(greeting)
            assert client.abort(ABORT, timeout_s=LONG) == Aborted()


# Calls that come more than once.


def test_a_call_is_done_once_and_answered_every_time(
    producer: FakeProducer, server: SideChannelServer
) -> None:
    with raw_socket(zmq.DEALER, server.address) as raw:
        for _ in range(3):
            raw.send_multipart([CALL_ID, encode(LANDED)])
        with raw_socket(zmq.DEALER, server.address) as other:  # after the connection broke, say
            other.send_multipart([CALL_ID, encode(LANDED)])
            answers = [other.recv_multipart(), *(raw.recv_multipart() for _ in range(3))]
        assert answers == [[CALL_ID, encode(Released(ok=True))]] * 4
        assert producer.num_calls == 1
        raw.send_multipart([CALL_ID[::-1], encode(LANDED)])
        assert raw.recv_multipart() == [CALL_ID[::-1], encode(Released(ok=False))]


def test_an_open_call_is_not_done_again_and_answered_where_it_came_from_last(
    producer: FakeProducer, server: SideChannelServer, client: SideChannelClient
) -> None:
    with raw_socket(zmq.DEALER, server.address) as first:
        first.send_multipart([CALL_ID, encode(PUSH)])
        producer.has_push.acquire()
    with raw_socket(zmq.DEALER, server.address) as second:
        second.send_multipart([CALL_ID, encode(PUSH)])
        second.send_multipart([CALL_ID[::-1], encode(ABORT)])
        assert second.recv_multipart()[0] == CALL_ID[::-1]
        producer.pushes["r"].set_result(Pushed())
        assert second.recv_multipart() == [CALL_ID, encode(Pushed())]
        second.send_multipart([CALL_ID, encode(PUSH)])
        assert second.recv_multipart() == [CALL_ID, encode(Pushed())]
    assert producer.num_calls == 2


@pytest.mark.parametrize(("limit", "call"), [("_MAX_REMEMBERED", LANDED), ("_BYTES", HELLO)])
def test_what_is_remembered_is_bounded(
    producer: FakeProducer, monkeypatch: pytest.MonkeyPatch, limit: str, call: Any
) -> None:
    """Three answers are remembered, so the fourth makes the first forgotten."""
    if limit == "_MAX_REMEMBERED":
        monkeypatch.setattr(side_channel, "_MAX_REMEMBERED", 3)
    else:
        one = len(
            encode(Welcome(connector_version=1, compatibility=DIGEST, factors={}, metadata=b""))
        )
        monkeypatch.setattr(side_channel, "_MAX_REMEMBERED_BYTES", 3 * one)
    ids = [bytes([number]) * 16 for number in range(4)]
    with (
        closing(SideChannelServer(producer, engine_id="p")) as server,
        raw_socket(zmq.DEALER, server.address) as raw,
    ):

        def calls_made(call_id: bytes) -> int:
            before = producer.num_calls
            raw.send_multipart([call_id, encode(call)])
            raw.recv_multipart()
            return producer.num_calls - before

        assert [calls_made(id) for id in ids[:3]] == [1, 1, 1]
        assert [calls_made(id) for id in ids[:3]] == [0, 0, 0]
        assert [calls_made(id) for id in (ids[3], ids[1], ids[0])] == [1, 0, 1]


def test_open_calls_are_bounded(
    producer: FakeProducer, client: SideChannelClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "_MAX_OPEN_CALLS", 2)
    calls = [msgspec.structs.replace(PUSH, request_id=name) for name in "ab"]
    with ThreadPoolExecutor(2) as pool:
        pushes = [pool.submit(client.push, call, timeout_s=LONG) for call in calls]
        for _ in calls:
            producer.has_push.acquire()
        with pytest.raises(PeerRefusedError, match="too many calls are open.*limit=2"):
            client.abort(ABORT, timeout_s=LONG)
        for future in producer.pushes.values():
            future.set_result(Pushed())
        assert [push.result() for push in pushes] == [Pushed()] * 2
    assert client.abort(ABORT, timeout_s=LONG) == Aborted()


# A peer that answers strangely: `serve` gets the frames of each call and returns what to send.


@contextmanager
def strange_peer(serve: Callable[[list[bytes]], list[list[bytes]]]) -> Iterator[str]:
    is_over = threading.Event()
    with raw_socket(zmq.ROUTER, "tcp://127.0.0.1:*", bind=True) as router:

        def run() -> None:
            while not is_over.is_set():
                if router.poll(20):
                    identity, *frames = router.recv_multipart()
                    for reply in serve(frames):
                        router.send_multipart([identity, *reply])

        thread = threading.Thread(target=run)
        address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        thread.start()
        try:
            yield address
        finally:
            is_over.set()
            thread.join()


def test_late_repeated_and_reordered_answers_are_nobody_elses() -> None:
    """Each call is answered by all answers so far, oldest first, among foreign ones."""
    sent: list[list[bytes]] = []

    def serve(frames: list[bytes]) -> list[list[bytes]]:
        call_id, payload = frames
        ids = tuple(msgspec.msgpack.decode(payload)["request_ids"])
        junk = [[b""], [call_id], [call_id, b"", b""], [b"", payload], [call_id[::-1], payload]]
        sent.append([call_id, encode(HeartbeatReply(request_ids=ids))])
        return [*junk, *sent, *sent]

    with strange_peer(serve) as address, closing(SideChannelClient(address)) as client:
        for number in range(20):
            beat = Heartbeat(engine_id="p", target_engine_id="d", request_ids=(str(number),))
            assert client.heartbeat(beat, timeout_s=LONG).request_ids == (str(number),)


def test_a_call_is_repeated_as_the_same_call_until_it_is_answered() -> None:
    calls: list[list[bytes]] = []

    def serve(frames: list[bytes]) -> list[list[bytes]]:
        calls.append(frames)
        return [[frames[0], encode(Aborted())]] if len(calls) == 4 else []

    with strange_peer(serve) as address:
        with closing(SideChannelClient(address, repeat_s=0.01)) as client:
            assert client.abort(ABORT, timeout_s=LONG) == Aborted()
    assert len(calls) >= 4
    assert all(call == calls[0] for call in calls)


def test_a_push_is_sent_once() -> None:
    calls: list[list[bytes]] = []

    def serve(frames: list[bytes]) -> list[list[bytes]]:
        calls.append(frames)
        return []

    with strange_peer(serve) as address:
        with closing(SideChannelClient(address, repeat_s=0.01)) as client:
            with pytest.raises(PeerSilentError, match="call='Push', timeout_s=0.3"):
                client.push(PUSH, timeout_s=0.3)
            with pytest.raises(PeerSilentError, match="call='Abort'"):
                client.abort(ABORT, timeout_s=0.3)
    assert [encode(PUSH)] == [payload for _, payload in calls if payload == encode(PUSH)]
    assert len(calls) > 2, "the abort was repeated"


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        (encode(Released(ok=True)), "fits to its call .*call='Abort', answer='Released'"),
        (encode(ABORT), "one message of the side channel"),
        (b"", "one message of the side channel"),
        (bytes(MAX_FRAME_BYTES + 1), "not longer than the limit"),
    ],
)
def test_a_nonsensical_answer_is_an_error(payload: bytes, rule: str) -> None:
    with strange_peer(lambda frames: [[frames[0], payload]]) as address:
        with closing(SideChannelClient(address)) as client:
            with pytest.raises(MessageError, match=rule):
                client.abort(ABORT, timeout_s=LONG)


def test_a_call_that_is_too_long_is_not_sent(client: SideChannelClient) -> None:
    with pytest.raises(MessageError, match="not longer than the limit"):
        greeting = msgspec.structs.replace(HELLO, metadata=bytes(MAX_FRAME_BYTES))
        client.hello(greeting, timeout_s=LONG)
    assert client.abort(ABORT, timeout_s=LONG) == Aborted()


# Handlers that fail.


def raising(error: BaseException) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


def later(error: BaseException) -> Callable[[], Any]:
    def answer() -> Any:
        future: Future[Aborted] = Future()
        threading.Timer(0.01, future.set_exception, [error]).start()
        return future

    return answer


@pytest.mark.parametrize("how", [raising, later])
def test_an_error_of_ours_is_told_with_its_values(
    producer: FakeProducer, client: SideChannelClient, how: Any
) -> None:
    producer.abort_answer = how(TransferError("a rule of ours", pages=3))
    with pytest.raises(PeerRefusedError, match="a rule of ours .pages=3, peer='tcp:"):
        client.abort(ABORT, timeout_s=LONG)


def cancelled() -> Future[Aborted]:
    future: Future[Aborted] = Future()
    future.cancel()
    return future


FAILURES: dict[str, Callable[[], Any]] = {
    "raises": raising(RuntimeError("secret")),
    "raises later": later(RuntimeError("secret")),
    "cancelled": cancelled,
    "wrong type": lambda: Released(ok=True),
    "no message": lambda: "secret",
    "nothing": lambda: None,
    "a class": lambda: Reply,
    "wrong field": lambda: Failed(rule=object()),  # type: ignore[arg-type]
    "no text": lambda: Failed(rule="\ud800"),
}


@pytest.mark.parametrize("answer", FAILURES.values(), ids=FAILURES.keys())
def test_a_bug_of_ours_is_logged_and_told_without_details(
    producer: FakeProducer,
    client: SideChannelClient,
    answer: Callable[[], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    producer.abort_answer = answer
    with pytest.raises(PeerRefusedError, match="its log has the reason") as caught:
        client.abort(ABORT, timeout_s=LONG)
    assert "secret" not in str(caught.value)
    assert caplog.records[-1].exc_info is not None
    producer.abort_answer = Aborted
    assert client.abort(ABORT, timeout_s=LONG) == Aborted()


def test_an_answer_that_is_too_long_is_an_error(
    producer: FakeProducer, client: SideChannelClient
) -> None:
    ids = tuple(f"{number:0256}" for number in range(MAX_FRAME_BYTES // 256))
    producer.abort_answer = lambda: Failed(rule="".join(ids))
    with pytest.raises(PeerError, match="not longer than the limit"):
        client.abort(ABORT, timeout_s=LONG)


# Listeners and clients that come and go.


def test_a_restarted_engine_is_another_one() -> None:
    """The client learns both names, and nothing of the old engine's requests is done by the new."""
    old = SideChannelServer(FakeProducer(), engine_id="p")
    with closing(SideChannelClient(old.address, repeat_s=0.05)) as client:
        assert client.landed(LANDED, timeout_s=LONG) == Released(ok=True)
        old.close()
        newcomer = FakeProducer()
        with closing(SideChannelServer(newcomer, engine_id="q", port=old.port)):
            for call, method in ((LANDED, client.landed), (HELLO, client.hello)):
                with pytest.raises(PeerGoneError, match="expected='p', found='q', peer="):
                    method(call, timeout_s=LONG)
            assert newcomer.num_calls == 0
            again = msgspec.structs.replace(LANDED, engine_id="q")
            assert client.landed(again, timeout_s=LONG) == Released(ok=True)


def test_a_client_waits_for_a_listener_that_comes_late(producer: FakeProducer) -> None:
    with closing(SideChannelServer(producer, engine_id="p")) as early:
        port = early.port
    address = channel_address("127.0.0.1", port)
    with ThreadPoolExecutor(1) as pool, closing(SideChannelClient(address)) as client:
        aborted = pool.submit(client.abort, ABORT, timeout_s=LONG)
        time.sleep(0.05)
        with closing(SideChannelServer(producer, engine_id="p", port=port)):
            assert aborted.result() == Aborted()


def test_nobody_answers(producer: FakeProducer) -> None:
    with closing(SideChannelServer(producer, engine_id="p")) as server:
        address = server.address
    with closing(SideChannelClient(address)) as client:
        for timeout_s in (0.0, 0.05):
            with pytest.raises(PeerSilentError, match=f"peer='{address}'.*={timeout_s}"):
                client.landed(LANDED, timeout_s=timeout_s)


def test_what_was_not_sent_in_time_is_never_sent(producer: FakeProducer) -> None:
    """A push that nobody waits for any more must not write into pages of somebody else."""
    with closing(SideChannelServer(producer, engine_id="p")) as early:
        port = early.port
    with closing(SideChannelClient(early.address)) as client:
        with pytest.raises(PeerSilentError):
            client.push(PUSH, timeout_s=0.05)
        with closing(SideChannelServer(producer, engine_id="p", port=port)):
            assert client.abort(ABORT, timeout_s=LONG) == Aborted()
    assert [producer.num_calls, producer.pushes] == [1, {}]


def test_closing_the_listener_sends_what_is_finished_and_nothing_else(
    producer: FakeProducer, server: SideChannelServer, client: SideChannelClient
) -> None:
    """A write that is still open may go on, so nobody is told that it has ended."""
    with ThreadPoolExecutor(2) as pool:
        calls = [msgspec.structs.replace(PUSH, request_id=name) for name in "ab"]
        finished = pool.submit(client.push, calls[0], timeout_s=LONG)
        unfinished = pool.submit(client.push, calls[1], timeout_s=1.0)
        for _ in calls:
            producer.has_push.acquire()
        producer.pushes["a"].set_result(Pushed())
        server.close()
        assert finished.result() == Pushed()
        producer.pushes["b"].set_result(Pushed())  # too late, and no error here
        with pytest.raises(PeerSilentError):
            unfinished.result()
    server.close()


def test_a_client_closes_while_nobody_listens() -> None:
    """What it has not sent yet does not hold it up."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        client = SideChannelClient(channel_address("127.0.0.1", port))
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(
                client.heartbeat,
                Heartbeat(engine_id="a", target_engine_id="d", request_ids=()),
                timeout_s=60,
            )
            time.sleep(0.2)
            closing_thread = threading.Thread(target=client.close, daemon=True)
            closing_thread.start()
            with pytest.raises(PeerError, match="while it is open"):
                call.result(20)
        closing_thread.join(20)
        assert not closing_thread.is_alive()


def test_closing_a_client_ends_its_calls(producer: FakeProducer, server: SideChannelServer) -> None:
    client = SideChannelClient(server.address)
    with ThreadPoolExecutor(3) as pool:
        pushes = [pool.submit(client.push, PUSH, timeout_s=LONG) for _ in range(3)]
        for _ in pushes:
            producer.has_push.acquire()
        client.close()
        for push in pushes:
            with pytest.raises(PeerError, match="while it is open"):
                push.result()
    client.close()
    with pytest.raises(PeerError, match="while it is open"):
        client.abort(ABORT, timeout_s=LONG)


@pytest.mark.parametrize("host", ["", "no host", "[", "1.2.3.4:5"])
def test_what_is_no_address_is_an_error(host: str) -> None:
    """It comes from a request's JSON."""
    with closing(SideChannelClient(f"tcp://{host}:x")) as client:
        with pytest.raises(PeerError, match="a peer has an address .peer='tcp:"):
            client.abort(ABORT, timeout_s=LONG)


def test_an_address_is_listened_at_once(server: SideChannelServer) -> None:
    for host, port in (("127.0.0.1", server.port), ("no such host", 0)):
        with pytest.raises(ConfigError, match=f"can listen.*host='{host}', port={port}"):
            SideChannelServer(FakeProducer(), engine_id="q", host=host, port=port)


def test_addresses() -> None:
    assert channel_address("10.0.0.1", 5600) == "tcp://10.0.0.1:5600"
    assert channel_address("::1", 5600) == "tcp://[::1]:5600"
    if socket.has_ipv6:
        with closing(SideChannelServer(FakeProducer(), engine_id="p", host="::1")) as server:
            assert server.address == channel_address("::1", server.port)
            with closing(SideChannelClient(server.address)) as client:
                assert client.abort(ABORT, timeout_s=LONG) == Aborted()
