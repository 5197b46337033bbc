"""What two engines say to each other about their transfers.

| consumer to producer                       | answer                                             |
|--------------------------------------------|----------------------------------------------------|
| Hello: who I am                            | Welcome: who I am                                  |
| Push: write a request's KV into my pages   | Pushed: all of it is written, nothing moves        |
| Landed: these of my ranks have their share | Released: whether the pages were held until now    |
| Claim: I take a request as it was offered  | Claimed: it is held, and was offered like that     |
| Wait: more than so many tokens are wanted   | Computed: how many there are by now                |
| Heartbeat: I still want these requests     | HeartbeatReply: those of them that are held        |
| Abort: I do not want this request any more | Aborted: nothing is written into my pages any more |
| any of them                                | Failed: not done, for this reason                  |
| any of them                                | OtherEngine: not done, I am not who is meant       |
"""

from typing import Annotated

import msgspec

MAX_FRAME_BYTES = 4 * 2**20
MAX_IDS = 4096
MAX_RANKS = 4096
MAX_PAGES = 2**31 - 1
"""Page ids are int32, here and in the transfer libraries."""

MAX_TEXT = 500
MAX_VALUES = 16  # of an error

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
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


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
    producer, packed by :func:`dcpjax.transfer.frames.pack_page_ids`.
    """

    request_id: Id
    target_engine_id: Id
    prompt_digest: Text
    page_ids: bytes


class Claimed(Reply, frozen=True):
    """The pages are held, and hold the KV of this prompt."""


class Wait(Call, frozen=True):
    """A request that is being computed is wanted beyond its first ``num_tokens`` tokens."""

    request_id: Id
    num_tokens: NumTokens


class Computed(Reply, frozen=True):
    """The first ``num_tokens`` tokens are in the pages; perhaps no more than before: ask again."""

    num_tokens: NumTokens


class Push(Call, frozen=True):
    """Write the tokens ``[first_token, num_tokens)`` of a request into the pages of a target.

    ``target_engine_id`` has said Hello. ``page_ids`` are its pages of the sequence, packed by
    :func:`dcpjax.transfer.frames.pack_page_ids`.
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

    target_engine_id: Id
    request_ids: Ids


class HeartbeatReply(Reply, frozen=True):
    """Those of the requests that are held."""

    request_ids: Ids


class Abort(Call, frozen=True):
    """The consumer gives the request up and waits for the answer before it reuses its pages.

    Others may want it by now: a router that gets no answer of one target asks another one.
    """

    request_id: Id
    target_engine_id: Id


class Aborted(Reply, frozen=True):
    """Nothing writes into the consumer's pages of this request, now or later."""


class Failed(Reply, frozen=True):
    """The rule that was broken, and the values that broke it, as in :class:`DcpjaxError`.

    Nothing of what was asked for goes on. Where that is not sure, there is no answer at all.
    """

    rule: Text
    values: Annotated[
        dict[Text, bool | int | float | Text | None], msgspec.Meta(max_length=MAX_VALUES)
    ] = msgspec.field(default_factory=dict[str, bool | int | float | str | None])


class OtherEngine(Reply, frozen=True):
    """``engine_id`` has taken the place of the engine that was meant."""

    engine_id: Id


AnyCall = Hello | Claim | Wait | Push | Landed | Heartbeat | Abort
AnyReply = (
    Welcome
    | Claimed
    | Computed
    | Pushed
    | Released
    | HeartbeatReply
    | Aborted
    | Failed
    | OtherEngine
)
