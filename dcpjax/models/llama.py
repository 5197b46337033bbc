"""The Llama family (Llama 2/3, SmolLM2, Qwen2, Qwen3) as seen by one rank inside ``shard_map``.

Parameters are declared with their global, padded shapes and logical axes; at run time the modules hold one
rank's share. Hidden states are whole on every rank between layers.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Integer, Shaped

from dcpjax.attention.block import Block
from dcpjax.attention.decode import decode_attention
from dcpjax.attention.prefill import gather_tokens, prefill_attention
from dcpjax.config import ModelConfig
from dcpjax.mesh import ALL_RANKS, TP, HeadLayout, padded
from dcpjax.models.layers import (
    MLP,
    Embedding,
    RMSNorm,
    matmul,
    parameter,
    rope_angles,
    rope_frequencies,
    rotate,
)


@dataclass(frozen=True)
class Sharding:
    """How a model is spread over the mesh, and how its ranks exchange partial attention."""

    heads: HeadLayout
    comm_backend: str = "ag_rs"
    prefill_gather: str = "none"

    @property
    def ranks(self) -> int:
        return self.heads.groups * self.heads.dcp

    @property
    def q_axis(self) -> str:
        """Logical axis of query heads: with gathered queries each DCP rank has the group's weights."""
        return "q_heads" if self.prefill_gather == "none" else "group_q_heads"


class Attention(nnx.Module):
    """Projections around the attention of :mod:`dcpjax.attention`."""

    def __init__(self, config: ModelConfig, sharding: Sharding, dtype: DTypeLike) -> None:
        heads, width = sharding.heads, config.hidden_size
        num_q, num_kv = heads.groups * heads.group_heads, heads.groups * heads.group_kv_heads
        q_axes, kv_axes = (sharding.q_axis, "head_dim"), ("kv_heads", "head_dim")
        self.q = parameter((width, num_q, config.head_dim), ("embed", *q_axes), dtype)
        self.k = parameter((width, num_kv, config.head_dim), ("embed", *kv_axes), dtype)
        self.v = parameter((width, num_kv, config.head_dim), ("embed", *kv_axes), dtype)
        self.o = parameter((num_q, config.head_dim, width), (*q_axes, "embed"), dtype)
        self.has_bias, self.has_norm = config.has_qkv_bias, config.has_qk_norm
        if self.has_bias:
            self.q_bias = parameter((num_q, config.head_dim), q_axes, dtype)
            self.k_bias = parameter((num_kv, config.head_dim), kv_axes, dtype)
            self.v_bias = parameter((num_kv, config.head_dim), kv_axes, dtype)
        if self.has_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
        self.scale = config.head_dim**-0.5
        self.sharding = sharding

    def project(
        self, x: Float[Array, "T E"], angles: tuple[Array, Array]
    ) -> tuple[Float[Array, "T h D"], Float[Array, "T k D"], Float[Array, "T k D"]]:
        """Queries, keys and values of this rank's heads, rotated."""
        q, k, v = (matmul(x, weight[...]) for weight in (self.q, self.k, self.v))
        if self.has_bias:
            q, k, v = q + self.q_bias[...][None], k + self.k_bias[...][None], v + self.v_bias[...][None]
        if self.has_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, angles), rotate(k, angles), v

    def by_heads(
        self, x: Float[Array, "T E"], angles: tuple[Array, Array], blocks: list[Block], pool: Array, layer: int
    ) -> tuple[Float[Array, "T E"], Array]:
        """Every rank has all tokens, its share of the heads; blocks one after the other."""
        q, k, v = self.project(x, angles)
        outs, start = [], 0
        for block in blocks:
            part = slice(start, start := start + block.rows * block.width)
            out, pool = decode_attention(
                q[part],
                k[part],
                v[part],
                pool,
                layer,
                block,
                scale=self.scale,
                comm_backend=self.sharding.comm_backend,
                heads_gathered=self.sharding.prefill_gather != "none",
            )
            outs.append(out.astype(x.dtype))
        out = jnp.concatenate(outs).reshape(x.shape[0], -1)
        return lax.psum(matmul(out, self._output_rows(blocks[0])), ALL_RANKS), pool

    def _output_rows(self, block: Block) -> Float[Array, "hD E"]:
        """The output projection's rows of this rank's heads."""
        rows = self.o[...].reshape(-1, self.o.shape[-1])
        if self.sharding.q_axis == "q_heads":
            return rows
        share = rows.shape[0] // self.sharding.heads.dcp
        return lax.dynamic_slice_in_dim(rows, block.rank.astype(jnp.int32) * share, share)

    def by_tokens(
        self, x: Float[Array, "T E"], angles: tuple[Array, Array], block: Block, pool: Array, layer: int
    ) -> tuple[Float[Array, "T E"], Array]:
        """Every rank has all heads of its group, its share of the block's tokens."""
        own = block.take_own(x)
        own_angles = tuple(block.take_own(angle).reshape(-1, 1, angle.shape[-1]) for angle in angles)
        q, k, v = self.project(own.reshape(-1, own.shape[-1]), own_angles)
        by_segment = lambda values: values.reshape(*own.shape[:2], *values.shape[1:])  # noqa: E731
        out, pool = prefill_attention(
            by_segment(q),
            by_segment(k),
            by_segment(v),
            pool,
            layer,
            block,
            scale=self.scale,
            comm_backend=self.sharding.comm_backend,
        )
        rows = self.o[...].reshape(-1, self.o.shape[-1])
        projected = matmul(out.astype(x.dtype).reshape(-1, rows.shape[0]), rows)
        return gather_tokens(by_segment(lax.psum(projected, TP)), block).reshape(x.shape), pool

    def __call__(
        self, x: Float[Array, "T E"], angles: tuple[Array, Array], blocks: list[Block], pool: Array, layer: int
    ) -> tuple[Float[Array, "T E"], Array]:
        """Attention of all blocks; those whose tokens split evenly over the ranks go by tokens if so set."""
        if self.sharding.prefill_gather == "none":
            return self.by_heads(x, angles, blocks, pool, layer)
        outs, start = [], 0
        for block in blocks:
            part = slice(start, start := start + block.rows * block.width)
            here = tuple(angle[part] for angle in angles)
            if block.sharding.splits(block.width):
                out, pool = self.by_tokens(x[part], here, block, pool, layer)
            else:
                out, pool = self.by_heads(x[part], here, [block], pool, layer)
            outs.append(out)
        return jnp.concatenate(outs), pool


