"""The parts of a model's cache: keys and values, or a latent; indexer keys; those of a draft layer.

Each part has a pool of its own, and all of them the same page ids.
"""

from dataclasses import dataclass

from dcpjax.config import GlmConfig, ModelConfig

KV = "kv"
LATENT = "latent"
INDEXER = "indexer"
DRAFT_LATENT = "draft_latent"
DRAFT_INDEXER = "draft_indexer"
DRAFT_PARTS = frozenset((DRAFT_LATENT, DRAFT_INDEXER))


@dataclass(frozen=True)
class CachePart:
    """What some layers of a model keep of each token.

    Attributes:
        layers: the layers of the model that have it, ascending; layer k of the pool is
            ``layers[k]``.
        kv_heads: heads of it in the model.
        width: values per token, layer and head.
        is_replicated: every DCP rank keeps all tokens, so its pages have ranks times the tokens.
    """

    name: str
    layers: tuple[int, ...]
    kv_heads: int
    width: int
    is_replicated: bool = False


def cache_parts(model: ModelConfig, *, has_whole_index: bool = False) -> tuple[CachePart, ...]:
    """What the model caches.

    Args:
        has_whole_index: every DCP rank keeps the indexer's keys of all tokens.
    """
    if isinstance(model, GlmConfig):
        return _latent_parts(model, has_whole_index=has_whole_index)
    return (CachePart(KV, tuple(range(model.num_layers)), model.num_kv_heads, 2 * model.head_dim),)


def _latent_parts(model: GlmConfig, *, has_whole_index: bool) -> tuple[CachePart, ...]:
    """The latents of all layers, the keys of those with an indexer; the same of a draft layer.

    The draft layer runs with DCP off, so every rank keeps all of its tokens.
    """
    latent, draft = model.latent_width, (model.num_layers,) * model.num_draft_layers
    parts = [CachePart(LATENT, tuple(range(model.num_layers)), 1, latent)]
    if draft:
        parts.append(CachePart(DRAFT_LATENT, draft, 1, latent, is_replicated=True))
    if (indexer := model.indexer) is not None:
        width = indexer.head_dim
        parts.append(CachePart(INDEXER, indexer.full_layers, 1, width, has_whole_index))
        if draft:
            parts.append(CachePart(DRAFT_INDEXER, draft, 1, width, is_replicated=True))
    return tuple(parts)
