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


def cache_parts(model: ModelConfig) -> tuple[CachePart, ...]:
    """What the model caches."""
    if isinstance(model, GlmConfig):
        latent = CachePart(LATENT, tuple(range(model.num_layers)), 1, model.latent_width)
        return (latent,)
    return (CachePart(KV, tuple(range(model.num_layers)), model.num_kv_heads, 2 * model.head_dim),)
