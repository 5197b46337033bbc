"""Engines that meet: what they say of themselves is exact, consistent and compatible."""

import dataclasses
from typing import Any

import msgspec
import pytest

from dcpjax.errors import PeerError, TransferError
from dcpjax.layout import KVPlacement
from dcpjax.transfer.engine_info import (
    CONNECTOR_VERSION,
    MAX_ADDRESS,
    EngineInfo,
    compatibility_factors,
    decode_engine,
    encode_engine,
)
from dcpjax.transfer.frames import decode_call, decode_reply, encode
from dcpjax.transfer.handshake import check_compatible, hello, meet, welcome
from dcpjax.transfer.memory import RankMemory
from dcpjax.transfer.messages import MAX_PAGES

FACTORS = {
    "model": "LlamaForCausalLM",
    "weights": "5af1",
    "dtype": "float32",
    "cache_format": "pages,layers,heads,tokens",
    "cache_dtype": "float32",
    "num_hidden_layers": 30,
    "num_kv_heads": 3,
    "head_size": 64,
}
TOKEN_BYTES = 512
SHAPE: dict[str, int] = {"layers": 30, "kv_heads": 3, "page_size": 16}


def regions(placement: KVPlacement, token_bytes: int = TOKEN_BYTES) -> tuple[RankMemory, ...]:
    return tuple(
        RankMemory.dense(
            0 if share.is_empty else 2**46 + 2**32 * rank,
            num_pages=100 + rank,
            num_layers=share.num_layers,
            num_heads=share.num_heads,
            page_size=placement.page_size,
            token_bytes=token_bytes,
            device_id=rank,
        )
        for rank, share in enumerate(placement.shares)
    )


def engine(placement: KVPlacement | None = None, **changes: Any) -> EngineInfo:
    placement = placement or KVPlacement.tensor_parallel(3, **SHAPE)
    fields: dict[str, Any] = {
        "engine_id": "one",
        "factors": compatibility_factors(**FACTORS),
        "placement": placement,
        "regions": regions(placement),
        "token_bytes": TOKEN_BYTES,
        "tp_size": placement.num_ranks,
        "dcp_size": placement.shares[0].ranks,
        "interleave": placement.shares[0].interleave,
        "backend": "nixl",
        "agent_metadata": b"\x00agent\xff",
        "kv_lease_duration": 30.0,
        "kv_lease_extension": 20.0,
        "heartbeat_interval": 5.0,
    }
    return EngineInfo(**{**fields, **changes})


ENGINES = [
    engine(KVPlacement.tensor_parallel(1, **SHAPE)),
    engine(KVPlacement.tensor_parallel(6, **SHAPE)),
    engine(KVPlacement.decode(9, 3, interleave=1, **SHAPE)),
    engine(KVPlacement.prefill_dcp(9, 3, interleave=4, **SHAPE), engine_id="ü" * 256),
    engine(KVPlacement.layer_split(4, **SHAPE), tp_size=1, pcp_size=4),
    engine(KVPlacement.layer_split(33, **SHAPE)),
    engine(KVPlacement.pcp(4, **SHAPE), tp_size=1, pcp_size=4),
    engine(KVPlacement.pcp(4, interleave=16, **SHAPE), tp_size=2, pcp_size=2),
]


@pytest.mark.parametrize("info", ENGINES)
def test_an_engine_comes_back_as_it_was(info: EngineInfo) -> None:
    decoded = decode_engine(encode_engine(info))
    assert decoded == info
    assert isinstance(decoded.placement, KVPlacement)
    assert isinstance(decoded.regions[-1], RankMemory)


def test_an_engine_of_many_ranks_fits_into_a_frame() -> None:
    shape = {"layers": 78, "kv_heads": 1, "page_size": 64}
    info = engine(KVPlacement.decode(1024, 1024, interleave=64, **shape))
    assert decode_reply(encode(welcome(info))) == welcome(info)


SHARDED = KVPlacement.decode(6, 2, interleave=4, **SHAPE)


