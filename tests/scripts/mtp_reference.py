"""The MTP layer as loops over NumPy rows, from the published description; one sequence, float64.

It knows the tensors by their published names and owes nothing to ``scripts.tiny_glm``'s functions.
"""

from collections.abc import Mapping

import numpy as np

from scripts.tiny_glm.config import GlmConfig

Tensors = Mapping[str, np.ndarray]


class MtpReference:
    def __init__(self, tensors: Tensors, config: GlmConfig) -> None:
        self.config = config
        self.embedding = tensors["model.embed_tokens.weight"].astype(np.float64)
        self.head = tensors["lm_head.weight"].astype(np.float64)
        prefix = f"model.layers.{config.num_hidden_layers}."
        self.tensors = {
            name.removeprefix(prefix): value.astype(np.float64)
            for name, value in tensors.items()
            if name.startswith(prefix)
        }

    def drafts(self, hidden: np.ndarray, tokens: list[int], steps: int) -> np.ndarray:
        """Logits [rows, steps, vocabulary]; later steps of a row take the row's own best tokens.

        Args:
            hidden: of the target, one row per token but the last.
            tokens: one more than there are rows.
        """
        inputs = [self._input(row, tokens[place + 1], place) for place, row in enumerate(hidden)]
        caches = [self._cache(x, position) for position, x in enumerate(inputs)]
        return np.stack([self._row(x, row, caches, steps) for row, x in enumerate(inputs)])

    def _row(self, x: np.ndarray, row: int, caches: list, steps: int) -> np.ndarray:
        chosen = self._choose(x, row, caches)
        logits = []
        for position in range(row, row + steps):
            hidden = self._layer(x, position, [caches[key] for key in chosen])
            logits.append(self.head @ hidden)
            x = self._input(hidden, int(logits[-1].argmax()), position + 1)
        return np.stack(logits)

    def _input(self, hidden: np.ndarray, token: int, position: int) -> np.ndarray:
        embedded = self.embedding[token] if position else np.zeros_like(hidden)
        pair = [self._norm("enorm", embedded), self._norm("hnorm", hidden)]
        return self.tensors["eh_proj.weight"] @ np.concatenate(pair)

    def _cache(self, x: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Latent, rope key and indexer key."""
        config = self.config
        normed = self._norm("input_layernorm", x)
        compressed = self._product("self_attn.kv_a_proj_with_mqa", normed)
        latent = self._norm("self_attn.kv_a_layernorm", compressed[: config.kv_lora_rank], 1e-6)
        rope = self._rotate(compressed[config.kv_lora_rank :], position)
        key = self._product("self_attn.indexer.wk", normed)
        key = (key - key.mean()) / np.sqrt(key.var() + 1e-6)
        key = key * self.tensors["self_attn.indexer.k_norm.weight"]
        key = key + self.tensors["self_attn.indexer.k_norm.bias"]
        return latent, rope, self._rotate_first(key, position)

    def _choose(self, x: np.ndarray, row: int, caches: list) -> list[int]:
        config = self.config
        normed = self._norm("input_layernorm", x)
        queries = self._product("self_attn.indexer.wq_b", self._residual(normed))
        queries = queries.reshape(config.index_n_heads, config.index_head_dim)
        weights = self._product("self_attn.indexer.weights_proj", normed)
        scores = []
        for _, _, key in caches[: row + 1]:
            products = [float(self._rotate_first(query, row) @ key) for query in queries]
            scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
            scores.append(float(weights @ np.maximum(products, 0.0)) * scale)
        best = sorted(range(row + 1), key=lambda key: (-scores[key], key))
        return best[: config.index_topk]

    def _layer(self, x: np.ndarray, position: int, caches: list) -> np.ndarray:
        normed = self._norm("input_layernorm", x)
        x = x + self._attend(normed, position, caches)
        x = x + self._experts(self._norm("post_attention_layernorm", x))
        return self._norm("shared_head.norm", x)

    def _attend(self, normed: np.ndarray, position: int, caches: list) -> np.ndarray:
        config = self.config
        nope, width = config.qk_nope_head_dim, config.qk_nope_head_dim + config.v_head_dim
        queries = self._product("self_attn.q_b_proj", self._residual(normed))
        outputs = []
        for head, query in enumerate(queries.reshape(config.num_attention_heads, -1)):
            rows = self.tensors["self_attn.kv_b_proj.weight"][head * width : (head + 1) * width]
            rotated = self._rotate(query[nope:], position)
            scores = [
                (query[:nope] @ (rows[:nope] @ latent) + rotated @ rope)
                * (nope + config.qk_rope_head_dim) ** -0.5
                for latent, rope, _ in caches
            ]
            weights = np.exp(np.asarray(scores) - max(scores))
            values = np.stack([rows[nope:] @ latent for latent, _, _ in caches])
            outputs.append(weights @ values / weights.sum())
        return self._product("self_attn.o_proj", np.concatenate(outputs))

    def _experts(self, x: np.ndarray) -> np.ndarray:
        config = self.config
        scores = 1 / (1 + np.exp(-self._product("mlp.gate", x)))
        choice = scores + self.tensors["mlp.gate.e_score_correction_bias"]
        chosen = np.argsort(-choice, kind="stable")[: config.num_experts_per_tok]
        total = scores[chosen].sum()
        routed = sum(
            scores[expert] / total * self._gated(f"mlp.experts.{expert}", x) for expert in chosen
        )
        return routed * config.routed_scaling_factor + self._gated("mlp.shared_experts", x)

    def _gated(self, name: str, x: np.ndarray) -> np.ndarray:
        gate = self._product(f"{name}.gate_proj", x)
        inner = gate / (1 + np.exp(-gate)) * self._product(f"{name}.up_proj", x)
        return self._product(f"{name}.down_proj", inner)

    def _residual(self, normed: np.ndarray) -> np.ndarray:
        compressed = self._product("self_attn.q_a_proj", normed)
        return self._norm("self_attn.q_a_layernorm", compressed, 1e-6)

    def _product(self, name: str, x: np.ndarray) -> np.ndarray:
        return self.tensors[f"{name}.weight"] @ x

    def _norm(self, name: str, x: np.ndarray, eps: float | None = None) -> np.ndarray:
        scale = np.sqrt(np.mean(x * x) + (self.config.rms_norm_eps if eps is None else eps))
        return x / scale * self.tensors[f"{name}.weight"]

    def _rotate_first(self, x: np.ndarray, position: int) -> np.ndarray:
        width = self.config.qk_rope_head_dim
        return np.concatenate([self._rotate(x[:width], position), x[width:]])

    def _rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        """Neighbours are pairs, here complex numbers."""
        frequency = self.config.rope_theta ** (-np.arange(0, len(x), 2) / len(x))
        turned = (x[0::2] + 1j * x[1::2]) * np.exp(1j * position * frequency)
        return np.concatenate([turned.real, turned.imag])
