"""Frames: every message comes back as it was, and nothing else comes through."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import ContextLengthError, LayoutError, TransferError
from dcpjax.transfer import messages
from dcpjax.transfer.frames import (
    MessageError,
    PeerRefusedError,
    decode_call,
    decode_reply,
    encode,
    failed,
    pack_page_ids,
    to_error,
    unpack_page_ids,
)
from dcpjax.transfer.messages import (
    MAX_FRAME_BYTES,
    MAX_IDS,
    MAX_PAGES,
    MAX_RANKS,
    Abort,
    Aborted,
    Claim,
    Claimed,
    Computed,
    Failed,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Landed,
    OtherEngine,
    Push,
    Pushed,
    Released,
    Wait,
    Welcome,
)

DIGEST = "0123456789abcdef" * 4
CALLS = [
    Hello(
        engine_id="p", connector_version=1, compatibility=DIGEST, factors={}, metadata=b"\x00\xff"
    ),
    Push(
        engine_id="p",
        request_id="r",
        target_engine_id="d",
        first_token=16,
        num_tokens=33,
        page_ids=pack_page_ids([2, 0]),
    ),
    Landed(engine_id="p", request_id="r", target_ranks=(0, 2), num_target_ranks=3),
    Landed(engine_id="p", request_id="r", target_ranks=(), num_target_ranks=MAX_RANKS),
    Claim(
        engine_id="p",
        target_engine_id="d",
        request_id="r",
        prompt_digest="0f",
        page_ids=pack_page_ids([1, 2]),
    ),
    Heartbeat(engine_id="p", target_engine_id="d", request_ids=("r", "ü" * 256)),
    Heartbeat(engine_id="p", target_engine_id="d", request_ids=()),
    Wait(engine_id="p", request_id="r", num_tokens=0),
    Abort(engine_id="p", target_engine_id="d", request_id="r"),
]
REPLIES = [
    Computed(num_tokens=2**31 - 1),
    Welcome(connector_version=2**31 - 1, compatibility=DIGEST, factors={}, metadata=b""),
    Pushed(),
    Released(ok=True),
    Released(ok=False),
    Claimed(),
    HeartbeatReply(request_ids=("r",)),
    Aborted(),
    OtherEngine(engine_id="q"),
    Failed(rule="a rule"),
    Failed(rule="a rule", values={"a": 1, "b": "x", "c": 0.5, "d": True, "e": None}),
]


def shown(message: msgspec.Struct) -> str:
    return type(message).__name__


@pytest.mark.parametrize("call", CALLS, ids=shown)
def test_a_call_comes_back_as_it_was(call: Any) -> None:
    assert decode_call(encode(call)) == call
    with pytest.raises(MessageError):
        decode_reply(encode(call))


@pytest.mark.parametrize("reply", REPLIES, ids=shown)
def test_a_reply_comes_back_as_it_was(reply: Any) -> None:
    assert decode_reply(encode(reply)) == reply
    with pytest.raises(MessageError):
        decode_call(encode(reply))


PLAIN: dict[str, dict[str, Any]] = {
    type(message).__name__: msgspec.msgpack.decode(encode(message)) for message in CALLS + REPLIES
}
WRONG = [
    ("Hello", "connector_version", [-1, 2**31, "1", True, None]),
    ("Hello", "compatibility", ["", DIGEST[1:], DIGEST + "0", DIGEST.upper(), DIGEST + "\n", 5]),
    ("Hello", "metadata", ["text", None]),
    ("Hello", "engine_id", ["", "x" * 257, 3, None]),
    ("Push", "first_token", [-1, 34, 2**31, 1.0]),
    ("Push", "num_tokens", [-1, 15, 2**31, 2**63]),
    ("Push", "page_ids", ["ids", [1, 2]]),
    ("Push", "target_engine_id", ["", "x" * 257]),
    ("Landed", "request_id", ["", "x" * 257, b"r"]),
    ("Landed", "target_ranks", [[-1], [MAX_RANKS], [2**64 - 1], [0] * (MAX_RANKS + 1), "0", [0.0]]),
    ("Landed", "num_target_ranks", [-1, 0, MAX_RANKS + 1, 2**63]),
    ("Heartbeat", "request_ids", [["r"] * (MAX_IDS + 1), [""], [1], "r"]),
    ("Abort", "request_id", ["", None, ["r"]]),
    ("Abort", "type", ["", "aborted", "unknown", 7, None]),
    ("Abort", "surprise", [1]),
    ("Released", "ok", [1, "true", None]),
    ("Failed", "rule", ["x" * 501, 5]),
    ("Failed", "values", [{"a": []}, {1: 1}, {str(i): i for i in range(17)}, {"x" * 501: 1}]),
]


@pytest.mark.parametrize(("name", "field", "values"), WRONG)
def test_what_is_out_of_bounds_is_refused(name: str, field: str, values: list[Any]) -> None:
    decode = decode_call if name in {shown(call) for call in CALLS} else decode_reply
    decode(msgspec.msgpack.encode(PLAIN[name]))
    for value in values:
        with pytest.raises(MessageError, match="one message") as caught:
            decode(msgspec.msgpack.encode(PLAIN[name] | {field: value}))
        assert len(str(caught.value)) < 700


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_no_field_may_be_missing(name: str) -> None:
    decode = decode_call if name in {shown(call) for call in CALLS} else decode_reply
    for field in PLAIN[name].keys() - {"values"}:
        rest = {key: value for key, value in PLAIN[name].items() if key != field}
        with pytest.raises(MessageError):
            decode(msgspec.msgpack.encode(rest))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(frame: bytes) -> None:
    for decode in (decode_call, decode_reply):
        try:
            decode(frame)
        except MessageError:
            continue


@given(st.sampled_from(CALLS), st.data())
def test_a_damaged_frame_is_a_message_or_an_error(call: Any, data: st.DataObject) -> None:
    frame = bytearray(encode(call))
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut]), bytes(frame) + bytes(frame[:cut])):
        try:
            decode_call(damaged)
        except MessageError:
            continue


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x81\xa4type", b"\x81\xa4type\xa2\xff\xff"])
def test_frames_that_are_no_msgpack(frame: bytes) -> None:
    with pytest.raises(MessageError):
        decode_call(frame)


def test_deep_nesting_is_an_error() -> None:
    for frame in (b"\x91" * 100_000, b"\x82\xa1x" + b"\x91" * 100_000):
        with pytest.raises(MessageError):
            decode_call(frame)


def test_no_frame_is_longer_than_the_limit() -> None:
    def hello(num_bytes: int) -> Hello:
        return Hello(
            engine_id="p",
            connector_version=1,
            compatibility=DIGEST,
            factors={},
            metadata=bytes(num_bytes),
        )

    rest = len(encode(hello(2**16))) - 2**16  # from here on a length takes as many bytes
    longest = hello(MAX_FRAME_BYTES - rest)
    assert decode_call(encode(longest)) == longest
    too_long = hello(MAX_FRAME_BYTES - rest + 1)
    with pytest.raises(MessageError, match=f"num_bytes={MAX_FRAME_BYTES + 1}, limit="):
        encode(too_long)
    with pytest.raises(MessageError, match=f"num_bytes={MAX_FRAME_BYTES + 1}, limit="):
        decode_call(msgspec.msgpack.encode(too_long))


def test_the_pages_of_the_longest_contexts_fit() -> None:
    """1M tokens in pages of one token."""
    page_ids = pack_page_ids(np.arange(2**20 - 1000))
    encode(Push(**{**msgspec.structs.asdict(CALLS[1]), "page_ids": page_ids}))


@pytest.mark.parametrize("ids", [[], [0], [5, 0, 5], [MAX_PAGES - 1]])
@pytest.mark.parametrize("form", [list, np.array, lambda ids: np.array(ids, np.int32)])
def test_page_ids_come_back_as_they_were(ids: list[int], form: Any) -> None:
    packed = pack_page_ids(form(ids))
    assert len(packed) == 4 * len(ids)
    unpacked = unpack_page_ids(packed, num_pages=MAX_PAGES)
    assert [unpacked.dtype, unpacked.tolist()] == [np.int32, ids]


def test_page_ids_are_in_range() -> None:
    with pytest.raises(TransferError, match="page_id=-1, num_pages="):
        pack_page_ids([0, -1])
    with pytest.raises(TransferError, match=f"page_id={MAX_PAGES}"):
        pack_page_ids([MAX_PAGES])
    with pytest.raises(TransferError, match="page_id=7, num_pages=7"):
        unpack_page_ids(pack_page_ids([6, 7]), num_pages=7)
    with pytest.raises(TransferError, match="page_id=-2"):
        unpack_page_ids(np.array([1, -2], "<i4").tobytes(), num_pages=7)
    with pytest.raises(TransferError, match="4 bytes each .num_bytes=5"):
        unpack_page_ids(bytes(5), num_pages=7)


def test_an_error_arrives_with_its_rule_and_values() -> None:
    error = TransferError("a rule", count=3, ratio=0.5, name="x", missing=None, flag=True)
    arrived = to_error(through_the_wire(failed(error)), peer="tcp://there")
    assert [type(arrived), arrived.rule] == [PeerRefusedError, "a rule"]
    assert arrived.values == {**error.values, "peer": "tcp://there"}


def test_what_cannot_travel_is_told_in_words() -> None:
    values = {
        "big": 2**64,
        "array": np.arange(3),
        "numpy": np.int64(7),
        "float": np.float64(0.5),
        "long": "y" * 9999,
        "list": list(range(10**6)),
    }
    arrived = through_the_wire(failed(LayoutError("r" * 9999, **values)))
    assert arrived.rule == "r" * 500
    assert arrived.values == {
        "big": "18446744073709551616",
        "array": "array([0, 1, 2])",
        "numpy": "np.int64(7)",
        "float": 0.5,
        "long": "y" * 500,
        "list": "[0, 1, 2, 3, 4, 5, ...]",
    }
    many = TransferError("many", **{f"v{i}": i for i in range(40)})
    assert len(through_the_wire(failed(many)).values) == 16


def test_the_names_of_values_are_the_peers_choice() -> None:
    reply = through_the_wire(Failed(rule="r", values={"self": 1, "rule": 2, "peer": 3, "": 4}))
    assert to_error(reply, peer="tcp://there").values == {"peer": "tcp://there", "": 4}


def test_every_error_of_ours_can_be_told() -> None:
    told = failed(ContextLengthError("too long", param="prompt", tokens=9))
    assert through_the_wire(told) == Failed(rule="too long", values={"tokens": 9})


def through_the_wire(reply: Failed) -> Failed:
    arrived = decode_reply(encode(reply))
    assert isinstance(arrived, Failed)
    return arrived


def test_every_message_is_tried() -> None:
    kinds = set(messages.Call.__subclasses__()) | set(messages.Reply.__subclasses__())
    assert {type(message) for message in CALLS + REPLIES} == kinds
