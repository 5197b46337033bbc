"""The parts of an engine's cache as other engines see them: what their pages are, and where."""

from collections.abc import Mapping
from typing import Any

from dcpjax.cache.parts import DRAFT_INDEXER, DRAFT_LATENT, INDEXER, KV, LATENT, CachePart
from dcpjax.cache.pool import PoolShape, PoolShapes
from dcpjax.cache.rows import PLAIN
from dcpjax.layout import KVPlacement
from dcpjax.transfer.memory import RankMemory
from dcpjax.transfer.part_info import PartInfo

_VALUES = {
    KV: "keys | values",
    LATENT: "latent | rotated key",
    DRAFT_LATENT: "latent | rotated key",
    INDEXER: "key",
    DRAFT_INDEXER: "key",
}
"""What a part has of a token."""

Regions = Mapping[str, tuple[RankMemory, ...]]
"""By cache part, of all ranks."""


def describe_parts(
    parts: tuple[CachePart, ...],
    pools: PoolShapes,
    placements: Mapping[str, KVPlacement],
    regions: Regions,
) -> tuple[PartInfo, ...]:
    """All parts, in their order."""
    return tuple(
        PartInfo(
            name=part.name,
            layers=part.layers,
            cache_format=_cache_format(part, pools.by_part[part.name]),
            cache_dtype=str(pools.by_part[part.name].dtype),
            placement=placements[part.name],
            regions=regions[part.name],
            token_bytes=regions[part.name][0].token_bytes,
            field_bytes=pools.by_part[part.name].row_format.field_bytes,
        )
        for part in parts
    )


def rank_memory(shape: PoolShape, share: Any, address: int, device_id: int = 0) -> RankMemory:
    """The region of one rank, scratch page excluded.

    Args:
        share: its part of the pool, [pages, layers, heads, ...].
        address: of its first byte.
    """
    _, num_layers, num_heads, *page = share.shape
    return RankMemory.dense(
        address,
        num_pages=shape.num_pages,
        num_layers=num_layers,
        num_heads=num_heads,
        page_size=shape.page_size,
        token_bytes=page[0] * page[1] * share.dtype.itemsize // shape.page_size,
        device_id=device_id,
    )


def _cache_format(part: CachePart, pool: PoolShape) -> str:
    """What the bytes of a page are, in the order of their strides."""
    plain = f"pages, layers, heads, tokens, {_VALUES[part.name]}"
    return plain if pool.row_format == PLAIN else f"{plain}: {pool.row_format}"
