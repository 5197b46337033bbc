"""The Llama family (Llama 2/3, SmolLM2, Qwen2, Qwen3) as seen by one rank inside ``shard_map``.

Parameters are declared with their global, padded shapes and logical axes; at run time the modules
hold one rank's share. Hidden states are whole on every rank between layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Integer, Shaped

from dcpjax.attention.block import Block, split_blocks
from dcpjax.attention.decode import decode_attention, write_block
from dcpjax.attention.prefill import gather_tokens, prefill_attention
from dcpjax.cache.parts import KV
from dcpjax.cache.pool import Pools
from dcpjax.config import LlamaConfig
from dcpjax.form import repeat
from dcpjax.mesh import TP, padded
from dcpjax.models.layers import MLP, Embedding, RMSNorm, matmul, parameter, sum_ranks
from dcpjax.models.rope import Angles, rope_angles, rope_frequencies, rotate
from dcpjax.models.sharding import Sharding


@dataclass(frozen=True)
class _Part:
    """Blocks that are projected together, and this rank's share of their projections.

    By heads: the rank has all tokens, ``q`` [T, h, D] of its own heads. By tokens (one block): the
    rank has the tokens that it owns, ``q`` [B, S, H, D] of all heads of its group. ``own`` has keys
    and values [B, S, k, D] of the tokens that the rank keeps, per block.
    """

    blocks: tuple[Block, ...]
    by_tokens: bool
    q: Array
    own: tuple[tuple[Array, Array], ...]


class Attention(nnx.Module):
    """Projections around the attention of :mod:`dcpjax.attention`.

    ``qkv`` is one product: each rank's share has its query heads, its group's key heads, its
    group's value heads. Key and value heads are there once for every share that needs them.
    """

    def __init__(self, config: LlamaConfig, sharding: Sharding, dtype: DTypeLike) -> None:
        heads, width = sharding.heads, config.hidden_size
        q_axes = (sharding.q_axis, "head_dim")
        num_q = sharding.q_shares * sharding.share_q_heads
        num_qkv = num_q + 2 * sharding.q_shares * heads.group_kv_heads
        self.qkv = parameter((width, num_qkv, config.head_dim), ("embed", *q_axes), dtype)
        self.o = parameter((num_q, config.head_dim, width), (*q_axes, "embed"), dtype)
        self.has_bias, self.has_norm = config.has_qkv_bias, config.has_qk_norm
        if self.has_bias:
            self.qkv_bias = parameter((num_qkv, config.head_dim), q_axes, dtype)
        if self.has_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
        self.scale = config.head_dim**-0.5
        self.sharding = sharding

    def __call__(
        self,
        x: Float[Array, "T E"],
        angles: Angles,
        blocks: tuple[Block, ...],
        pool: Shaped[Array, "pages L k P W"],
        layer: Array,
    ) -> tuple[Float[Array, "T E"], Shaped[Array, "pages L k P W"]]:
        """Project, write everything into the pool, then attend.

        All writes of a layer come before its reads: a write between two reads makes XLA copy the
        pool, even if they touch different pages.
        """
        parts = self._project_blocks(x, angles, blocks)
        for part in parts:
            for block, (own_k, own_v) in zip(part.blocks, part.own, strict=True):
                pool = write_block(pool, layer, block, jnp.concatenate([own_k, own_v], axis=-1))
        return jnp.concatenate([self._attend(part, pool, layer) for part in parts]), pool

    def _project_blocks(self, x: Array, angles: Angles, blocks: tuple[Block, ...]) -> list[_Part]:
        """All blocks at once; with gathered queries each by itself, by tokens where possible."""
        if self.sharding.prefill_gather == "none":
            return [self._project_by_heads(x, angles, blocks)]
        cos, sin = (split_blocks(angle, blocks) for angle in angles)
        return [
            self._project_by_tokens(states, turns, block)
            if block.sharding.splits(block.width)
            else self._project_by_heads(states, turns, (block,))
            for block, states, *turns in zip(blocks, split_blocks(x, blocks), cos, sin, strict=True)
        ]

    def _project_by_heads(
        self, x: Array, angles: Sequence[Array], blocks: tuple[Block, ...]
    ) -> _Part:
        q, k, v = self._project(x, angles)
        own = tuple(
            (block.take_own(keys), block.take_own(values))
            for block, keys, values in zip(
                blocks, split_blocks(k, blocks), split_blocks(v, blocks), strict=True
            )
        )
        return _Part(blocks, False, q, own)

    def _project_by_tokens(self, x: Array, angles: Sequence[Array], block: Block) -> _Part:
        own = block.take_own(x)
        turns = [block.take_own(angle).reshape(-1, 1, angle.shape[-1]) for angle in angles]
        q, k, v = self._project(own.reshape(-1, x.shape[-1]), turns)
        q, k, v = (part.reshape(*own.shape[:2], *part.shape[1:]) for part in (q, k, v))
        return _Part((block,), True, q, ((k, v),))

    def _project(
        self, x: Float[Array, "T E"], angles: Sequence[Array]
    ) -> tuple[Float[Array, "T h D"], Float[Array, "T k D"], Float[Array, "T k D"]]:
        """Queries, keys and values of this rank's heads, rotated."""
        qkv = matmul(x, self.qkv[...])
        if self.has_bias:
            qkv = qkv + self.qkv_bias[...][None]
        num_q, num_kv = self.sharding.share_q_heads, self.sharding.heads.group_kv_heads
        q, k, v = jnp.split(qkv, (num_q, num_q + num_kv), axis=1)
        if self.has_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, angles), rotate(k, angles), v

    def _attend(self, part: _Part, pool: Array, layer: Array) -> Float[Array, "T E"]:
        """Attention and output projection of one part; whole on every rank."""
        if part.by_tokens:
            return self._attend_by_tokens(part, pool, layer)
        outs = [
            decode_attention(
                q,
                *own,
                pool,
                layer,
                block,
                scale=self.scale,
                comm_backend=self.sharding.comm_backend,
                form=self.sharding.form,
                heads_gathered=self.sharding.prefill_gather != "none",
            )
            for q, own, block in zip(
                split_blocks(part.q, part.blocks), part.own, part.blocks, strict=True
            )
        ]
        out = jnp.concatenate(outs).astype(part.q.dtype)
        weight = self._output_rows(part.blocks[0].rank)
        projected = matmul(out.reshape(out.shape[0], -1), weight)
        return sum_ranks(projected, scattered=self.sharding.form.scattered_sums)

    def _output_rows(self, rank: Array) -> Float[Array, "hD E"]:
        """The output projection's rows of this rank's heads."""
        rows = self.o[...].reshape(-1, self.o.shape[-1])
        if self.sharding.q_axis == "q_heads":
            return rows
        share = rows.shape[0] // self.sharding.heads.dcp
        return lax.dynamic_slice_in_dim(rows, rank.astype(jnp.int32) * share, share)

    def _attend_by_tokens(self, part: _Part, pool: Array, layer: Array) -> Float[Array, "T E"]:
        block, ((own_k, own_v),) = part.blocks[0], part.own
        out = prefill_attention(
            part.q,
            own_k,
            own_v,
            pool,
            layer,
            block,
            scale=self.scale,
            comm_backend=self.sharding.comm_backend,
            form=self.sharding.form,
        )
        rows = self.o[...].reshape(-1, self.o.shape[-1])
        projected = matmul(out.astype(part.q.dtype).reshape(-1, rows.shape[0]), rows)
        projected = sum_ranks(projected, TP, scattered=self.sharding.form.scattered_sums)
        whole = gather_tokens(projected.reshape(*part.q.shape[:2], -1), block)
        return whole.reshape(-1, rows.shape[-1])


