"""The named tensors of a model with a latent cache, as GLM-5 and DeepSeek-V3 publish them."""

from dcpjax.config import GlmConfig

NamedShapes = dict[str, tuple[int, ...]]


def glm_layer_tensors(config: GlmConfig, layer: int) -> NamedShapes:
    """Names within a layer, and shapes; the draft layer is layer ``num_layers``."""
    norm = (config.hidden_size,)
    shapes: NamedShapes = {"input_layernorm.weight": norm}
    shapes |= _attention_tensors(config)
    if config.has_indexer(layer):
        shapes |= _indexer_tensors(config)
    shapes["post_attention_layernorm.weight"] = norm
    if config.has_experts(layer):
        return shapes | _expert_tensors(config)
    return shapes | _mlp_tensors("mlp", config.hidden_size, config.intermediate_size)


def draft_tensors(config: GlmConfig) -> NamedShapes:
    """What the draft layer has beside a decoder layer's tensors."""
    hidden = config.hidden_size
    return {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
    }


DRAFT_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Of the model's own embedding and head, which a draft layer may carry; they are not read."""


def _attention_tensors(config: GlmConfig) -> NamedShapes:
    hidden, heads = config.hidden_size, config.num_heads
    q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    return {
        "self_attn.q_a_proj.weight": (q_rank, hidden),
        "self_attn.q_a_layernorm.weight": (q_rank,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }


def _indexer_tensors(config: GlmConfig) -> NamedShapes:
    indexer = config.indexer
    assert indexer is not None
    return {
        "self_attn.indexer.wq_b.weight": (
            indexer.num_heads * indexer.head_dim,
            config.q_lora_rank,
        ),
        "self_attn.indexer.wk.weight": (indexer.head_dim, config.hidden_size),
        "self_attn.indexer.k_norm.weight": (indexer.head_dim,),
        "self_attn.indexer.k_norm.bias": (indexer.head_dim,),
        "self_attn.indexer.weights_proj.weight": (indexer.num_heads, config.hidden_size),
    }


def _expert_tensors(config: GlmConfig) -> NamedShapes:
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    shapes: NamedShapes = {
        "mlp.gate.weight": (experts.num_experts, hidden),
        "mlp.gate.e_score_correction_bias": (experts.num_experts,),
    }
    for expert in range(experts.num_experts):
        shapes |= _mlp_tensors(f"mlp.experts.{expert}", hidden, experts.width)
    if experts.num_shared:
        shapes |= _mlp_tensors("mlp.shared_experts", hidden, experts.num_shared * experts.width)
    return shapes


def _mlp_tensors(prefix: str, hidden: int, inner: int) -> NamedShapes:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }
