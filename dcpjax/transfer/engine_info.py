"""An engine as its peers see it, as a value that is checked and as bytes."""

import hashlib
import math
from dataclasses import asdict

import msgspec

from dcpjax.errors import PeerError, TransferError
from dcpjax.layout import KVPlacement
from dcpjax.layout.placement import KVShare
from dcpjax.transfer.check import check_region
from dcpjax.transfer.memory import RankMemory
from dcpjax.transfer.messages import MAX_PAGES, MAX_RANKS, Digest, Factors, Id, Version

CONNECTOR_VERSION = 2
"""Of the messages, of EngineInfo and of what they mean. In the compatibility hash."""

MAX_ADDRESS = 2**63 - 1
_MAX_SIZE = 2**31 - 1


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine as its peers see it. Construction and decoding check it for contradictions.

    Attributes:
        factors: of :func:`compatibility_factors`.
        regions: by rank of ``placement``.
        token_bytes: of one token of one head of one layer.
        tp_size: ranks without those that PCP multiplies: ``tp_size * pcp_size`` ranks in all.
        dcp_size: ranks that share the tokens of a sequence, whatever their order.
        interleave: consecutive tokens on one of them; without meaning for a ``dcp_size`` of 1.
        backend: name of the transfer backend.
        agent_metadata: what the backend of a peer needs to connect.
        kv_lease_duration, kv_lease_extension: how long it keeps pages, in seconds.
        heartbeat_interval: how often it says which pages it wants, in seconds.

    Raises:
        TransferError: two of the fields contradict each other, or one is out of range.
    """

    engine_id: Id
    factors: Factors
    placement: KVPlacement
    regions: tuple[RankMemory, ...]
    token_bytes: int
    tp_size: int
    dcp_size: int
    interleave: int
    backend: Id
    agent_metadata: bytes
    kv_lease_duration: float
    kv_lease_extension: float
    heartbeat_interval: float
    pcp_size: int = 1
    connector_version: Version = CONNECTOR_VERSION

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_times(self)
        _check_shares(self)
        if len(self.regions) != self.placement.num_ranks:
            raise TransferError(
                "an engine has one memory region per rank",
                regions=len(self.regions),
                ranks=self.placement.num_ranks,
            )
        for rank, region in enumerate(self.regions):
            _check_range(rank, region)
            share = self.placement.shares[rank]
            if not share.is_empty:
                _check_region(rank, share, region, self)

    @property
    def page_size(self) -> int:
        return self.placement.page_size

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
    """Everything that two engines must have in common.

    Args:
        model: the architecture.
        weights: a fingerprint of the parameters.
        dtype: of the computation.
        cache_format: how a token's bytes are laid out in a page.
        cache_dtype: of the stored values.
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
    placement = info.placement
    sizes = {
        "token_bytes": info.token_bytes,
        "tp_size": info.tp_size,
        "pcp_size": info.pcp_size,
        "dcp_size": info.dcp_size,
        "interleave": info.interleave,
        "layers": placement.layers,
        "kv_heads": placement.kv_heads,
        "page_size": placement.page_size,
    }
    for name, size in sizes.items():
        if not 1 <= size <= _MAX_SIZE:
            raise TransferError(f"{name} is in [1, 2**31)", **{name: size})
    if not placement.num_ranks == info.tp_size * info.pcp_size <= MAX_RANKS:
        raise TransferError(
            f"an engine has tp_size * pcp_size ranks, at most {MAX_RANKS}",
            ranks=placement.num_ranks,
            tp_size=info.tp_size,
            pcp_size=info.pcp_size,
        )


def _check_shares(info: EngineInfo) -> None:
    """The placement shards tokens as the sizes say."""
    for rank, share in enumerate(info.placement.shares):
        if share.ranks != info.dcp_size:
            raise TransferError(
                "the tokens of every rank are sharded over dcp_size ranks",
                rank=rank,
                ranks=share.ranks,
                dcp_size=info.dcp_size,
            )
        if share.ranks > 1 and share.interleave != info.interleave:
            raise TransferError(
                "the tokens of every rank are sharded by the engine's interleave",
                rank=rank,
                share=share.interleave,
                interleave=info.interleave,
            )


def _check_range(rank: int, region: RankMemory) -> None:
    for name, value in asdict(region).items():
        if not 0 <= value <= MAX_ADDRESS:
            raise TransferError(
                "addresses, counts and strides are in [0, 2**63)", rank=rank, **{name: value}
            )
    if region.num_pages > MAX_PAGES or region.address + region.num_bytes > MAX_ADDRESS:
        raise TransferError(
            "page ids fit into 31 bits and addresses into 63",
            rank=rank,
            address=region.address,
            num_pages=region.num_pages,
            page_stride=region.page_stride,
        )


def _check_region(rank: int, share: KVShare, region: RankMemory, info: EngineInfo) -> None:
    """No value of a page lies inside another one, or outside its page."""
    check_region("described", rank, share, info.page_size, region)
    if region.token_bytes != info.token_bytes:
        raise TransferError(
            "a region has the engine's token_bytes",
            rank=rank,
            region=region.token_bytes,
            token_bytes=info.token_bytes,
        )
