"""An engine as its peers see it, as a value that is checked and as bytes."""

import hashlib
import math
from typing import Annotated

import msgspec

from dcpjax.errors import PeerError, TransferError
from dcpjax.transfer.messages import MAX_RANKS, Digest, Factors, Id, Version
from dcpjax.transfer.part_info import PartInfo
from dcpjax.transfer.parts import PlacedPart

CONNECTOR_VERSION = 5
"""Of the messages, of EngineInfo and of what they mean. In the compatibility hash."""

_MAX_SIZE = 2**31 - 1

Parts = Annotated[tuple[PartInfo, ...], msgspec.Meta(max_length=16)]
Agents = Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_RANKS)]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine as its peers see it. Construction and decoding check it for contradictions.

    A page id stands for the same tokens in every part: one page on each of the ranks that share
    them, or the longer page of a rank that has all of them.

    Attributes:
        factors: of :func:`compatibility_factors`.
        parts: of its cache. The first is one whose tokens ``dcp_size`` ranks share.
        tp_size: ranks without those that PCP multiplies: ``tp_size * pcp_size`` ranks in all.
        dcp_size: ranks that share the tokens of a sequence, whatever their order.
        interleave: consecutive tokens on one of them; without meaning for a ``dcp_size`` of 1.
        backend: name of the transfer backend.
        agents: what the backend of a peer needs to connect to each process of the engine; the
            regions of the parts say which of them has a rank's memory.
        kv_lease_duration, kv_lease_extension: how long it keeps pages, in seconds.
        heartbeat_interval: how often it says which pages it wants, in seconds.

    Raises:
        TransferError: two of the fields contradict each other, or one is out of range.
    """

    engine_id: Id
    factors: Factors
    parts: Parts
    tp_size: int
    dcp_size: int
    interleave: int
    backend: Id
    agents: Agents
    kv_lease_duration: float
    kv_lease_extension: float
    heartbeat_interval: float
    pcp_size: int = 1
    connector_version: Version = CONNECTOR_VERSION

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_times(self)
        _check_names(self)
        for part in self.parts:
            _check_ranks(self, part)
            _check_shares(self, part)
            _check_agents(self, part)

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pcp_size

    @property
    def page_size(self) -> int:
        """Tokens of a page of the first part."""
        return self.parts[0].placement.page_size

    @property
    def num_pages(self) -> int:
        """Page ids below this are valid in every part."""
        return min(part.num_pages for part in self.parts)

    @property
    def placed(self) -> tuple[PlacedPart, ...]:
        """The parts as they are planned with."""
        return tuple(part.placed for part in self.parts)

    def part(self, name: str) -> PartInfo:
        """The part of this name, which there is."""
        return next(part for part in self.parts if part.name == name)

    def agent_name(self, agent: int) -> str:
        """What a backend knows an agent by; of no other agent of any engine."""
        return f"{self.engine_id}/{agent}"

    @property
    def compatibility(self) -> Digest:
        """SHA-256, in hexadecimal, of the factors and of the version that gives them meaning."""
        factors = {**self.factors, "connector_version": self.connector_version}
        return hashlib.sha256(msgspec.json.encode(factors, order="sorted")).hexdigest()


def compatibility_factors(
    *,
    model: str,
    weights: str,
    dtype: str,
    cache_format: str,
    cache_dtype: str,
    num_hidden_layers: int,
    num_kv_heads: int,
    head_size: int,
) -> Factors:
    """What two engines must have in common before one reads the other's description.

    Args:
        model: the architecture.
        weights: a fingerprint of the parameters.
        dtype: of the computation.
        cache_format: of the first part of the cache.
        cache_dtype: likewise; what other parts have in common is in their descriptions.
    """
    return dict(
        model=model,
        weights=weights,
        dtype=dtype,
        cache_format=cache_format,
        cache_dtype=cache_dtype,
        num_hidden_layers=num_hidden_layers,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
    )


def encode_engine(info: EngineInfo) -> bytes:
    return msgspec.msgpack.encode(info)


def decode_engine(metadata: bytes) -> EngineInfo:
    """The inverse of :func:`encode_engine`.

    Raises:
        PeerError: the bytes are not understood.
        TransferError: the fields contradict each other.
    """
    try:
        return msgspec.msgpack.decode(metadata, type=EngineInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError("a greeting describes an engine", reason=str(error)[:500]) from error


def _check_times(info: EngineInfo) -> None:
    for name in ("kv_lease_duration", "kv_lease_extension", "heartbeat_interval"):
        if not 0 < getattr(info, name) < math.inf:
            raise TransferError(
                f"{name} is a finite number of seconds above 0", **{name: getattr(info, name)}
            )


def _check_sizes(info: EngineInfo) -> None:
    for name in ("tp_size", "pcp_size", "dcp_size", "interleave"):
        size = getattr(info, name)
        if not 1 <= size <= _MAX_SIZE:
            raise TransferError(f"{name} is in [1, 2**31)", **{name: size})


def _check_names(info: EngineInfo) -> None:
    names = [part.name for part in info.parts]
    if not names:
        raise TransferError("an engine has at least one cache part", engine_id=info.engine_id)
    if len(set(names)) != len(names):
        raise TransferError("the parts of a cache have distinct names", names=names)


def _check_ranks(info: EngineInfo, part: PartInfo) -> None:
    if not part.placement.num_ranks == info.num_ranks <= MAX_RANKS:
        raise TransferError(
            f"an engine has tp_size * pcp_size ranks, at most {MAX_RANKS}",
            ranks=part.placement.num_ranks,
            tp_size=info.tp_size,
            pcp_size=info.pcp_size,
            part=part.name,
        )


def _check_agents(info: EngineInfo, part: PartInfo) -> None:
    """Every process of an engine has memory of some ranks, and nobody else has."""
    found = {region.agent for region in part.regions}
    if found != set(range(len(info.agents))):
        raise TransferError(
            "the memory of an engine's ranks is with its agents, some of it with each",
            agents=len(info.agents),
            found=sorted(found),
            part=part.name,
        )


def _check_shares(info: EngineInfo, part: PartInfo) -> None:
    """A page id stands for the same tokens in every part, dealt as the sizes say."""
    for rank, share in enumerate(part.placement.shares):
        if share.ranks * part.placement.page_size != info.dcp_size * info.page_size:
            raise TransferError(
                "a page of every part has the tokens of its ranks in dcp_size pages of the first",
                rank=rank,
                ranks=share.ranks,
                page_size=part.placement.page_size,
                dcp_size=info.dcp_size,
                first_page_size=info.page_size,
                part=part.name,
            )
        if share.ranks > 1 and share.interleave != info.interleave:
            raise TransferError(
                "the tokens of every rank are sharded by the engine's interleave",
                rank=rank,
                share=share.interleave,
                interleave=info.interleave,
                part=part.name,
            )