def with_region(**changes: int) -> dict[str, Any]:
    first, *others = regions(SHARDED)
    return {"regions": (dataclasses.replace(first, **changes), *others)}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"regions": regions(SHARDED)[1:]}, "one memory region per rank .regions=5, ranks=6"),
        ({"regions": ()}, "regions=0, ranks=6"),
        ({"tp_size": 3}, "tp_size . pcp_size ranks.*ranks=6, tp_size=3, pcp_size=1"),
        ({"pcp_size": 2}, "ranks=6, tp_size=6, pcp_size=2"),
        ({"placement": dataclasses.replace(SHARDED, page_size=2**40)}, "page_size=1099511627776"),
        ({"tp_size": 0}, "tp_size is in .*tp_size=0"),
        ({"tp_size": -6, "pcp_size": -1}, "tp_size=-6"),
        ({"dcp_size": 3}, "dcp_size ranks .rank=0, ranks=2, dcp_size=3"),
        ({"interleave": 1}, "rank=0, share=4, interleave=1"),
        ({"heartbeat_interval": 0.0}, "heartbeat_interval=0.0"),
        ({"kv_lease_duration": float("inf")}, "kv_lease_duration=inf"),
        ({"token_bytes": 256}, "rank=0, region=512, token_bytes=256"),
        ({"token_bytes": 2**31}, "token_bytes=2147483648"),
        (with_region(token_bytes=511), "region=511, token_bytes=512"),
        (with_region(address=0), "holds something has memory .rank=0, address=0"),
        (with_region(address=-1), "address=-1"),
        (with_region(address=MAX_ADDRESS), "addresses into 63"),
        (with_region(num_pages=-1), "num_pages=-1"),
        (with_region(num_pages=MAX_PAGES + 1), "page ids fit into 31 bits"),
        (with_region(num_pages=MAX_PAGES, page_stride=2**40), "num_pages=2147483647"),
        (with_region(head_stride=16 * 512 - 1), "head_stride of .*head_stride=8191, least=8192"),
        (with_region(layer_stride=16 * 512 - 1), "layer_stride of .*layer_stride=8191, least=8192"),
        (with_region(page_stride=1), "page_stride of .*page_stride=1, least=245760"),
        (with_region(device_id=-1), "device_id=-1"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], rule: str) -> None:
    fields = msgspec.msgpack.decode(encode_engine(engine(SHARDED)))
    with pytest.raises(TransferError, match=rule):
        engine(**{"placement": SHARDED, **changes})
    fields |= msgspec.to_builtins(changes)
    with pytest.raises(TransferError, match=rule):
        decode_engine(msgspec.msgpack.encode(fields))


def test_a_rank_that_holds_nothing_needs_no_memory() -> None:
    placement = KVPlacement.layer_split(2, layers=1, kv_heads=3, page_size=16)
    nothing = RankMemory(0, 0, 0, 0, 0, 0)
    engine(placement, regions=(regions(placement)[0], nothing))
    with pytest.raises(TransferError, match="holds something has memory"):
        engine(placement, regions=(nothing, regions(placement)[1]))


