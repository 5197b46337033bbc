"""The config.json of models with a latent cache (GLM-5, DeepSeek-V3, V3.2) as a GlmConfig."""

from collections.abc import Mapping, Sequence
from typing import Any

from dcpjax.config import ExpertsConfig, GlmConfig, IndexerConfig, YarnScaling
from dcpjax.errors import CheckpointError
from dcpjax.models.block_scales import BLOCK
from dcpjax.models.config_values import (
    DECODER_KEYS,
    KeyRules,
    Values,
    boolean,
    has_only,
    integer,
    number,
    refuse,
    rope_kind,
    rope_settings,
    rope_theta,
)

ARCHITECTURES = ("GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM")

_KEYS = DECODER_KEYS | KeyRules(
    read=frozenset(
        "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim "
        "moe_intermediate_size n_routed_experts n_shared_experts num_experts_per_tok n_group "
        "topk_group routed_scaling_factor norm_topk_prob first_k_dense_replace "
        "num_nextn_predict_layers rope_interleave quantization_config".split()
    ),
    fixed={
        "model_type": ("glm_moe_dsa", "deepseek_v32", "deepseek_v3"),
        "attention_bias": (False, None),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
        "moe_layer_freq": (1, None),
        "moe_router_dtype": ("float32", None),
    },
    # What head_dim says is no width of these models: GLM-5.2 has 192 there, and rotates 64 columns.
    harmless=frozenset(
        "head_dim auto_map aux_loss_alpha ep_size output_router_logits router_aux_loss_coef "
        "seq_aux".split()
    ),
)
_SPARSE_KEYS = KeyRules(
    read=frozenset(
        "index_n_heads index_head_dim index_topk indexer_types index_topk_pattern index_topk_freq "
        "index_skip_topk_offset index_share_for_mtp_iteration indexer_rope_interleave "
        "mlp_layer_types layer_types".split()
    )
)
_QUANTIZATION_KEYS = KeyRules(
    fixed={
        "quant_method": ("fp8",),
        "weight_block_size": ([BLOCK, BLOCK],),
        "activation_scheme": ("dynamic", None),
        "fmt": ("e4m3", None),
        "scale_fmt": ("ue8m0", "float", None),
        "dequantize": (True, False, None),
        "expert_dtype": ("fp8", None),
        "modules_to_convert": ([], None),
    },
    # Which tensors are converted is seen from their own types.
    harmless=frozenset({"modules_to_not_convert", "ignored_layers"}),
)
_ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
        }
    ),
}
_FULL = {"full": True, "F": True, "shared": False, "S": False}
_SPARSE = {"sparse": True, "dense": False}


def read_glm(values: Values) -> GlmConfig:
    """The model that ``values`` describe, without its special tokens.

    Raises:
        CheckpointError: there is something not understood.
    """
    architecture = values["architectures"][0]
    is_sparse = architecture != "DeepseekV3ForCausalLM"
    _check_keys(values, is_sparse)
    num_layers = integer(values, "num_hidden_layers")
    config = GlmConfig(
        architecture=architecture,
        vocab_size=integer(values, "vocab_size"),
        hidden_size=integer(values, "hidden_size"),
        intermediate_size=integer(values, "intermediate_size"),
        num_layers=num_layers,
        num_heads=integer(values, "num_attention_heads"),
        q_lora_rank=_q_lora_rank(values),
        kv_lora_rank=integer(values, "kv_lora_rank"),
        qk_nope_head_dim=integer(values, "qk_nope_head_dim"),
        qk_rope_head_dim=integer(values, "qk_rope_head_dim"),
        v_head_dim=integer(values, "v_head_dim"),
        max_position_embeddings=integer(values, "max_position_embeddings"),
        experts=_experts(values, num_layers),
        indexer=_indexer(values, architecture, num_layers) if is_sparse else None,
        num_draft_layers=integer(values, "num_nextn_predict_layers", 0),
        rms_norm_eps=number(values, "rms_norm_eps"),
        rope_theta=rope_theta(values),
        rope_scaling=_rope_scaling(values),
        is_rope_interleaved=boolean(values, "rope_interleave", True),
        tie_word_embeddings=bool(values.get("tie_word_embeddings")),
    )
    _check_widths(values, config)
    return config


def _check_keys(values: Values, is_sparse: bool) -> None:
    refused = (_KEYS | _SPARSE_KEYS if is_sparse else _KEYS).refused(values)
    if is_sparse and not has_only(values.get("layer_types"), "indexed_attention"):
        refused["layer_types"] = values["layer_types"]
    refuse(refused)
    _check_quantization(values.get("quantization_config"))


