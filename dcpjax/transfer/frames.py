"""Messages as bytes, page ids as they travel in them, and errors as answers. Pure functions.

A frame is one message as msgpack. Lengths, counts and ids are bounded while a frame is decoded, so
what arrives here is small and well formed, whoever sent it; whether it makes sense for a request is
decided where the request is known.
"""

import reprlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from dcpjax.errors import DcpjaxError, PeerError, TransferError
from dcpjax.transfer.messages import (
    MAX_FRAME_BYTES,
    MAX_PAGES,
    MAX_TEXT,
    MAX_VALUES,
    AnyCall,
    AnyReply,
    Call,
    Failed,
    Reply,
)

Message = TypeVar("Message")

_PAGE_ID = np.dtype("<i4")
_SEEN_FROM_HERE = {"ours": "theirs", "theirs": "ours"}  # what the other side calls its own
_words = reprlib.Repr()  # shows the beginning of what is long
_words.maxother = MAX_TEXT


class MessageError(PeerError):
    """A frame that is no message of this protocol."""


class PeerRefusedError(PeerError):
    """The peer has answered that it did not do what it was asked for; nothing of it goes on."""


_encoder = msgspec.msgpack.Encoder()
_call_decoder: msgspec.msgpack.Decoder[AnyCall] = msgspec.msgpack.Decoder(AnyCall)
_reply_decoder: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


def encode(message: Call | Reply) -> bytes:
    """A frame.

    Raises:
        MessageError: it would be longer than MAX_FRAME_BYTES.
    """
    frame = _encoder.encode(message)
    _check_size(frame)
    return frame


def decode_call(frame: bytes) -> AnyCall:
    """The message of a consumer.

    Raises:
        MessageError: there is none in the frame.
    """
    return _decode(_call_decoder, frame)


def decode_reply(frame: bytes) -> AnyReply:
    """The answer of a producer.

    Raises:
        MessageError: there is none in the frame.
    """
    return _decode(_reply_decoder, frame)


def pack_page_ids(page_ids: Sequence[int] | np.ndarray) -> bytes:
    """Page ids as they travel: 4 bytes each.

    Raises:
        TransferError: one of them is no page id.
    """
    ids = np.asarray(page_ids, np.int64)
    _check_page_ids(ids, MAX_PAGES)
    return ids.astype(_PAGE_ID).tobytes()


def unpack_page_ids(packed: bytes, *, num_pages: int) -> np.ndarray:
    """Page ids as int32, all in ``[0, num_pages)``.

    Raises:
        TransferError: the bytes are no page ids, or one is out of range.
    """
    if len(packed) % _PAGE_ID.itemsize:
        raise TransferError("page ids have 4 bytes each", num_bytes=len(packed))
    ids = np.frombuffer(packed, _PAGE_ID).astype(np.int32, copy=False)
    _check_page_ids(ids, num_pages)
    return ids


def failed(error: DcpjaxError) -> Failed:
    """The answer that tells the other side of an error."""
    values = {
        name[:MAX_TEXT]: _shown(value) for name, value in list(error.values.items())[:MAX_VALUES]
    }
    return Failed(rule=error.rule[:MAX_TEXT], values=values)


def to_error(reply: Failed, *, peer: str) -> PeerRefusedError:
    """The error that a caller gets for such an answer of the engine at ``peer``."""
    values = {_SEEN_FROM_HERE.get(name, name): value for name, value in reply.values.items()}
    values["peer"] = peer
    for name in ("self", "rule"):  # the error's own parameters; the names are the peer's choice
        values.pop(name, None)
    return PeerRefusedError(reply.rule, **values)


def _decode(decoder: msgspec.msgpack.Decoder[Message], frame: bytes) -> Message:
    _check_size(frame)
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(
            "a frame is one message of the side channel", reason=str(error)[:MAX_TEXT]
        ) from error


def _check_size(frame: bytes) -> None:
    if len(frame) > MAX_FRAME_BYTES:
        raise MessageError(
            "a frame is not longer than the limit", num_bytes=len(frame), limit=MAX_FRAME_BYTES
        )


def _check_page_ids(ids: np.ndarray, num_pages: int) -> None:
    wrong = ids[(ids < 0) | (ids >= num_pages)]
    if wrong.size:
        raise TransferError(
            "page ids are in [0, num_pages)", page_id=int(wrong[0]), num_pages=num_pages
        )


def _shown(value: object) -> bool | int | float | str | None:
    """A value as it may travel: numbers that fit and short texts as they are, else in words."""
    match value:
        case None | bool():
            return value
        case int() if -(2**63) <= value < 2**63:
            return int(value)
        case float():
            return float(value)
        case str():
            return value[:MAX_TEXT]
        case _:
            return _words.repr(value)[:MAX_TEXT]