def test_pages_may_have_gaps() -> None:
    """A pool whose ranks are padded to the longest layer range."""
    engine(SHARDED, **with_region(page_stride=31 * 8192))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("engine_id",), ""),
        (("engine_id",), None),
        (("compatibility",), "0"),
        (("surprise",), 1),
        (("token_bytes",), "512"),
        (("token_bytes",), True),
        (("agent_metadata",), 5),
        (("placement",), {}),
        (("placement", "layers"), 0),
        (("placement", "layers"), 29),
        (("placement", "page_size"), 3),
        (("placement", "shares"), []),
        (("placement", "shares", 0, "residue"), 2),
        (("placement", "shares", 0, "residue"), -1),
        (("placement", "shares", 0, "head_stop"), 4),
        (("placement", "shares", 0, "layer_start"), 31),
        (("placement", "shares", 0, "ranks"), 1.0),
        (("regions", 0, "address"), None),
        (("regions", 0), {}),
    ],
)
def test_what_describes_no_engine_is_not_understood(place: tuple[Any, ...], value: Any) -> None:
    fields = msgspec.msgpack.decode(encode_engine(engine(SHARDED)))
    *outer, name = place
    inner = fields
    for key in outer:
        inner = inner[key]
    inner[name] = value
    with pytest.raises(PeerError, match="a greeting describes an engine"):
        decode_engine(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("name", sorted(FACTORS))
def test_each_factor_is_in_the_hash(name: str) -> None:
    value = FACTORS[name]
    other = value + 1 if isinstance(value, int) else value + "x"
    assert engine().compatibility != engine(factors={**FACTORS, name: other}).compatibility


def test_the_hash_is_the_same_in_every_process() -> None:
    """A change of it makes engines of two releases refuse each other: raise the version too."""
    assert CONNECTOR_VERSION == 2
    expected = "80a547599fd6714e66d4e3c60b06aa1f0204a075ea880d7226886b318cc75989"
    assert engine().compatibility == expected
    assert engine(factors=dict(reversed(FACTORS.items()))).compatibility == expected


@pytest.mark.parametrize("theirs", ENGINES)
def test_shapes_may_differ(theirs: EngineInfo) -> None:
    other_pages = KVPlacement.decode(3, 3, layers=30, kv_heads=3, page_size=64, interleave=64)
    for ours in (engine(), engine(other_pages)):
        check_compatible(ours, theirs)
        check_compatible(theirs, ours, expected_engine_id=ours.engine_id)


FEWER_FACTORS = {name: value for name, value in FACTORS.items() if name != "head_size"}
MORE_FACTORS = {**FACTORS, "rope": "yarn"}
SMALLER = {**SHAPE, "layers": 29}
FEWER = {**SHAPE, "kv_heads": 1}
UNEVEN = {**SHAPE, "page_size": 24}


@pytest.mark.parametrize(
    ("theirs", "rule"),
    [
        (engine(factors={**FACTORS, "weights": "1c"}), "same weights .ours='5af1', theirs='1c'"),
        (engine(factors=FEWER_FACTORS), "same head_size .ours=64, theirs=None"),
        (
            engine(factors=MORE_FACTORS),
            f"same compatibility.*{engine(factors=MORE_FACTORS).compatibility}",
        ),
        (engine(connector_version=3), "same connector_version .ours=2, theirs=3"),
        (engine(backend="mooncake"), "same backend .ours='nixl', theirs='mooncake'"),
        (
            engine(token_bytes=256, regions=regions(KVPlacement.tensor_parallel(3, **SHAPE), 256)),
            "same token_bytes .ours=512, theirs=256",
        ),
        (engine(KVPlacement.tensor_parallel(3, **SMALLER)), "same layers .ours=30, theirs=29"),
        (engine(KVPlacement.tensor_parallel(3, **FEWER)), "same kv_heads .ours=3, theirs=1"),
        (engine(KVPlacement.tensor_parallel(3, **UNEVEN)), "page sizes.*ours=16, theirs=24"),
        (engine(engine_id="two"), "expected='one', found='two'"),
    ],
)
def test_incompatible_engines_are_told_the_two_values(theirs: EngineInfo, rule: str) -> None:
    ours = engine()
    check_compatible(ours, engine(), expected_engine_id="one")
    with pytest.raises(PeerError, match=rule):
        check_compatible(ours, theirs, expected_engine_id="one")
    with pytest.raises(PeerError, match=rule):
        meet(ours, welcome(theirs), expected_engine_id="one")


def test_two_engines_meet_through_frames() -> None:
    consumer, producer = engine(SHARDED, engine_id="consumer"), engine(engine_id="producer")
    call = decode_call(encode(hello(consumer, engine_id="producer")))
    assert call.engine_id == "producer"
    assert meet(producer, call) == consumer
    answer = decode_reply(encode(welcome(producer)))
    assert meet(consumer, answer, expected_engine_id="producer") == producer


@pytest.mark.parametrize("name", ["kv_lease_duration", "kv_lease_extension"])
def test_a_consumer_that_asks_too_rarely_is_refused_by_both_sides(name: str) -> None:
    consumer = engine(engine_id="consumer")
    for seconds in (5.0, 5.1):
        producer = engine(engine_id="producer", **{name: seconds})
        if seconds > consumer.heartbeat_interval:
            meet(consumer, welcome(producer))
            meet(producer, hello(consumer, engine_id="producer"))
            continue
        with pytest.raises(PeerError, match=f"heartbeat_interval=5.0, {name}=5.0"):
            meet(consumer, welcome(producer))
        with pytest.raises(PeerError, match=f"heartbeat_interval=5.0, {name}=5.0"):
            meet(producer, hello(consumer, engine_id="producer"))


@pytest.mark.parametrize(
    "changes", [{"connector_version": 7}, {"compatibility": "0" * 64}, {"metadata": b"\xc1"}]
)
def test_an_engine_of_another_kind_need_not_be_understood(changes: dict[str, Any]) -> None:
    """Its metadata is looked at only when it can be of this version."""
    greeting = msgspec.structs.replace(welcome(engine()), **{"metadata": b"new", **changes})
    rule = "describes an engine" if "metadata" in changes else f"same {next(iter(changes))}"
    with pytest.raises(PeerError, match=rule):
        meet(engine(), greeting)