def _check_quantization(settings: Any) -> None:
    if settings is None:
        return
    values: dict[str, Any] = settings if isinstance(settings, dict) else {"found": settings}
    named = {"quant_method": None, "weight_block_size": None} | values  # these may not be left out
    refused = _QUANTIZATION_KEYS.refused(named)
    if refused:
        raise CheckpointError(
            f"quantization_config is of FP8 weights (e4m3) in blocks of {BLOCK} x {BLOCK}",
            refused=refused,
        )


def _q_lora_rank(values: Values) -> int:
    if values.get("q_lora_rank") is None:
        raise CheckpointError(
            "queries are projected through a latent: q_lora_rank is given", q_lora_rank=None
        )
    return integer(values, "q_lora_rank")


def _check_widths(values: Values, config: GlmConfig) -> None:
    """What follows from other widths is that where it is given."""
    derived = {
        "num_key_value_heads": config.num_heads,
        "qk_head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim,
    }
    wrong = {key: values[key] for key in derived if values.get(key) not in (None, derived[key])}
    if wrong:
        raise CheckpointError(
            "keys are expanded for every query head, from columns without and with rotation",
            found=wrong,
            expected={key: derived[key] for key in wrong},
        )


def _experts(values: Values, num_layers: int) -> ExpertsConfig | None:
    layers = _expert_layers(values, num_layers)
    if not layers:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=integer(values, "n_routed_experts"),
        num_per_token=integer(values, "num_experts_per_tok"),
        width=integer(values, "moe_intermediate_size"),
        num_shared=integer(values, "n_shared_experts", 0),
        num_groups=integer(values, "n_group"),
        groups_per_token=integer(values, "topk_group"),
        scale=number(values, "routed_scaling_factor"),
        is_normalised=boolean(values, "norm_topk_prob"),
    )


def _expert_layers(values: Values, num_layers: int) -> tuple[int, ...]:
    kinds = values.get("mlp_layer_types")
    if kinds is not None:
        return _chosen(kinds, _SPARSE, num_layers, "mlp_layer_types")
    return tuple(range(integer(values, "first_k_dense_replace"), num_layers))


def _indexer(values: Values, architecture: str, num_layers: int) -> IndexerConfig:
    return IndexerConfig(
        num_heads=integer(values, "index_n_heads"),
        head_dim=integer(values, "index_head_dim"),
        top_k=integer(values, "index_topk"),
        full_layers=_full_layers(values, num_layers),
        is_rope_interleaved=boolean(
            values, "indexer_rope_interleave", architecture == "GlmMoeDsaForCausalLM"
        ),
        shares_with_drafts=boolean(values, "index_share_for_mtp_iteration", False),
    )


def _full_layers(values: Values, num_layers: int) -> tuple[int, ...]:
    """Layers with an indexer of their own: as listed, as the pattern says, or every so many."""
    for key in ("indexer_types", "index_topk_pattern"):
        if values.get(key) is not None:
            return _chosen(values[key], _FULL, num_layers, key)
    every = integer(values, "index_topk_freq", 1)
    offset = integer(values, "index_skip_topk_offset", 2)
    if every < 1:
        raise CheckpointError("index_topk_freq is at least 1", index_topk_freq=every)
    return tuple(layer for layer in range(num_layers) if max(layer - offset + 1, 0) % every == 0)


def _chosen(kinds: Any, words: Mapping[str, bool], num_layers: int, key: str) -> tuple[int, ...]:
    """The layers for which ``words`` says True; ``kinds`` has a word, or a letter, for each."""
    listed: Sequence[Any] = kinds if isinstance(kinds, list | str) else ()
    if len(listed) != num_layers or any(str(kind) not in words for kind in listed):
        raise CheckpointError(
            f"{key} in config.json has one of {', '.join(words)} for each layer",
            num_hidden_layers=num_layers,
            **{key: kinds},
        )
    return tuple(layer for layer, kind in enumerate(listed) if words[kind])


def _rope_scaling(values: Values) -> YarnScaling | None:
    rope = rope_settings(values)
    if rope_kind(rope, _ROPE_KEYS) == "default":
        return None
    mscale, all_dim = number(rope, "mscale", 1.0), number(rope, "mscale_all_dim", 0.0)
    # With one of them alone, the published model and transformers scale differently.
    if (all_dim and not rope.get("mscale")) or (not all_dim and mscale != 1):
        raise CheckpointError("mscale and mscale_all_dim are given together", rope=rope)
    return YarnScaling(
        factor=number(rope, "factor"),
        original_max_position=integer(rope, "original_max_position_embeddings"),
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        mscale=mscale if all_dim else 0.0,
        mscale_all_dim=all_dim,
    )
