"""Arithmetic of attention: operations, bytes, intensity, and where one cost overtakes another.

Counts of sparse latent attention are those of the published analyses: each head performs
``2 · (d_qk + d_v)`` operations for a row that it reads, a row costs its cache bytes and a 4-byte
index, and queries and outputs are bfloat16.
"""

from dcpjax.cache.widths import FP8_DS_MLA, index_token_bytes, latent_token_bytes
from dcpjax.errors import ConfigError
from dcpjax.planner.models import Indexer, Latent, ModelShape

INDEX_ID_BYTES = 4
"""Of the index that names a row of the cache."""
IO_BYTES = 2
"""Of a value of queries and outputs."""


def attention_flops(heads: int, rows: int, d_qk: int, d_v: int) -> int:
    """Operations of one query token that attends to ``rows`` tokens with ``heads`` heads."""
    return 2 * heads * rows * (d_qk + d_v)


def attention_bytes(heads: int, rows: int, d_qk: int, d_v: int, row_bytes: int) -> int:
    """Bytes of one query token that reads ``rows`` rows once for all its heads."""
    return rows * (row_bytes + INDEX_ID_BYTES) + IO_BYTES * heads * (d_qk + d_v)


def attention_intensity(heads: int, rows: int, d_qk: int, d_v: int, row_bytes: int) -> float:
    """FLOP per byte when ``heads`` heads share each read of a row: 26 for TP8, 191 for PCP."""
    flops = attention_flops(heads, rows, d_qk, d_v)
    return flops / attention_bytes(heads, rows, d_qk, d_v, row_bytes)


def model_intensity(model: ModelShape, heads: int, ranks: int = 1) -> float:
    """As :func:`attention_intensity` for a model's sparse attention in ``fp8_ds_mla``.

    Args:
        ranks: that share the tokens of a sequence, and so the chosen rows.
    """
    latent, indexer = _sparse(model)
    row_bytes = latent_token_bytes(latent.kv_rank, latent.rope_dim, FP8_DS_MLA)
    rows = indexer.topk // ranks
    return attention_intensity(heads, rows, latent.key_width, latent.kv_rank, row_bytes)


def indexer_flops(model: ModelShape, tokens: float) -> float:
    """Operations of one query token that scores ``tokens`` tokens in one layer."""
    _, indexer = _sparse(model)
    return 2 * indexer.heads * indexer.head_dim * tokens


def indexer_crossover(model: ModelShape, *, heads: int, ranks: int = 1) -> float:
    """Prompt length from which the indexer takes more operations than sparse attention.

    For a prompt computed from its beginning, all layers, on one rank.

    Args:
        heads: query heads of the rank (tensor parallel) or that it computes per eighth of the
            tokens; with PCP all heads, of a ``ranks``-th of the tokens.
        ranks: that share the indexer's work (1: each repeats it).
    """
    latent, indexer = _sparse(model)
    attention = attention_flops(heads, indexer.topk, latent.key_width, latent.kv_rank)
    attention_per_token = model.num_layers * attention / ranks
    # A query at position p scores p tokens: half of the prompt on average.
    scores_per_token = model.index_layers * indexer_flops(model, 0.5) / ranks
    return attention_per_token / scores_per_token


def index_read_crossover(model: ModelShape) -> float:
    """Context from which a decode step reads more index keys than rows: 37.8K for GLM-5.2."""
    latent, indexer = _sparse(model)
    row_bytes = latent_token_bytes(latent.kv_rank, latent.rope_dim, FP8_DS_MLA)
    index_bytes = index_token_bytes(indexer.head_dim, FP8_DS_MLA)
    return model.num_layers * indexer.topk * row_bytes / (model.index_layers * index_bytes)


def _sparse(model: ModelShape) -> tuple[Latent, Indexer]:
    if model.latent is None or model.indexer is None:
        raise ConfigError("the model has sparse latent attention", model=model.name)
    return model.latent, model.indexer