class DecoderLayer(nnx.Module):
    def __init__(self, config: LlamaConfig, sharding: Sharding, dtype: DTypeLike) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, sharding, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        inner = padded(config.intermediate_size, sharding.ranks)
        self.mlp = MLP(config.hidden_size, inner, dtype, sharding.form)

    def __call__(
        self, x: Array, angles: Angles, blocks: tuple[Block, ...], pool: Array, layer: Array
    ) -> tuple[Float[Array, "T E"], Array]:
        attended, pool = self.attention(self.attention_norm(x), angles, blocks, pool, layer)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), pool


@jax.jit
def _run_layer(
    layer: DecoderLayer,
    x: Array,
    angles: Angles,
    blocks: tuple[Block, ...],
    pool: Array,
    index: Array,
) -> tuple[Array, Array]:
    """One layer. Jitted so that all layers share one trace; XLA sees them unrolled."""
    return layer(x, angles, blocks, pool, index)


def _stack(layer: DecoderLayer, num_layers: int) -> DecoderLayer:
    """The layer with the parameters of ``num_layers`` of its kind along a new first axis."""
    graph, state = nnx.split(layer)
    stacked = [
        (path, parameter((num_layers, *one.shape), (None, *one.get_metadata("axes")), one.dtype))
        for path, one in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(stacked))


def _unstack(layers: DecoderLayer, index: int | Array) -> DecoderLayer:
    """One layer of a stack."""
    graph, state = nnx.split(layers)
    one = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), state)
    return nnx.merge(graph, one)


class Llama(nnx.Module):
    """Tokens to hidden states, hidden states to logits.

    The layers are modules of their own, or one with all their parameters stacked, by the form.
    """

    def __init__(self, config: LlamaConfig, sharding: Sharding, dtype: DTypeLike) -> None:
        vocab = padded(config.vocab_size, sharding.ranks)
        self.embedding = Embedding(vocab, config.hidden_size, dtype, sharding.form)
        self.form, self.num_layers = sharding.form, config.num_layers
        if self.form.stacked_weights:
            self.stack = _stack(DecoderLayer(config, sharding, dtype), config.num_layers)
        else:
            self.layers = nnx.List(
                DecoderLayer(config, sharding, dtype) for _ in range(config.num_layers)
            )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.head = Embedding(vocab, config.hidden_size, dtype, sharding.form)
        self.is_tied = config.tie_word_embeddings
        self.frequencies = rope_frequencies(config)

    def hidden_states(
        self,
        tokens: Integer[Array, " T"],
        blocks: tuple[Block, ...],
        pools: Pools,
        rank: Integer[Array, ""],
    ) -> tuple[Float[Array, "T E"], Pools]:
        """Run all layers over the tokens of all blocks; their keys and values go into the pool."""
        x = self.embedding(tokens, rank)
        angles = rope_angles(
            jnp.concatenate([block.positions for block in blocks]), self.frequencies
        )

        def run(index: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            states, pages = carry
            number = jnp.asarray(index, jnp.int32)
            return _run_layer(self._layer(index), states, angles, blocks, pages, number)

        states, pool = repeat(self.form, self.num_layers, run, (x, pools[KV]))
        return states, {KV: pool}

    def _layer(self, index: Any) -> DecoderLayer:
        return _unstack(self.stack, index) if self.form.stacked_weights else self.layers[index]

    def logits(self, x: Float[Array, "R E"]) -> Float[Array, "R v"]:
        """This rank's share of the vocabulary's logits, float32."""
        head = self.embedding if self.is_tied else self.head
        return head.logits(self.norm(x))
