"""The parts of a model's cache, and in which format they are stored unless told otherwise."""

from dcpjax.cache import widths
from dcpjax.cache.widths import FP8_DS_MLA, PartWidth
from dcpjax.errors import ConfigError
from dcpjax.planner.models import Model, ModelShape, find_model

INDEXER = "indexer"
"""The name of the part of a cache that has the indexer's keys."""
PLAIN = "bfloat16"
"""What every cache can be stored in."""


def kv_parts(
    model: Model, *, cache_dtype: str = FP8_DS_MLA, mtp: bool = True
) -> tuple[PartWidth, ...]:
    """The parts of a model's cache, the draft layer's last.

    Args:
        cache_dtype: ``fp8_ds_mla`` (latents only), or a type of single values.
        mtp: with the cache of the draft layer, where the model has one.

    Raises:
        ConfigError: a type that this model's cache does not have.
    """
    shape = find_model(model)
    parts = _target_parts(shape, cache_dtype)
    if not mtp or not shape.mtp_layers:
        return parts
    drafts = (
        PartWidth(f"mtp {part.name}", shape.mtp_layers, part.heads, part.bytes_per_token, True)
        for part in parts
    )
    return (*parts, *drafts)


def _target_parts(shape: ModelShape, dtype: str) -> tuple[PartWidth, ...]:
    latent, indexer = shape.latent, shape.indexer
    if latent is None:
        if dtype == FP8_DS_MLA:
            raise ConfigError(
                "fp8_ds_mla is a layout of latents; keys and values are bfloat16, float32 or fp8",
                model=shape.name,
                cache_dtype=dtype,
            )
        width = widths.head_token_bytes(shape.head_dim, dtype)
        return (PartWidth("kv", shape.num_layers, shape.num_kv_heads, width),)
    width = widths.latent_token_bytes(latent.kv_rank, latent.rope_dim, dtype)
    parts = [PartWidth("latent", shape.num_layers, 1, width)]
    if indexer is not None:
        width = widths.index_token_bytes(indexer.head_dim, dtype)
        parts.append(PartWidth(INDEXER, shape.index_layers, 1, width))
    return tuple(parts)


def kv_bytes_per_token(model: Model, *, cache_dtype: str = FP8_DS_MLA, mtp: bool = True) -> int:
    """Bytes of one token in all layers and heads, not counting copies: 54,728 for GLM-5.2."""
    return sum(part.total for part in kv_parts(model, cache_dtype=cache_dtype, mtp=mtp))


def auto_dtype(model: ModelShape) -> str:
    """The format of a cache that nobody named: with scales, where it has latents that take them."""
    if model.latent is None or scales_obstacle(model) is not None:
        return PLAIN
    return FP8_DS_MLA


def scales_obstacle(model: ModelShape) -> ConfigError | None:
    """Why the cache of a model cannot be ``fp8_ds_mla``; None where it can."""
    try:
        kv_parts(model, cache_dtype=FP8_DS_MLA)
    except ConfigError as error:
        return error
    return None


def check_cache_dtype(model: ModelShape, dtype: str) -> None:
    """Refuse a format that somebody named and the model's cache cannot have.

    Raises:
        ConfigError: names the setting, and the rule of the format.
    """
    if dtype == "auto":
        return
    try:
        kv_parts(model, cache_dtype=dtype)
    except ConfigError as error:
        raise ConfigError(
            f"kv_cache_dtype is a format that this model's cache can have: {error.rule}",
            **{"kv_cache_dtype": dtype, "model": model.name, **error.values},
        ) from error
