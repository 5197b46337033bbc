"""What the processes of one engine say to each other, and the same as bytes. No pickle, bounded."""

from typing import TypeVar

import msgspec

from dcpjax.errors import ConfigError, EngineDeadError

MAX_FRAME_BYTES = 64 * 2**20
"""Of a message. The largest are page tables of a step and the prompts of penalties."""
MAX_TEXT = 4096


class Message(msgspec.Struct, tag_field="type", tag=True, frozen=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """A follower's first message.

    ``facts`` are what has to be equal on all processes, as texts, by name.
    """

    node_rank: int
    facts: dict[str, str]


class Welcome(Message, frozen=True):
    """All processes are there and alike; JAX of the leader listens at ``coordinator``."""

    coordinator: str


class Refused(Message, frozen=True):
    """The processes do not make an engine; every one of them says so and ends."""

    rule: str
    values: dict[str, str]


class RowOf(Message, frozen=True):
    """A follower's row of an exchange, int64."""

    row: bytes


class AllRows(Message, frozen=True):
    """The rows of all ranks of an exchange, int64 [ranks, n]."""

    rows: bytes


class ResetCounts(Message, frozen=True):
    """Begin the counts of a sampling slot anew; token ids are int32."""

    slot: int
    prompt: bytes
    outputs: bytes


class SampleRows(Message, frozen=True):
    """One call of sampling: its form, and the arrays of parameters by name."""

    rows: int
    with_filters: bool
    with_logprobs: bool
    inputs: dict[str, bytes]


class RunStep(Message, frozen=True):
    """One step: index of its compiled shape, and what the host says about it.

    ``outputs`` are those that are chosen, int32; ``sampling`` None where all of them are greedy.
    ``seeds`` uint32 [rows, 2] and ``counters`` int32 [rows] are for drafts on the devices.
    """

    shape: int
    packed: bytes
    resets: list[ResetCounts]
    outputs: bytes
    sampling: SampleRows | None
    seeds: bytes
    counters: bytes


class Confirm(Message, frozen=True):
    """Wait for the oldest step that is not confirmed, and compare what it has chosen."""


class Publish(Message, frozen=True):
    """Other engines are about to be told of pages: see that nothing writes into them any more, and
    that these are where the other engines read them."""

    page_ids: list[int]


class Close(Message, frozen=True):
    """The engine is closed."""


class Failure(Message, frozen=True):
    """A process failed or is gone, which ends the engine."""

    node_rank: int
    reason: str


class Probe(Message, frozen=True):
    """Nothing to say; sending it tells whether the other process is there."""


AnyMessage = (
    Hello
    | Welcome
    | Refused
    | RowOf
    | AllRows
    | RunStep
    | Confirm
    | Publish
    | Close
    | Failure
    | Probe
)
Kind = TypeVar("Kind", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """A frame.

    Raises:
        EngineDeadError: it would be longer than MAX_FRAME_BYTES.
    """
    frame = _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise EngineDeadError(
            "a message between processes is not longer than the limit",
            num_bytes=len(frame),
            limit=MAX_FRAME_BYTES,
        )
    return frame


def decode(frame: bytes) -> AnyMessage:
    """The message of a frame.

    Raises:
        ConfigError: there is none; somebody else talks to this port.
    """
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            "the port of an engine's processes hears only their messages",
            reason=str(error)[:MAX_TEXT],
        ) from error
