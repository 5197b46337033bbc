"""A relay passes everything on, and keeps its near side open when the far one is gone."""

import socket
from collections.abc import Iterator

import pytest

from dcpjax.engine.relay import Relay
from tests.engine.processes import PATIENCE, free_port


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        yield listener


@pytest.fixture
def relay(listener: socket.socket) -> Iterator[Relay]:
    relay = Relay(*listener.getsockname())
    yield relay
    relay.close()


def connect(relay: Relay) -> socket.socket:
    host, port = relay.address.split(":")
    return socket.create_connection((host, int(port)), PATIENCE)


def receive(end: socket.socket, size: int) -> bytes:
    """So many bytes, or with -1 all until the end."""
    end.settimeout(PATIENCE)
    with end.makefile("rb") as stream:
        return stream.read(size)


def is_open(end: socket.socket) -> bool:
    """Whether nothing is said for a moment, not even that it is over."""
    end.settimeout(0.2)
    try:
        return bool(end.recv(1))
    except TimeoutError:
        return True


@pytest.mark.parametrize("size", [1, 1 << 16, (1 << 20) + 1])
def test_both_sides_hear_each_other(listener: socket.socket, relay: Relay, size: int):
    with connect(relay) as near, listener.accept()[0] as far:
        sent = bytes(range(251)) * (size // 251 + 1)
        near.sendall(sent[:size])
        assert receive(far, size) == sent[:size]
        far.sendall(b"answer")
        assert receive(near, 6) == b"answer"


def test_the_near_side_stays_open_when_the_far_one_is_gone(listener: socket.socket, relay: Relay):
    with connect(relay) as near:
        far, _ = listener.accept()
        far.sendall(b"last")
        far.close()
        listener.close()
        assert receive(near, 4) == b"last"
        assert is_open(near)
        near.sendall(b"to nobody")
        with connect(relay) as again:  # another connection tells no more than the first one
            assert is_open(again)
        assert is_open(near)


def test_the_far_side_hears_that_the_near_one_is_gone(listener: socket.socket, relay: Relay):
    near = connect(relay)
    with listener.accept()[0] as far:
        near.sendall(b"last")
        near.close()
        assert receive(far, -1) == b"last"


def test_what_cannot_be_reached_yet_is_to_be_tried_again():
    port = free_port()
    relay = Relay("127.0.0.1", port)
    with connect(relay) as near:
        assert not is_open(near)
    with socket.create_server(("127.0.0.1", port)) as listener, connect(relay) as near:
        with listener.accept()[0] as far:
            far.sendall(b"here")
            assert receive(near, 4) == b"here"
    relay.close()


def test_a_closed_relay_keeps_what_it_has(listener: socket.socket, relay: Relay):
    with connect(relay) as near, listener.accept()[0] as far:
        relay.close()
        with pytest.raises(OSError):
            connect(relay)
        far.sendall(b"still")
        assert receive(near, 5) == b"still"
