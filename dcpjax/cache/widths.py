"""How many bytes a cache takes: per token and part, per page, and how many pages fit. No jax.

The pools of the engine and the numbers of the planner come from these functions; there is no second
formula. A cache has parts (keys and values, or latents; indexer keys; the draft layer's), each with
so many layers, and so many bytes for a token of one head of one layer.
"""

from dataclasses import dataclass

from dcpjax.errors import ConfigError

VALUE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "fp8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3": 1,
}
"""Bytes of one stored value, by the name of its type."""

FP8_DS_MLA = "fp8_ds_mla"
"""Latents in 8 bits with a float32 scale for each 128 values, and a rotary key in bfloat16."""
SCALE_BLOCK = 128
"""Values that share one scale in formats with scales."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class PartWidth:
    """One part of a cache.

    Attributes:
        layers: layers of the model that have this part.
        heads: heads that are stored; 1 for latents and indexer keys.
        bytes_per_token: of one head of one layer.
        is_draft: the part belongs to the draft, whose forward sees whole sequences: every rank that
            shares the tokens of a sequence holds all of them.
    """

    name: str
    layers: int
    heads: int
    bytes_per_token: int
    is_draft: bool = False

    @property
    def total(self) -> int:
        """Bytes of one token in all heads and layers."""
        return self.layers * self.heads * self.bytes_per_token


def value_bytes(dtype: str) -> int:
    """Bytes of one value.

    Raises:
        ConfigError: no type of single values has this name.
    """
    if dtype not in VALUE_BYTES:
        raise ConfigError("the type of cached values is known", dtype=dtype, known=[*VALUE_BYTES])
    return VALUE_BYTES[dtype]


def head_token_bytes(head_dim: int, dtype: str) -> int:
    """Keys and values of one token of one head, packed side by side."""
    return 2 * head_dim * value_bytes(dtype)


def latent_token_bytes(latent_dim: int, rope_dim: int, dtype: str) -> int:
    """The latent and the rotary key of one token; 656 for GLM and DeepSeek in ``fp8_ds_mla``."""
    if dtype == FP8_DS_MLA:
        return latent_dim + _scale_bytes(latent_dim) + 2 * rope_dim
    return (latent_dim + rope_dim) * value_bytes(dtype)


def index_token_bytes(index_dim: int, dtype: str) -> int:
    """The indexer key of one token; 132 for GLM and DeepSeek in ``fp8_ds_mla``."""
    fields = index_field_bytes(index_dim, dtype)
    return sum(fields) if fields else index_dim * value_bytes(dtype)


def index_field_bytes(index_dim: int, dtype: str) -> tuple[int, ...]:
    """Values and scales, where a page of indexer keys has the scales of all its tokens at its end;
    empty where the bytes of a token lie together."""
    return (index_dim, _scale_bytes(index_dim)) if dtype == FP8_DS_MLA else ()


def _scale_bytes(dim: int) -> int:
    if dim % SCALE_BLOCK:
        raise ConfigError(
            f"a width with scales is a multiple of {SCALE_BLOCK}, the values of one scale", dim=dim
        )
    return dim // SCALE_BLOCK * SCALE_BYTES


def page_bytes(layers: int, heads: int, page_size: int, token_bytes: int) -> int:
    """One page of one rank: all layers and heads that the rank holds of ``page_size`` tokens."""
    return layers * heads * page_size * token_bytes


def pool_bytes(num_pages: int, page_bytes: int) -> int:
    """One rank's share of a pool with so many usable pages, scratch page included."""
    return (num_pages + 1) * page_bytes


def affordable_pages(free_bytes: int, page_bytes: int) -> int:
    """Usable pages that fit beside the scratch page; negative where not even that one fits."""
    return free_bytes // page_bytes - 1


def default_pages(free_bytes: int, page_bytes: int, share: float) -> int:
    """Pages that an engine takes of its free memory unless told otherwise.

    Down to three significant bits, so that a start with a little less free memory compiles no new
    programs: the shape of the pool is part of what they are kept under.
    """
    num_pages = affordable_pages(int(free_bytes * share), page_bytes)
    step = 1 << max(num_pages.bit_length() - 3, 0)
    return num_pages // step * step if num_pages > 0 else num_pages
