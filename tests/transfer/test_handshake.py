"""Engines that meet: what they say of themselves is exact, consistent and compatible."""

import dataclasses
from typing import Any

import msgspec
import pytest

from dcpjax.errors import PeerError, TransferError
from dcpjax.layout import KVPlacement
from dcpjax.transfer.engine_info import (
    CONNECTOR_VERSION,
    EngineInfo,
    compatibility_factors,
    decode_engine,
    encode_engine,
)
from dcpjax.transfer.frames import decode_call, decode_reply, encode
from dcpjax.transfer.handshake import check_compatible, hello, meet, welcome
from dcpjax.transfer.memory import RankMemory
from dcpjax.transfer.messages import MAX_PAGES
from dcpjax.transfer.part_info import MAX_ADDRESS, PartInfo

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


def part(placement: KVPlacement | None = None, **changes: Any) -> PartInfo:
    placement = placement or KVPlacement.tensor_parallel(3, **SHAPE)
    fields: dict[str, Any] = {
        "name": "kv",
        "layers": tuple(range(placement.layers)),
        "cache_format": FACTORS["cache_format"],
        "cache_dtype": FACTORS["cache_dtype"],
        "placement": placement,
        "regions": regions(placement, changes.get("token_bytes", TOKEN_BYTES)),
        "token_bytes": TOKEN_BYTES,
    }
    return PartInfo(**{**fields, **changes})


def engine(placement: KVPlacement | None = None, **changes: Any) -> EngineInfo:
    """With one cache part, if ``changes`` do not say otherwise."""
    placement = placement or KVPlacement.tensor_parallel(3, **SHAPE)
    fields: dict[str, Any] = {
        "engine_id": "one",
        "factors": compatibility_factors(**FACTORS),
        "parts": (part(placement),),
        "tp_size": placement.num_ranks,
        "dcp_size": placement.shares[0].ranks,
        "interleave": placement.shares[0].interleave,
        "backend": "nixl",
        "agents": (b"\x00agent\xff",),
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
    assert isinstance(decoded.parts[0].placement, KVPlacement)
    assert isinstance(decoded.parts[-1].regions[-1], RankMemory)


def test_an_engine_says_who_has_the_memory_of_which_rank() -> None:
    info = engine(SHARDED, agents=(b"a", b"b", b"c"), parts=(spread_part(3),))
    decoded = decode_engine(encode_engine(info))
    assert decoded == info
    assert [region.agent for region in decoded.parts[0].regions] == [0, 0, 1, 1, 2, 2]
    assert len({decoded.agent_name(agent) for agent in range(3)}) == 3


def test_an_engine_of_many_ranks_fits_into_a_frame() -> None:
    shape = {"layers": 78, "kv_heads": 1, "page_size": 64}
    info = engine(KVPlacement.decode(1024, 1024, interleave=64, **shape))
    assert decode_reply(encode(welcome(info))) == welcome(info)


SHARDED = KVPlacement.decode(6, 2, interleave=4, **SHAPE)


def spread_part(agents: int, placement: KVPlacement = SHARDED) -> PartInfo:
    """With as many ranks at each agent."""
    share = placement.num_ranks // agents
    spread = [
        dataclasses.replace(region, agent=rank // share)
        for rank, region in enumerate(regions(placement))
    ]
    return part(placement, regions=tuple(spread))


def with_region(**changes: int) -> dict[str, Any]:
    first, *others = regions(SHARDED)
    return {"regions": (dataclasses.replace(first, **changes), *others)}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"tp_size": 3}, "tp_size . pcp_size ranks.*ranks=6, tp_size=3, pcp_size=1"),
        ({"pcp_size": 2}, "ranks=6, tp_size=6, pcp_size=2"),
        ({"tp_size": 0}, "tp_size is in .*tp_size=0"),
        ({"tp_size": -6, "pcp_size": -1}, "tp_size=-6"),
        ({"dcp_size": 3}, "the tokens of.*rank=0, ranks=2, page_size=16, dcp_size=3"),
        ({"interleave": 1}, "rank=0, share=4, interleave=1"),
        ({"heartbeat_interval": 0.0}, "heartbeat_interval=0.0"),
        ({"kv_lease_duration": float("inf")}, "kv_lease_duration=inf"),
        ({"parts": ()}, "one cache part"),
        ({"agents": ()}, r"agents=0, found=\[0\], part='kv'"),
        ({"agents": (b"a", b"b")}, r"agents=2, found=\[0\]"),
        ({"agents": (b"a",), "parts": (spread_part(2),)}, r"agents=1, found=\[0, 1\]"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], rule: str) -> None:
    fields = msgspec.msgpack.decode(encode_engine(engine(SHARDED)))
    with pytest.raises(TransferError, match=rule):
        engine(SHARDED, **changes)
    fields |= msgspec.to_builtins(changes, builtin_types=(bytes,))
    with pytest.raises(TransferError, match=rule):
        decode_engine(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"regions": regions(SHARDED)[1:]}, "one memory region per rank .regions=5, ranks=6"),
        ({"regions": ()}, "regions=0, ranks=6"),
        ({"placement": dataclasses.replace(SHARDED, page_size=2**40)}, "page_size=1099511627776"),
        ({"layers": tuple(range(29))}, "layers=29, placement=30, part='kv'"),
        ({"layers": (*range(29), 28)}, "the layers of a cache part ascend"),
        ({"token_bytes": 256}, "rank=0, region=512, token_bytes=256"),
        ({"token_bytes": 2**31}, "token_bytes=2147483648"),
        (
            {"field_bytes": (448, 63)},
            "together .field_bytes=.448, 63., token_bytes=512",
        ),
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
def test_contradictions_of_a_part_are_refused(changes: dict[str, Any], rule: str) -> None:
    fields = msgspec.msgpack.decode(encode_engine(engine(SHARDED)))
    with pytest.raises(TransferError, match=rule):
        part(**{"placement": SHARDED, "regions": regions(SHARDED), **changes})
    fields["parts"][0] |= msgspec.to_builtins(changes)
    with pytest.raises(TransferError, match=rule):
        decode_engine(msgspec.msgpack.encode(fields))


