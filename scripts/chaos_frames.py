"""What may arrive at a side channel that no engine of this pair has sent."""

import contextlib
import random
import socket
import time
from collections.abc import Callable

import zmq

from dcpjax.transfer.frames import decode_reply, encode, pack_page_ids
from dcpjax.transfer.messages import Abort, Heartbeat, Hello, Landed, OtherEngine, Push
from dcpjax.transfer.side_channel import CALL_ID_BYTES, channel_address

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
"""With which a ZeroMQ connection begins."""
_SECONDS = 1.0

Send = Callable[[random.Random, str, int], None]


def send_nonsense(choose: random.Random, host: str, port: int) -> str:
    """One message of a random kind; its name. Whether anybody listens does not matter."""
    name, send = choose.choice(list(KINDS.items()))
    with contextlib.suppress(OSError):
        send(choose, host, port)
    return name


def _no_protocol(choose: random.Random, host: str, port: int) -> None:
    with socket.create_connection((host, port), _SECONDS) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + choose.randbytes(200))


def _torn(choose: random.Random, host: str, port: int) -> None:
    """A connection that ends in the middle of its greeting or of a frame."""
    frame = b"\x02" + (2**62).to_bytes(8, "big") + choose.randbytes(100)
    sent = (_GREETING + frame)[: choose.randrange(1, len(_GREETING) + len(frame))]
    with socket.create_connection((host, port), _SECONDS) as connection:
        connection.sendall(sent)
        time.sleep(choose.uniform(0, 0.1))


def _random_frames(choose: random.Random, host: str, port: int) -> None:
    frames = [choose.randbytes(choose.choice([0, 1, 15, 16, 17, 5000])) for _ in range(3)]
    _send(host, port, frames[: choose.randrange(1, 4)])


def _cut_message(choose: random.Random, host: str, port: int) -> None:
    payload = _whole(choose, "somebody")
    _send(host, port, [choose.randbytes(CALL_ID_BYTES), payload[: choose.randrange(len(payload))]])


def _foreign_message(choose: random.Random, host: str, port: int) -> None:
    """Well formed, several times over, meant for another engine; then the same for this one, about
    requests and from engines that it does not know."""
    answer = _send(host, port, [choose.randbytes(CALL_ID_BYTES), _whole(choose, "somebody")])
    if answer and isinstance(reply := decode_reply(answer[-1]), OtherEngine):
        frames = [choose.randbytes(CALL_ID_BYTES), _whole(choose, reply.engine_id)]
        _send(host, port, frames, times=3)


def _whole(choose: random.Random, engine_id: str) -> bytes:
    return encode(_message(choose, engine_id))


def _message(choose: random.Random, engine_id: str) -> Hello | Push | Landed | Heartbeat | Abort:
    request_id = f"{choose.getrandbits(64):x}"
    digest = f"{choose.getrandbits(256):064x}"
    return choose.choice(
        [
            Hello(
                engine_id=engine_id,
                connector_version=choose.randrange(3),
                compatibility=digest,
                factors={"model": request_id},
                metadata=choose.randbytes(100),
            ),
            Push(
                engine_id=engine_id,
                request_id=request_id,
                target_engine_id="nobody",
                first_token=0,
                num_tokens=choose.randrange(2**31),
                page_ids=pack_page_ids([choose.randrange(2**31 - 1) for _ in range(9)]),
            ),
            Landed(
                engine_id=engine_id, request_id=request_id, target_ranks=(0,), num_target_ranks=1
            ),
            Heartbeat(
                engine_id=engine_id,
                target_engine_id="nobody",
                request_ids=(request_id,) * choose.randrange(1, 4),
            ),
            Abort(engine_id=engine_id, request_id=request_id, target_engine_id="nobody"),
        ]
    )


def _send(host: str, port: int, frames: list[bytes], *, times: int = 1) -> list[bytes]:
    """Returns the frames of the first answer, or none."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(channel_address(host, port))
        for _ in range(times):
            dealer.send_multipart(frames)
        return dealer.recv_multipart() if dealer.poll(round(1000 * _SECONDS)) else []


KINDS: dict[str, Send] = {
    "no protocol": _no_protocol,
    "torn": _torn,
    "random frames": _random_frames,
    "cut message": _cut_message,
    "foreign message": _foreign_message,
}
