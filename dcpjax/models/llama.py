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
from dcpjax.attention.views import (
    AnyBlock,
    Prior,
    Stored,
    View,
    gather_prior,
    gather_rows,
    view_blocks,
    write_blocks,
)
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

    By heads: ``q`` [T, h, D] of this rank's heads, ``k`` and ``v`` [T, k, D] of all tokens. By
    tokens (one block): those that the rank owns, ``q`` [B, S, H, D] of all heads of its group,
    ``k`` and ``v`` [B, S, k, D].
    """

    blocks: tuple[AnyBlock, ...]
    by_tokens: bool
    q: Array
    k: Array
    v: Array

    @property
    def rows(self) -> Array:
        """What is cached of each token."""
        return jnp.concatenate([self.k, self.v], axis=-1)


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
        self.sharding, self.stored = sharding, Stored(config.num_layers)

    def __call__(
        self,
        x: Float[Array, "T E"],
        angles: Angles,
        blocks: tuple[AnyBlock, ...],
        pool: Shaped[Array, "pages L k P W"],
        layer: Array,
        prior: Prior = (),
    ) -> tuple[Float[Array, "T E"], Shaped[Array, "pages L k P W"]]:
        """Project, write everything into the pool, then attend.

        All writes of a layer come before its reads: a write between two reads makes XLA copy the
        pool, even if they touch different pages.
        """
        parts = self._project_blocks(x, angles, blocks)
        rows = [self._gather_rows(part) for part in parts]
        for part, new in zip(parts, rows, strict=True):
            pool = self._write(pool, layer, part, new, prior)
        attended = [
            self._attend(part, new, pool, layer, prior)
            for part, new in zip(parts, rows, strict=True)
        ]
        return jnp.concatenate(attended), pool

    def _project_blocks(
        self, x: Array, angles: Angles, blocks: tuple[AnyBlock, ...]
    ) -> list[_Part]:
        """All blocks at once; with gathered queries each by itself, by tokens where possible."""
        if self.sharding.prefill_gather != "q":
            return [_Part(blocks, False, *self._project(x, angles))]
        cos, sin = (split_blocks(angle, blocks) for angle in angles)
        return [
            self._project_by_tokens(states, turns, block)
            if isinstance(block, Block) and block.sharding.splits(block.width)
            else _Part((block,), False, *self._project(states, turns))
            for block, states, *turns in zip(blocks, split_blocks(x, blocks), cos, sin, strict=True)
        ]

    def _project_by_tokens(self, x: Array, angles: Sequence[Array], block: Block) -> _Part:
        own = block.take_own(x)
        turns = [block.take_own(angle).reshape(-1, 1, angle.shape[-1]) for angle in angles]
        projected = self._project(own.reshape(-1, x.shape[-1]), turns)
        by_row = (part.reshape(*own.shape[:2], *part.shape[1:]) for part in projected)
        return _Part((block,), True, *by_row)

    def _gather_rows(self, part: _Part) -> tuple[Array, ...]:
        """New rows per block: of all its tokens, by tokens those that this rank owns."""
        return (part.rows,) if part.by_tokens else gather_rows(part.blocks, part.rows)

    def _write(
        self, pool: Array, layer: Array, part: _Part, rows: tuple[Array, ...], prior: Prior
    ) -> Array:
        if part.by_tokens:
            (block,) = part.blocks
            assert isinstance(block, Block), "prompts are split by owner or in pairs of chunks"
            return write_block(pool, layer, block, rows[0])
        return write_blocks(pool, layer, part.blocks, rows, prior, self.stored)

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

    def _attend(
        self, part: _Part, rows: tuple[Array, ...], pool: Array, layer: Array, prior: Prior
    ) -> Float[Array, "T E"]:
        """Attention and output projection of one part; whole on every rank of the weights."""
        if part.by_tokens:
            return self._attend_by_tokens(part, pool, layer)
        views = view_blocks(pool, layer, part.blocks, rows, prior, self.stored)
        split = (split_blocks(x, part.blocks) for x in (part.q, part.k, part.v))
        outs = [self._attend_view(view, *each) for view, *each in zip(views, *split, strict=True)]
        out = jnp.concatenate(outs).astype(part.q.dtype)
        weight = self._output_rows(views[0].block.rank)
        projected = matmul(out.reshape(out.shape[0], -1), weight)
        return sum_ranks(projected, scattered=self.sharding.form.scattered_sums)

    def _attend_view(self, view: View, q: Array, k: Array, v: Array) -> Float[Array, "T h Dv"]:
        out = decode_attention(
            q,
            view.block.take_own(k),
            view.block.take_own(v),
            view.pool,
            view.layer,
            view.block,
            scale=self.scale,
            comm_backend=self.sharding.comm_backend,
            form=self.sharding.form,
            heads_gathered=self.sharding.prefill_gather == "q",
        )
        return view.from_owner(out)

    def _output_rows(self, rank: Array) -> Float[Array, "hD E"]:
        """The output projection's rows of this rank's heads."""
        rows = self.o[...].reshape(-1, self.o.shape[-1])
        if self.sharding.q_axis == "q_heads":
            return rows
        share = rows.shape[0] // self.sharding.heads.dcp
        return lax.dynamic_slice_in_dim(rows, rank.astype(jnp.int32) * share, share)

    def _attend_by_tokens(self, part: _Part, pool: Array, layer: Array) -> Float[Array, "T E"]:
        (block,) = part.blocks
        assert isinstance(block, Block), "prompts are split by owner or in pairs of chunks"
        out = prefill_attention(
            part.q,
            part.k,
            part.v,
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
        self,
        x: Array,
        angles: Angles,
        blocks: tuple[AnyBlock, ...],
        pool: Array,
        layer: Array,
        prior: Prior,
    ) -> tuple[Float[Array, "T E"], Array]:
        attended, pool = self.attention(self.attention_norm(x), angles, blocks, pool, layer, prior)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), pool


@jax.jit
def _run_layer(
    layer: DecoderLayer,
    x: Array,
    angles: Angles,
    blocks: tuple[AnyBlock, ...],
    pool: Array,
    index: Array,
    prior: Prior,
) -> tuple[Array, Array]:
    """One layer. Jitted so that all layers share one trace; XLA sees them unrolled."""
    return layer(x, angles, blocks, pool, index, prior)


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
        blocks: tuple[AnyBlock, ...],
        pools: Pools,
        rank: Integer[Array, ""],
    ) -> tuple[Float[Array, "T E"], Pools]:
        """Run all layers over the tokens of all blocks; their keys and values go into the pool."""
        x = self.embedding(tokens, rank)
        angles = rope_angles(
            jnp.concatenate([block.positions for block in blocks]), self.frequencies
        )

        def run(index: Any, carry: tuple[Array, Array, Prior]) -> tuple[Array, Array, Prior]:
            states, pages, prior = carry
            number = jnp.asarray(index, jnp.int32)
            states, pages = _run_layer(
                self._layer(index), states, angles, blocks, pages, number, prior
            )
            return states, pages, self._prior(pages, index + 1, blocks)

        start = (x, pools[KV], self._prior(pools[KV], 0, blocks))
        states, pool, _ = repeat(self.form, self.num_layers, run, start)
        return states, {KV: pool}

    def _prior(self, pool: Array, index: Any, blocks: tuple[AnyBlock, ...]) -> Prior:
        """What a layer reads besides the pool, behind the last layer nothing."""
        if isinstance(index, int) and index == self.num_layers:
            return ()
        return gather_prior(pool, jnp.asarray(index, jnp.int32), blocks, Stored(self.num_layers))

    def _layer(self, index: Any) -> DecoderLayer:
        return _unstack(self.stack, index) if self.form.stacked_weights else self.layers[index]

    def logits(self, x: Float[Array, "R E"]) -> Float[Array, "R v"]:
        """This rank's share of the vocabulary's logits, float32."""
        head = self.embedding if self.is_tied else self.head
        return head.logits(self.norm(x))