def test_a_rank_that_holds_nothing_needs_no_memory() -> None:
    placement = KVPlacement.layer_split(2, layers=1, kv_heads=3, page_size=16)
    nothing = RankMemory(0, 0, 0, 0, 0, 0)
    part(placement, regions=(regions(placement)[0], nothing))
    with pytest.raises(TransferError, match="holds something has memory"):
        part(placement, regions=(nothing, regions(placement)[1]))


def test_pages_may_have_gaps() -> None:
    """A pool whose ranks are padded to the longest layer range."""
    part(SHARDED, **with_region(page_stride=31 * 8192))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("engine_id",), ""),
        (("engine_id",), None),
        (("compatibility",), "0"),
        (("surprise",), 1),
        (
            (
                "parts",
                0,
                "token_bytes",
            ),
            "512",
        ),
        (
            (
                "parts",
                0,
                "token_bytes",
            ),
            True,
        ),
        (("agents",), 5),
        (("agents",), ["text"]),
        (("parts", 0, "regions", 0, "agent"), None),
        (("parts", 0, "name"), ""),
        (("parts", 0, "layers", 0), -1),
        (("parts", 0, "cache_format"), 1),
        (("parts", 0, "field_bytes"), [512, 0]),
        (("parts", 0, "field_bytes"), 512),
        (
            (
                "parts",
                0,
                "placement",
            ),
            {},
        ),
        (("parts", 0, "placement", "layers"), 0),
        (("parts", 0, "placement", "layers"), 29),
        (("parts", 0, "placement", "page_size"), 3),
        (("parts", 0, "placement", "shares"), []),
        (("parts", 0, "placement", "shares", 0, "residue"), 2),
        (("parts", 0, "placement", "shares", 0, "residue"), -1),
        (("parts", 0, "placement", "shares", 0, "head_stop"), 4),
        (("parts", 0, "placement", "shares", 0, "layer_start"), 31),
        (("parts", 0, "placement", "shares", 0, "ranks"), 1.0),
        (("parts", 0, "regions", 0, "address"), None),
        (("parts", 0, "regions", 0), {}),
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
    assert CONNECTOR_VERSION == 5
    expected = "868c9b7db802cd7a9be9cff73c5a6a9e38604a3df379663009065de6413ecce3"
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
        (engine(connector_version=6), "same connector_version .ours=5, theirs=6"),
        (engine(backend="mooncake"), "same backend .ours='nixl', theirs='mooncake'"),
        (engine(parts=(part(token_bytes=256),)), "same token_bytes .ours=512, theirs=256"),
        (
            engine(parts=(part(cache_format="pages,layers,tokens"),)),
            "same cache_format .*theirs='pages,layers,tokens', part='kv'",
        ),
        (engine(parts=(part(cache_dtype="int8"),)), "same cache_dtype .ours='float32'"),
        (engine(parts=(part(field_bytes=(448, 64)),)), "same field_bytes .*theirs=.448, 64."),
        (
            engine(parts=(part(layers=tuple(range(1, 31))),)),
            "same layers .ours=.0, 1, .*theirs=.1, 2, ",
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


SINGLE: dict[str, int] = {"layers": 30, "kv_heads": 1, "page_size": 16}


def latent_engine(
    dcp: int = 1, *, has_whole_index: bool = False, drafts: bool = True, **pages: Any
) -> EngineInfo:
    """Latents, keys of two layers and perhaps a draft layer, on ``dcp`` ranks."""
    sharded = KVPlacement.decode(dcp, dcp, interleave=pages.pop("interleave", 16), **SINGLE)
    whole = KVPlacement.tensor_parallel(dcp, **{**SINGLE, "page_size": 16 * dcp, "layers": 2})
    index = whole if has_whole_index else sharded.select_layers((0, 29))
    parts = [
        part(sharded, name="latent"),
        part(index, name="indexer", layers=(0, 29), **pages),
    ]
    if drafts:
        parts.append(part(whole.select_layers((0,)), name="draft_latent", layers=(30,)))
    return engine(sharded, parts=tuple(parts), engine_id=f"{drafts}")


def test_parts_come_back_as_they_were() -> None:
    info = latent_engine(4, has_whole_index=True)
    assert decode_engine(encode_engine(info)) == info
    assert [part.placed.layers for part in info.parts] == [tuple(range(30)), (0, 29), (30,)]
    assert info.num_ranks == 4 and info.page_size == 16 and info.num_pages == 100


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"name": "latent"}, "distinct names .names=.'latent', 'latent'"),
        ({"placement": KVPlacement.tensor_parallel(2, **SINGLE)}, "ranks=2, tp_size=4.*'indexer'"),
        (
            {"placement": KVPlacement.tensor_parallel(4, **SINGLE)},
            "ranks=1, page_size=16, dcp_size=4, first_page_size=16, part='indexer'",
        ),
        (
            {"placement": KVPlacement.decode(4, 4, interleave=4, **SINGLE)},
            "share=4, interleave=16, part='indexer'",
        ),
    ],
)
def test_parts_that_contradict_each_other_are_refused(changes: dict[str, Any], rule: str) -> None:
    """A page id has one meaning in all of them."""
    first = latent_engine(4).parts[0]
    placement = changes.pop("placement", first.placement)
    other = part(placement, **{"name": "indexer", **changes})
    with pytest.raises(TransferError, match=rule):
        engine(first.placement, parts=(first, other))


def test_a_producer_may_have_drafts_that_its_consumer_lacks() -> None:
    drafting, plain = latent_engine(4), latent_engine(2, drafts=False)
    meet(plain, welcome(drafting))
    meet(drafting, hello(plain, engine_id="True"))
    rule = "both have speculative_config.*consumer='draft_latent, indexer, latent', producer="
    with pytest.raises(PeerError, match=rule):
        meet(drafting, welcome(plain))
    with pytest.raises(PeerError, match=rule):
        meet(plain, hello(drafting, engine_id="False"))


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
