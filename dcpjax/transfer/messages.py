"""What two engines say to each other about their transfers, as bytes. Pure functions, no sockets.

| consumer to producer                       | answer                                             |
|--------------------------------------------|----------------------------------------------------|
| Hello: who I am                            | Welcome: who I am                                  |
| Push: write a request's KV into my pages   | Pushed: all of it is written, nothing moves        |
| Landed: these of my ranks have their share | Released: whether the pages were held until now    |
| Claim: I take a request as it was offered  | Claimed: it is held, and was offered like that     |
| Heartbeat: I still want these requests     | HeartbeatReply: those of them that are held        |
| Abort: I do not want this request any more | Aborted: nothing is written into my pages any more |
| any of them                                | Failed: not done, for this reason                  |
| any of them                                | OtherEngine: not done, I am not who is meant       |

A frame is one message as msgpack. Lengths, counts and ids are bounded while a frame is decoded, so
what arrives here is small and well formed, whoever sent it; whether it makes sense for a request is
decided where the request is known.
"""

import reprlib
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from dcpjax.errors import DcpjaxError, PeerError, TransferError

MAX_FRAME_BYTES = 4 * 2**20
MAX_IDS = 4096
MAX_RANKS = 4096
MAX_PAGES = 2**31 - 1
"""Page ids are int32, here and in the transfer libraries."""

Message = TypeVar("Message")

_PAGE_ID = np.dtype("<i4")
_MAX_VALUES = 16
_SEEN_FROM_HERE = {"ours": "theirs", "theirs": "ours"}  # what the other side calls its own
_MAX_TEXT = 500
_words = reprlib.Repr()  # shows the beginning of what is long
_words.maxother = _MAX_TEXT

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Version = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
NumTokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
NumRanks = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
Ranks = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)], ...], msgspec.Meta(max_length=MAX_RANKS)
]
Factors = Annotated[
    dict[
        Annotated[str, msgspec.Meta(max_length=64)],
        int | Annotated[str, msgspec.Meta(max_length=256)],
    ],
    msgspec.Meta(max_length=32),
]
"""What two engines must have in common, by name."""
Ids = Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_IDS)]
Text = Annotated[str, msgspec.Meta(max_length=_MAX_TEXT)]


class MessageError(PeerError):
    """A frame that is no message of this protocol."""


class PeerRefusedError(PeerError):
    """The peer has answered that it did not do what it was asked for; nothing of it goes on."""


class Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=str.lower):
    """What a consumer sends. ``engine_id`` is the producer that is meant: after a restart another
    engine may answer at the same address, and know a request of the same id."""

    engine_id: Id


class Reply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=str.lower):
    """What a producer answers."""


class Hello(Call, frozen=True):
    """``metadata`` is the consumer's EngineInfo, to be decoded once the first two fields agree.

    ``compatibility`` is a hash of ``factors``, which tell what it is that does not agree.
    """

    connector_version: Version
    compatibility: Digest
    factors: Factors
    metadata: bytes


class Welcome(Reply, frozen=True):
    """The producer's side of the same."""

    connector_version: Version
    compatibility: Digest
    factors: Factors
    metadata: bytes


class Claim(Call, frozen=True):
    """Before anything moves: what the consumer was told of a request is what the producer offered.

    It was told through a client, which may be wrong, or lie. ``page_ids`` are those of the
    producer, packed by :func:`pack_page_ids`.
    """

    request_id: Id
    prompt_digest: Text
    page_ids: bytes


class Claimed(Reply, frozen=True):
    """The pages are held, and hold the KV of this prompt."""


class Push(Call, frozen=True):
    """Write the tokens ``[first_token, num_tokens)`` of a request into the pages of a target.

    ``target_engine_id`` has said Hello. ``page_ids`` are its pages of the sequence, packed by
    :func:`pack_page_ids`.
    """

    request_id: Id
    target_engine_id: Id
    first_token: NumTokens
    num_tokens: NumTokens
    page_ids: bytes

    def __post_init__(self) -> None:
        if self.first_token > self.num_tokens:
            raise ValueError("first_token is at most num_tokens")


class Pushed(Reply, frozen=True):
    """Everything asked for has been written."""


class Landed(Call, frozen=True):
    """The data of these target ranks is complete; they will not read from the pages again."""

    request_id: Id
    target_ranks: Ranks
    num_target_ranks: NumRanks


class Released(Reply, frozen=True):
    """``ok`` False: the pages were not held any more, so what was read from them is worthless."""

    ok: bool


class Heartbeat(Call, frozen=True):
    """Extends the leases of these requests."""

    request_ids: Ids


class HeartbeatReply(Reply, frozen=True):
    """Those of the requests that are held."""

    request_ids: Ids


class Abort(Call, frozen=True):
    """The consumer gives the request up and waits for the answer before it reuses its pages."""

    request_id: Id


class Aborted(Reply, frozen=True):
    """Nothing writes into the consumer's pages of this request, now or later."""


class Failed(Reply, frozen=True):
    """The rule that was broken, and the values that broke it, as in :class:`DcpjaxError`.

    Nothing of what was asked for goes on. Where that is not sure, there is no answer at all.
    """

    rule: Text
    values: Annotated[
        dict[Text, bool | int | float | Text | None], msgspec.Meta(max_length=_MAX_VALUES)
    ] = msgspec.field(default_factory=dict[str, bool | int | float | str | None])


class OtherEngine(Reply, frozen=True):
    """``engine_id`` has taken the place of the engine that was meant."""

    engine_id: Id


AnyCall = Hello | Claim | Push | Landed | Heartbeat | Abort
AnyReply = Welcome | Claimed | Pushed | Released | HeartbeatReply | Aborted | Failed | OtherEngine

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
        name[:_MAX_TEXT]: _shown(value) for name, value in list(error.values.items())[:_MAX_VALUES]
    }
    return Failed(rule=error.rule[:_MAX_TEXT], values=values)


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
            "a frame is one message of the side channel", reason=str(error)[:_MAX_TEXT]
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
            return value[:_MAX_TEXT]
        case _:
            return _words.repr(value)[:_MAX_TEXT]
