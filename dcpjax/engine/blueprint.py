"""What follows from settings and model alone, before there are devices or weights.

The engine builds itself from it, and so does whoever lowers its programs for another machine.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import jax.numpy as jnp

from dcpjax.attention.block import TokenSharding
from dcpjax.cache import scaled_rows
from dcpjax.cache.parts import INDEXER, LATENT, CachePart, cache_parts
from dcpjax.cache.pool import PoolShapes, part_shape
from dcpjax.cache.rows import PLAIN, RowFormat
from dcpjax.cache.scaled_rows import FP8_DS_MLA, scaled_format
from dcpjax.config import EngineConfig, GlmConfig, ModelConfig
from dcpjax.engine.buckets import (
    context_buckets,
    decode_buckets,
    expanded_contexts,
    least_expanded_width,
    prefill_buckets,
)
from dcpjax.engine.model_rules import (
    check_attention,
    check_latent_model,
    check_neuron,
    check_pcp_model,
    check_speculation,
)
from dcpjax.engine.plan import StepShapes
from dcpjax.errors import ConfigError, UnsupportedCombination
from dcpjax.form import StepForm, form_for
from dcpjax.layout import KVPlacement, place_part
from dcpjax.mesh import DCP, PAGE_RANKS, HeadLayout
from dcpjax.models.sharding import Sharding


@dataclass(frozen=True)
class Blueprint:
    """One engine's shapes.

    Args:
        platform: of the devices, as JAX names it.
        stored_dtype: of the checkpoint.
        fp8: what ``kv_cache_dtype="fp8"`` means on these devices.

    Raises:
        ConfigError: settings that do not fit the model, when what they determine is asked for.
    """

    config: EngineConfig
    model: ModelConfig
    platform: str
    stored_dtype: str
    fp8: str = "float8_e4m3fn"

    @cached_property
    def form(self) -> StepForm:
        """How steps are written."""
        if self.platform == "neuron":
            check_neuron(self.config, self.model)
        return form_for(self.config.step_form, self.platform)

    @cached_property
    def dtype(self) -> jnp.dtype:
        """Of weights and activations; "auto": float32 on CPU, the checkpoint's elsewhere."""
        if self.config.dtype != "auto":
            return jnp.dtype(self.config.dtype)
        is_wide = self.platform == "cpu" or self.stored_dtype == "float32"
        return jnp.dtype(jnp.float32 if is_wide else jnp.bfloat16)

    @property
    def kv_dtype(self) -> jnp.dtype:
        """Of cached keys and values."""
        name = self.config.kv_cache_dtype
        if name == "auto":
            return self.dtype
        if name == FP8_DS_MLA:
            return scaled_rows.VALUES
        return jnp.dtype(self.fp8 if name == "fp8" else name)

    def row_format(self, part: CachePart) -> RowFormat:
        """How rows of a part are stored."""
        if self.config.kv_cache_dtype != FP8_DS_MLA:
            return PLAIN
        if isinstance(self.model, GlmConfig) and self.model.indexer is None:
            raise UnsupportedCombination(
                "kv_cache_dtype='fp8_ds_mla' is read row by row, as sparse attention does: it "
                "needs a model with an indexer",
                kv_cache_dtype=FP8_DS_MLA,
                architecture=self.model.architecture,
            )
        return scaled_format(part, self.model, self.fp8)

    @cached_property
    def heads(self) -> HeadLayout:
        return HeadLayout(
            self.model.num_heads,
            self.model.num_kv_heads,
            self.config.head_groups,
            self.config.weight_dcp,
        )

    @property
    def sharding(self) -> Sharding:
        """How the model is spread over the mesh."""
        config = self.config
        check_attention(config, self.model, is_static=self.form.is_static)
        if isinstance(self.model, GlmConfig):
            check_latent_model(config, self.model)
        if config.residency is not None:
            extents = {part: self._page_extent(part) for part in self.parts}
            check_pcp_model(config, self.model, extents)
        return Sharding(
            self.heads,
            config.dcp_comm_backend,
            "q" if config.prefill_gather == "q" else "none",
            self.form,
            self.has_whole_index,
            pcp=config.prefill_context_parallel_size,
            **self._formats,
        )

    def _page_extent(self, part: CachePart) -> tuple[int, int]:
        return self.row_format(part).page_extent(self.config.block_size, part.width)

    @property
    def _formats(self) -> dict[str, RowFormat]:
        """How latents and the indexer's keys are stored; the draft layer's as the model's."""
        by_part = {part.name: part for part in self.parts}
        names = {LATENT: "latent_format", INDEXER: "index_format"}
        return {
            name: self.row_format(by_part[part]) for part, name in names.items() if part in by_part
        }

    @property
    def max_model_len(self) -> int:
        wanted, trained = self.config.max_model_len, self.model.max_position_embeddings
        if wanted is not None and wanted > trained:
            raise ConfigError(
                "max_model_len is at most the context length that the model was made for",
                max_model_len=wanted,
                max_position_embeddings=trained,
            )
        return trained if wanted is None else wanted

    @cached_property
    def parts(self) -> tuple[CachePart, ...]:
        """What is cached of each token."""
        return cache_parts(self.model, has_whole_index=self.has_whole_index)

    @property
    def has_whole_index(self) -> bool:
        """Whether every DCP rank keeps the indexer's keys of all tokens."""
        is_whole = self.config.index_kv == "replicated"
        has_indexer = isinstance(self.model, GlmConfig) and self.model.indexer is not None
        if is_whole and not has_indexer:
            raise UnsupportedCombination(
                "index_kv='replicated' keeps the keys of an indexer, and the model has none",
                index_kv=self.config.index_kv,
                architecture=self.model.architecture,
            )
        return is_whole

    def pool_shapes(self, num_pages: int) -> PoolShapes:
        """The pools with so many usable pages on each rank."""
        heads = self.heads.groups * self.heads.group_kv_heads
        by_part = {
            part.name: part_shape(
                part,
                num_pages=num_pages,
                num_heads=heads,
                page_size=self.config.block_size,
                ranks=self.config.decode_context_parallel_size,
                layer_ranks=self._layer_ranks,
                dtype=self.kv_dtype,
                is_native=self.form.native_pools,
                row_format=self.row_format(part),
            )
            for part in self.parts
        }
        return PoolShapes(by_part)

    @property
    def copy_bytes(self) -> int:
        """Most bytes of temporary copies that a rank holds in a step, see ``attention/views.py``.

        Those of a layer and of the next one, for the largest prompts; 0 where all is read in place.
        """
        if self.config.residency not in ("sharded", "layer_split"):
            return 0
        rows = max(rows for rows, _ in self.step_shapes.prefill)
        ranks = self.config.decode_context_parallel_size
        num_pages = rows * max(self.table_widths) * ranks + 1
        shapes = self.pool_shapes(num_pages=1).by_part
        layers = (
            replace(shapes[part.name], num_layers=1)
            for part in self.parts
            if not part.is_replicated
        )
        return 2 * num_pages * sum(one.page_bytes(self.config.head_groups) for one in layers)

    def token_sharding(self, pools: PoolShapes) -> TokenSharding:
        """How the tokens of a sequence are spread over the ranks' pools."""
        return TokenSharding(
            ranks=self.config.decode_context_parallel_size,
            interleave=self.config.interleave,
            page_size=self.config.block_size,
            scratch_page=pools.scratch_page,
            axes=PAGE_RANKS if self.config.residency == "sharded" else (DCP,),
            layer_ranks=self._layer_ranks,
        )

    @property
    def _layer_ranks(self) -> int:
        """PCP ranks that split the layers of the cache."""
        is_split = self.config.residency == "layer_split"
        return self.config.prefill_context_parallel_size if is_split else 1

    @property
    def step_shapes(self) -> StepShapes:
        # One-row products of 16-bit values are several times slower than two-row ones on XLA:CPU.
        least = 2 if self.dtype == jnp.bfloat16 and self.platform == "cpu" else 1
        return StepShapes(
            decode_rows=decode_buckets(least, self.config.max_num_seqs),
            prefill=prefill_buckets(self.config),
            decode_widths=self._decode_widths,
            expanded_contexts=expanded_contexts(
                self.config, self.model, self.max_model_len, is_static=self.form.is_static
            ),
            least_expanded_width=least_expanded_width(self.config, self.model),
        )

    @property
    def _decode_widths(self) -> tuple[int, ...]:
        """Tokens of a decode segment. N-grams often have nothing to propose: then it is one."""
        speculation = self.config.speculative_config
        if speculation is None:
            return (1,)
        check_speculation(speculation, self.model, self.max_model_len)
        return (1, speculation.width) if speculation.method == "ngram" else (speculation.width,)

    @property
    def table_widths(self) -> tuple[int, ...]:
        """Pages of the page tables that steps are compiled for, ascending."""
        longest = self.max_model_len
        # What is gathered for a prompt is as long as its page table.
        is_gathered = self.config.residency in ("sharded", "layer_split")
        has_several = self.form.several_contexts or is_gathered
        contexts = context_buckets(longest) if has_several else (longest,)
        pages = (-(-tokens // self.config.virtual_page_size) for tokens in contexts)
        return tuple(sorted(set(pages)))

    @property
    def mirrors_pool(self) -> bool:
        """Whether other engines read and write pages in the host's memory."""
        transfer = self.config.kv_transfer_config
        buffer = "cuda" if transfer is None else transfer.kv_buffer_device
        if buffer == "cuda" and transfer is not None and self.platform == "neuron":
            raise UnsupportedCombination(
                "JAX names no address of Neuron's memory, so kv_buffer_device is 'cpu' or 'auto'",
                kv_buffer_device=buffer,
                device=self.platform,
            )
        # What is not audited may be copied by a step, and with it what lands meanwhile is lost.
        if buffer == "cuda" and transfer is not None and not self.form.is_audited:
            raise UnsupportedCombination(
                "only steps of the dynamic form are proven to leave the pool in place while other "
                "engines write into it, so kv_buffer_device is 'cpu' or 'auto'",
                kv_buffer_device=buffer,
                step_form=self.config.step_form,
            )
        is_mirrored = buffer == "cpu" or (buffer == "auto" and not self.form.is_audited)
        if is_mirrored and transfer is not None and transfer.pipelined_sends:
            raise UnsupportedCombination(
                "pipelined_sends reads pages while they are computed, and kv_buffer_device='cpu' "
                "copies them to the host at the end",
                kv_buffer_device=transfer.kv_buffer_device,
                step_form=self.config.step_form,
                device=self.platform,
            )
        return is_mirrored

    @property
    def placements(self) -> dict[str, KVPlacement]:
        """Which rank holds which layers, heads and tokens of the cache, by part."""
        return {part.name: self._placement(part) for part in self.parts}

    def _placement(self, part: CachePart) -> KVPlacement:
        config = self.config
        return place_part(
            config.tensor_parallel_size,
            config.decode_context_parallel_size,
            config.prefill_context_parallel_size,
            layers=len(part.layers),
            kv_heads=part.kv_heads,
            page_size=config.block_size,
            interleave=config.interleave,
            is_whole=part.is_replicated,
            splits_layers=config.residency == "layer_split",
            is_prefill_order=config.apply_prefill_dcp,
        )