class DecoderLayer(nnx.Module):
    def __init__(self, config: ModelConfig, sharding: Sharding, dtype: DTypeLike) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, sharding, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        inner = padded(config.intermediate_size, sharding.ranks)
        self.mlp = MLP(config.hidden_size, inner, dtype)

    def __call__(
        self, x: Float[Array, "T E"], angles: tuple[Array, Array], blocks: list[Block], pool: Array, layer: int
    ) -> tuple[Float[Array, "T E"], Array]:
        attended, pool = self.attention(self.attention_norm(x), angles, blocks, pool, layer)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), pool


class Llama(nnx.Module):
    """Tokens to hidden states, hidden states to logits."""

    def __init__(self, config: ModelConfig, sharding: Sharding, dtype: DTypeLike) -> None:
        vocab = padded(config.vocab_size, sharding.ranks)
        self.embedding = Embedding(vocab, config.hidden_size, dtype)
        self.layers = nnx.List(DecoderLayer(config, sharding, dtype) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.head = Embedding(vocab, config.hidden_size, dtype)
        self.is_tied = config.tie_word_embeddings
        self.frequencies = rope_frequencies(config)

    def hidden_states(
        self,
        tokens: Integer[Array, " T"],
        blocks: list[Block],
        pool: Shaped[Array, "pages L k P W"],
        rank: Integer[Array, ""],
    ) -> tuple[Float[Array, "T E"], Shaped[Array, "pages L k P W"]]:
        """Run all layers over the tokens of all blocks; their keys and values go into the pool."""
        x = self.embedding(tokens, rank)
        angles = rope_angles(jnp.concatenate([block.positions for block in blocks]), self.frequencies)
        for index, layer in enumerate(self.layers):
            x, pool = layer(x, angles, blocks, pool, index)
        return x, pool

    def logits(self, x: Float[Array, "R E"]) -> Float[Array, "R v"]:
        """This rank's share of the vocabulary's logits, float32."""
        head = self.embedding if self.is_tied else self.head
        return head.logits(self.norm(x))



