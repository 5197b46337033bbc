"""One part of an engine's cache as its peers see it: its placement, and where its pages lie."""

from dataclasses import asdict
from functools import cached_property
from typing import Annotated

import msgspec

from dcpjax.errors import TransferError
from dcpjax.layout import KVPlacement
from dcpjax.layout.placement import KVShare
from dcpjax.transfer.check import check_region
from dcpjax.transfer.memory import RankMemory
from dcpjax.transfer.messages import MAX_PAGES, Id
from dcpjax.transfer.parts import PlacedPart

MAX_ADDRESS = 2**63 - 1
_MAX_SIZE = 2**31 - 1
_MAX_LAYERS = 4096
_MAX_FIELDS = 8

Layers = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, le=_MAX_SIZE)], ...],
    msgspec.Meta(max_length=_MAX_LAYERS),
]


Fields = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=1, le=_MAX_SIZE)], ...],
    msgspec.Meta(max_length=_MAX_FIELDS),
]


class PartInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A part of a cache. Construction and decoding check it for contradictions.

    Attributes:
        name: the same in every engine.
        layers: of the model, ascending; layer k of the placement is ``layers[k]``.
        cache_format: how a token's bytes are laid out in a page.
        cache_dtype: of the stored values.
        regions: by rank of ``placement``.
        token_bytes: of one token of one head of one layer.
        field_bytes: of a token's fields, where a page of a layer and head has one field of all its
            tokens after the other; empty where the bytes of a token lie together.

    Raises:
        TransferError: two of the fields contradict each other, or one is out of range.
    """

    name: Id
    layers: Layers
    cache_format: Id
    cache_dtype: Id
    placement: KVPlacement
    regions: tuple[RankMemory, ...]
    token_bytes: int
    field_bytes: Fields = ()

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_layers(self)
        if len(self.regions) != self.placement.num_ranks:
            raise TransferError(
                "an engine has one memory region per rank",
                regions=len(self.regions),
                ranks=self.placement.num_ranks,
                part=self.name,
            )
        for rank, region in enumerate(self.regions):
            _check_range(rank, region)
            share = self.placement.shares[rank]
            if not share.is_empty:
                _check_region(rank, share, region, self)

    @cached_property
    def placed(self) -> PlacedPart:
        """What is planned with."""
        return PlacedPart(self.name, self.layers, self.placement, self.field_bytes)

    @property
    def num_pages(self) -> int:
        """Page ids below this are valid on every rank that holds something."""
        return min((region.num_pages for region in self.regions if region.num_bytes), default=0)


def _check_sizes(part: PartInfo) -> None:
    placement = part.placement
    sizes = {
        "token_bytes": part.token_bytes,
        "layers": placement.layers,
        "kv_heads": placement.kv_heads,
        "page_size": placement.page_size,
    }
    for name, size in sizes.items():
        if not 1 <= size <= _MAX_SIZE:
            raise TransferError(f"{name} is in [1, 2**31)", **{name: size}, part=part.name)
    fields = part.field_bytes
    if fields and (min(fields) < 1 or sum(fields) != part.token_bytes):
        raise TransferError(
            "the fields of a token have its token_bytes together",
            field_bytes=fields,
            token_bytes=part.token_bytes,
            part=part.name,
        )


def _check_layers(part: PartInfo) -> None:
    if len(part.layers) != part.placement.layers:
        raise TransferError(
            "a cache part has a layer of its placement for each of its layers",
            layers=len(part.layers),
            placement=part.placement.layers,
            part=part.name,
        )
    if any(later <= layer for layer, later in zip(part.layers, part.layers[1:], strict=False)):
        raise TransferError("the layers of a cache part ascend", layers=part.layers, part=part.name)


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


def _check_region(rank: int, share: KVShare, region: RankMemory, part: PartInfo) -> None:
    """No value of a page lies inside another one, or outside its page."""
    check_region("described", rank, share, part.placement.page_size, region)
    if region.token_bytes != part.token_bytes:
        raise TransferError(
            "a region has the token_bytes of its cache part",
            rank=rank,
            region=region.token_bytes,
            token_bytes=part.token_bytes,
            part=part.name,
        )
