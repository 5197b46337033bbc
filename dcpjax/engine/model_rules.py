"""What settings, a model and a kind of device cannot do together, refused before all else."""

from collections.abc import Mapping

from dcpjax.cache.parts import CachePart
from dcpjax.config import (
    EngineConfig,
    GlmConfig,
    ModelConfig,
    SpeculativeConfig,
    broken_neuron_rules,
)
from dcpjax.errors import ConfigError, UnsupportedCombination
from dcpjax.models.experts import rank_experts


def check_neuron(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse what Neuron cannot do."""
    if config.nnodes > 1:
        raise UnsupportedCombination(
            "an engine on Neuron is one process: nnodes is 1",
            nnodes=config.nnodes,
            device="neuron",
        )
    if config.step_form == "dynamic":
        raise UnsupportedCombination(
            "Neuron compiles no loop of unknown length, so step_form is 'static' or 'unrolled'",
            step_form=config.step_form,
            device="neuron",
        )
    if config.dcp_comm_backend == "a2a":
        raise UnsupportedCombination(
            "Neuron exchanges by all-gather and reduce-scatter, so dcp_comm_backend is 'ag_rs'",
            dcp_comm_backend=config.dcp_comm_backend,
            device="neuron",
        )
    if config.residency is not None:
        raise UnsupportedCombination(
            "PCP has steps of the dynamic form alone, and Neuron compiles none",
            prefill_context_parallel_size=config.prefill_context_parallel_size,
            device="neuron",
        )
    transfers_kv = config.kv_transfer_config is not None
    for error in broken_neuron_rules(config, model, transfers_kv=transfers_kv):
        raise error


def check_attention(config: EngineConfig, model: ModelConfig, *, is_static: bool) -> None:
    """Refuse a form of prompts that the model or the form of steps does not have."""
    asked = config.attention_config and config.attention_config.sparse_mla_force_mqa
    if asked is None:
        return
    if not isinstance(model, GlmConfig):
        raise UnsupportedCombination(
            "sparse_mla_force_mqa says how prompts meet latents, and the model caches none",
            sparse_mla_force_mqa=asked,
            architecture=model.architecture,
        )
    if is_static and not asked:
        raise UnsupportedCombination(
            "steps of the static form never expand latents: they would expand those of a whole "
            "page table, however short a prompt is; leave sparse_mla_force_mqa out, or true",
            sparse_mla_force_mqa=asked,
            step_form=config.step_form,
        )


def check_speculation(
    speculation: SpeculativeConfig, model: ModelConfig, max_model_len: int
) -> None:
    """Refuse drafts that are longer than any sequence, or of a layer that the model lacks."""
    if speculation.width > max_model_len:
        raise ConfigError(
            "num_speculative_tokens is below max_model_len",
            num_speculative_tokens=speculation.num_speculative_tokens,
            max_model_len=max_model_len,
        )
    has_draft_layer = isinstance(model, GlmConfig) and model.num_draft_layers > 0
    if speculation.method == "mtp" and not has_draft_layer:
        raise UnsupportedCombination(
            "the speculation method 'mtp' needs a model with a draft layer; 'ngram' needs none",
            method=speculation.method,
            architecture=model.architecture,
        )


def check_latent_model(config: EngineConfig, model: GlmConfig) -> None:
    """Refuse what a model with a latent cache cannot do, and experts that come out uneven."""
    if config.prefill_gather == "q":
        raise UnsupportedCombination(
            "prefill_gather='q' splits a chunk's tokens over the ranks that share a KV head, "
            "and a model with a latent cache computes them all on each rank",
            prefill_gather=config.prefill_gather,
            architecture=model.architecture,
        )
    if model.experts is not None:
        rank_experts(model.experts.num_experts, config.num_ranks)


def check_pcp_model(
    config: EngineConfig, model: ModelConfig, extents: Mapping[CachePart, tuple[int, int]]
) -> None:
    """Refuse what PCP ranks cannot do for a model.

    Args:
        extents: rows and columns of a page, by part of the cache.
    """
    pcp = config.prefill_context_parallel_size
    if config.residency == "layer_split" and pcp > model.num_layers:
        raise UnsupportedCombination(
            "prefill_kv='layer_split' gives each PCP rank a layer at least",
            prefill_context_parallel_size=pcp,
            num_layers=model.num_layers,
        )
    if config.weight_dcp > 1 and not isinstance(model, GlmConfig):
        raise UnsupportedCombination(
            "tokens are spread over PCP and tensor parallel ranks only where all heads share "
            "one latent; else decode_context_parallel_size is 1 or the PCP size",
            decode_context_parallel_size=config.decode_context_parallel_size,
            prefill_context_parallel_size=pcp,
            architecture=model.architecture,
        )
    is_cut = config.residency == "sharded" and config.interleave != config.block_size
    is_whole_page = any(
        rows != config.block_size and not part.is_replicated for part, (rows, _) in extents.items()
    )
    if is_cut and is_whole_page:
        raise UnsupportedCombination(
            "scaled indexer keys are gathered as whole pages, so with PCP "
            "cp_kv_cache_interleave_size is block_size",
            kv_cache_dtype=config.kv_cache_dtype,
            cp_kv_cache_interleave_size=config.interleave,
            block_size=config.block_size,
        )
