"""Who an engine is, and whether two engines can exchange KV.

What must agree are the compatibility factors: a cache of one engine means the same bytes in the
other. What may differ (parallel sizes, page size, interleave, number of pages) is in the
:class:`EngineInfo`, from which the other side plans and binds.

A producer may have cache parts that the consumer lacks: who does not speculate takes no draft
layer. A consumer that has one takes none from a producer that has not: its drafts would go on from
what the pages held before.
"""

from dcpjax.errors import PeerError
from dcpjax.transfer.engine_info import EngineInfo, decode_engine, encode_engine
from dcpjax.transfer.messages import Hello, Welcome
from dcpjax.transfer.part_info import PartInfo

_IN_WORDS = {"compatibility": "compatibility (of all that one of them lists)"}


def hello(ours: EngineInfo, *, engine_id: str) -> Hello:
    """What a consumer says to the producer ``engine_id``."""
    return Hello(
        engine_id=engine_id,
        connector_version=ours.connector_version,
        compatibility=ours.compatibility,
        factors=ours.factors,
        metadata=encode_engine(ours),
    )


def welcome(ours: EngineInfo) -> Welcome:
    """What a producer answers."""
    return Welcome(
        connector_version=ours.connector_version,
        compatibility=ours.compatibility,
        factors=ours.factors,
        metadata=encode_engine(ours),
    )


def meet(
    ours: EngineInfo, greeting: Hello | Welcome, *, expected_engine_id: str | None = None
) -> EngineInfo:
    """The engine that sent ``greeting``, if KV can be exchanged with it.

    Args:
        expected_engine_id: whom we meant to talk to; None: anybody.

    Raises:
        PeerError: it is incompatible, another one than expected, or not understood.
        TransferError: what it says of itself is contradictory.
    """
    # Another version may have another EngineInfo: decoded only when both speak the same language.
    _check_factors(ours, greeting)
    theirs = decode_engine(greeting.metadata)
    check_compatible(ours, theirs, expected_engine_id=expected_engine_id)
    consumer, producer = (theirs, ours) if isinstance(greeting, Hello) else (ours, theirs)
    _check_leases(consumer=consumer, producer=producer)
    _check_parts(consumer=consumer, producer=producer)
    return theirs


def check_compatible(
    ours: EngineInfo, theirs: EngineInfo, *, expected_engine_id: str | None = None
) -> None:
    """Refuse a peer with which no KV can be exchanged.

    Raises:
        PeerError: names the two values that do not go together.
    """
    _check_factors(ours, theirs)
    _check_same("backend", ours.backend, theirs.backend)
    common = {part.name for part in ours.parts} & {part.name for part in theirs.parts}
    for name in sorted(common):
        _check_same_part(ours.part(name), theirs.part(name))
    if expected_engine_id not in (None, theirs.engine_id):
        raise PeerError(
            "the engine at an address is the one that is expected there",
            expected=expected_engine_id,
            found=theirs.engine_id,
        )


def _check_same(name: str, ours: object, theirs: object, **of: object) -> None:
    if ours != theirs:
        named = _IN_WORDS.get(name, name)
        raise PeerError(f"two engines must have the same {named}", ours=ours, theirs=theirs, **of)


def _check_same_part(ours: PartInfo, theirs: PartInfo) -> None:
    for name in ("cache_format", "cache_dtype", "token_bytes", "field_bytes"):
        _check_same(name, getattr(ours, name), getattr(theirs, name), part=ours.name)
    for name in ("layers", "kv_heads"):
        places = getattr(ours.placement, name), getattr(theirs.placement, name)
        _check_same(name, *places, part=ours.name)
    _check_same("layers", ours.layers, theirs.layers, part=ours.name)
    small, large = sorted([ours.placement.page_size, theirs.placement.page_size])
    if large % small:
        raise PeerError(
            "of the page sizes of two engines one divides the other",
            ours=ours.placement.page_size,
            theirs=theirs.placement.page_size,
            part=ours.name,
        )


def _check_parts(*, consumer: EngineInfo, producer: EngineInfo) -> None:
    """All that the consumer caches is there."""
    wanted, held = ({part.name for part in info.parts} for info in (consumer, producer))
    if not wanted <= held:
        raise PeerError(
            "a producer caches all that its consumer does; with drafts of the model's own on the "
            "consumer, both have speculative_config",
            consumer=", ".join(sorted(wanted)),
            producer=", ".join(sorted(held)),
        )


def _check_factors(ours: EngineInfo, theirs: EngineInfo | Hello | Welcome) -> None:
    """Name the first factor that differs; the hashes where it is one that only one side knows."""
    _check_same("connector_version", ours.connector_version, theirs.connector_version)
    if ours.compatibility == theirs.compatibility:
        return
    for name, value in ours.factors.items():
        _check_same(name, value, theirs.factors.get(name))
    _check_same("compatibility", ours.compatibility, theirs.compatibility)


def _check_leases(*, consumer: EngineInfo, producer: EngineInfo) -> None:
    """Pages that are wanted are asked for before they are given up."""
    for name in ("kv_lease_duration", "kv_lease_extension"):
        if consumer.heartbeat_interval >= getattr(producer, name):
            raise PeerError(
                f"a consumer's heartbeat_interval is below the producer's {name}",
                heartbeat_interval=consumer.heartbeat_interval,
                **{name: getattr(producer, name)},
            )
