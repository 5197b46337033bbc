"""The shape of the tiny GLM: the published architecture with GLM-5.2's kind of index sharing.

Most widths differ from each other, so that a loader that mixes two of them up fails on shapes.
"""

from dataclasses import dataclass
from typing import Any, Literal

from scripts.tiny_glm.tokenizer import END, PAD, TOKEN_IDS, USER, VOCAB_SIZE

Indexer = Literal["full", "shared"]
A_NORM_EPS = 1e-6
"""Of q_a_layernorm and kv_a_layernorm, and of the indexer's LayerNorm: not the config's."""


EOS_IDS = [TOKEN_IDS[END], TOKEN_IDS[USER]]
"""An answer ends where the user's turn begins, as in the published models."""


@dataclass(frozen=True)
class GlmConfig:
    """Names as in config.json. ``num_hidden_layers`` does not count the MTP layer."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 128
    intermediate_size: int = 320
    moe_intermediate_size: int = 32
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 24
    qk_rope_head_dim: int = 16
    v_head_dim: int = 16
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 1
    index_n_heads: int = 16
    index_head_dim: int = 32
    index_topk: int = 32
    index_topk_freq: int = 3
    index_skip_topk_offset: int = 2
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e4
    max_position_embeddings: int = 8192

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mtp_layer(self) -> int:
        """Index of the MTP layer in tensor names."""
        return self.num_hidden_layers

    @property
    def indexer_types(self) -> list[Indexer]:
        return [self._indexer_type(layer) for layer in range(self.num_hidden_layers)]

    def has_indexer(self, layer: int) -> bool:
        """The MTP layer always has one of its own."""
        return layer == self.mtp_layer or self.indexer_types[layer] == "full"

    def is_sparse_mlp(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    def _indexer_type(self, layer: int) -> Indexer:
        after = max(layer - self.index_skip_topk_offset + 1, 0)
        return "full" if after % self.index_topk_freq == 0 else "shared"

    def to_json(self) -> dict[str, Any]:
        """config.json as published for GlmMoeDsaForCausalLM."""
        layers = self.num_hidden_layers
        dense = min(self.first_k_dense_replace, layers)
        return {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": "bfloat16",
            "eos_token_id": EOS_IDS,
            "first_k_dense_replace": self.first_k_dense_replace,
            "head_dim": self.qk_nope_head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "index_head_dim": self.index_head_dim,
            "index_n_heads": self.index_n_heads,
            "index_share_for_mtp_iteration": True,
            "index_skip_topk_offset": self.index_skip_topk_offset,
            "index_topk": self.index_topk,
            "index_topk_freq": self.index_topk_freq,
            "index_topk_pattern": None,
            "indexer_rope_interleave": True,
            "indexer_types": self.indexer_types,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "kv_lora_rank": self.kv_lora_rank,
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
            "moe_intermediate_size": self.moe_intermediate_size,
            "moe_layer_freq": 1,
            "moe_router_dtype": "float32",
            "n_group": self.n_group,
            "n_routed_experts": self.n_routed_experts,
            "n_shared_experts": self.n_shared_experts,
            "norm_topk_prob": True,
            "num_attention_heads": self.num_attention_heads,
            "num_experts_per_tok": self.num_experts_per_tok,
            "num_hidden_layers": layers,
            "num_key_value_heads": self.num_attention_heads,
            "num_nextn_predict_layers": 1,
            "pad_token_id": TOKEN_IDS[PAD],
            "q_lora_rank": self.q_lora_rank,
            "qk_head_dim": self.qk_head_dim,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_interleave": True,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "routed_scaling_factor": self.routed_scaling_factor,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": self.topk_group,
            "topk_method": "noaux_tc",
            "transformers_version": "5.12.0",
            "use_cache": True,
            "v_head_dim": self.v_head_dim,
            "vocab_size": self.vocab_size,
        }
