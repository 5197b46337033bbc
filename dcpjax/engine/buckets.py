"""The sizes that steps are compiled for. Host only."""

from dcpjax.config import EngineConfig, GlmConfig, ModelConfig

LEAST_CONTEXT = 2048
"""Tokens of the shortest page table that steps are compiled for, where there are several."""


def decode_buckets(least: int, most: int) -> tuple[int, ...]:
    """Numbers of decode rows that are compiled: powers of two from ``least``, and ``most``."""
    sizes = [least]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return (*sizes, max(most, least)) if sizes[-1] < most else tuple(sizes)


def prefill_buckets(config: EngineConfig) -> tuple[tuple[int, int], ...]:
    """(rows, width) of the prompt blocks: one long chunk, a short one, several short ones.

    Widths are multiples of ranks · interleave, so that every window holds as many tokens of each
    rank; with PCP, of two chunks for each rank.
    """
    cycle = config.decode_context_parallel_size * config.interleave
    if config.residency is not None:  # two chunks for each rank, whoever keeps the tokens
        cycle = 2 * config.prefill_context_parallel_size

    def whole(width: int) -> int:
        return max(cycle, width // cycle * cycle)

    longest = whole(config.max_num_batched_tokens)
    short = whole(min(64, longest))
    several = min(4, config.max_num_seqs, longest // short)
    return tuple(dict.fromkeys([(1, short), (max(1, several), short), (1, longest)]))


def expanded_contexts(
    config: EngineConfig, model: ModelConfig, longest: int, *, is_static: bool
) -> tuple[int, ...]:
    """``StepShapes.expanded_contexts`` of a model, for sequences up to ``longest``.

    A sparse model has both forms of prompts: expanded ones would attend to all tokens, which is
    right until there are more than the indexer chooses.

    Args:
        is_static: steps have the static form, see :func:`check_attention`.
    """
    attention = config.attention_config
    is_forced = attention is not None and attention.sparse_mla_force_mqa
    if is_static or is_forced or not isinstance(model, GlmConfig):
        return (0,)
    if model.indexer is None or longest <= model.indexer.top_k:
        return (longest,)
    return (model.indexer.top_k, 0)


def least_expanded_width(config: EngineConfig, model: ModelConfig) -> int:
    """``StepShapes.least_expanded_width`` of a model: from there on it takes fewer products.

    With latents of R columns, keys of Dn and values of Dv, a prior token costs ``R · (Dn + Dv)`` to
    expand for a head and a chunk, and saves ``2 R − Dn − Dv`` for each query of the chunk. A sparse
    model also saves its indexer's scores, and reads of single rows: it gains at any width.
    """
    attention = config.attention_config
    is_asked = attention is not None and attention.sparse_mla_force_mqa is not None
    if is_asked or not isinstance(model, GlmConfig) or model.indexer is not None:
        return 1
    made = model.qk_nope_head_dim + model.v_head_dim
    saved = 2 * model.kv_lora_rank - made
    chunks = 2 * config.prefill_context_parallel_size if config.residency is not None else 1
    if saved <= 0:
        return config.max_num_batched_tokens + 1
    return chunks * (model.kv_lora_rank * made // saved + 1)


def context_buckets(longest: int) -> tuple[int, ...]:
    """Lengths of sequences that steps are compiled for: each twice the one before, to the longest.

    A step reads all of its context, so it reads less than twice what it needs.
    """
    return decode_buckets(min(LEAST_CONTEXT, longest), longest)
