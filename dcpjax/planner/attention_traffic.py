"""Collectives around the attention of every layer, by how an engine spreads the cache.

Without PCP, the ranks that share tokens gather queries and merge partial results, block by block.
With PCP every rank has its own queries: prompts gather new rows and, where the cache is shared, a
copy of the layer; what decode rows exchange depends on who has their tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dcpjax.errors import UnsupportedCombination
from dcpjax.layout.heads import HeadLayout
from dcpjax.planner.collectives import Collective, CollectiveKind, StepTokens
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.memory import deployment_parts
from dcpjax.planner.models import Latent, ModelShape

PARTIAL_BYTES = 4
"""Of a value of partial attention results, which are float32, and of scores and positions."""


@dataclass(frozen=True)
class AttentionTraffic:
    """The collectives of a model's attention in a deployment; ``item``: bytes of an activation."""

    model: ModelShape
    deployment: Deployment
    item: int

    def of(self, step: StepTokens) -> Iterator[Collective]:
        """Of all layers in one step, the sums of projected outputs included.

        Raises:
            UnsupportedCombination: queries gathered over tokens, of a latent cache.
        """
        if self.deployment.pcp > 1:
            yield from self._pcp_prompts(step)
            yield from self._pcp_decode(step)
            tokens = step.decode + step.prompt // self.deployment.pcp
            yield self._output_sum(tokens, self.deployment.tp)
        elif self.deployment.prefill_gather == "q":
            self._check_queries()
            yield from self._merge(step.decode, self._out_width)
            yield self._output_sum(step.decode, self.deployment.tp)
            yield from self._by_tokens(step.prompt)
        else:
            yield from self._by_heads(step.decode, step.context)
            if step.is_expanded and self.model.latent is not None:
                yield from self._expanded(step.prompt, self.model.latent)
            else:
                yield from self._by_heads(step.prompt, step.context)
            yield self._output_sum(step.decode + step.prompt, self.deployment.tp)

    # Sizes

    @cached_property
    def _heads(self) -> HeadLayout:
        model, deployment = self.model, self.deployment
        return HeadLayout(
            model.num_heads, model.stored_heads, deployment.head_groups, deployment.weight_dcp
        )

    @property
    def _key_width(self) -> int:
        latent = self.model.latent
        return latent.key_width if latent else self.model.head_dim

    @property
    def _out_width(self) -> int:
        latent = self.model.latent
        return latent.kv_rank if latent else self.model.head_dim

    def _row_values(self, part: str) -> int:
        """Values of a new row of one head, before it is stored."""
        if part == "kv":
            return 2 * self.model.head_dim
        if part == "indexer" and self.model.indexer is not None:
            return self.model.indexer.head_dim
        return self._key_width

    # Without PCP

    def _by_heads(self, tokens: int, context: int) -> Iterator[Collective]:
        """Ranks that share tokens attend for all heads of their group."""
        yield self._queries(tokens, self._key_width)
        yield from self._merge(tokens, self._out_width)
        yield from self._candidates(tokens, context)

    def _expanded(self, tokens: int, latent: Latent) -> Iterator[Collective]:
        """The same where each rank makes keys and values of its latents; nothing is chosen."""
        values = latent.kv_rank * (latent.nope_dim + latent.value_dim)
        num_bytes = self._heads.group_heads * values * self.item
        yield self._each("all-gather", "up-projections", self.deployment.weight_dcp, num_bytes)
        yield self._queries(tokens, latent.nope_dim + latent.rope_dim)
        yield from self._merge(tokens, latent.value_dim)

    def _queries(self, tokens: int, width: int) -> Collective:
        """Each rank's heads become those of the head group."""
        num_bytes = tokens * self._heads.group_heads * width * self.item
        return self._each("all-gather", "queries", self.deployment.weight_dcp, num_bytes)

    def _merge(self, tokens: int, width: int) -> Iterator[Collective]:
        """Partial results of the ranks that share tokens, weighed and added."""
        deployment = self.deployment
        ranks, dcp = deployment.dcp, deployment.weight_dcp
        lses = tokens * self._heads.group_heads * PARTIAL_BYTES
        outputs = lses * width
        if deployment.exchange == "a2a":
            yield self._each("all-to-all", "outputs and lse", ranks, outputs + lses)
            return
        yield self._each("all-gather", "lse", ranks, ranks * lses)
        yield self._each("reduce-scatter", "outputs", dcp, outputs)
        if ranks > dcp:  # PCP ranks among them have the same heads
            yield self._each("all-reduce", "outputs", deployment.pcp, outputs // dcp)

    def _candidates(self, tokens: int, context: int) -> Iterator[Collective]:
        """Scores and positions of each rank's best tokens, where no rank has all index keys."""
        indexer, ranks = self.model.indexer, self.deployment.dcp
        if indexer is None or self.deployment.index_kv == "replicated":
            return
        best = min(indexer.topk, context // ranks)
        if ranks * best > indexer.topk:  # else all of them are chosen
            num_bytes = 2 * ranks * tokens * best * PARTIAL_BYTES
            yield Collective("all-gather", "candidates", ranks, num_bytes, len(indexer.layers))

    def _output_sum(self, tokens: int, ranks: int) -> Collective:
        num_bytes = tokens * self.model.hidden_size * self.item
        return self._each("all-reduce", "attention outputs", ranks, num_bytes)

    def _by_tokens(self, tokens: int) -> Iterator[Collective]:
        """Each rank projects its own tokens of a chunk and attends with those of all."""
        deployment, model = self.deployment, self.model
        queries = tokens * self._heads.group_heads * model.head_dim * self.item
        yield self._each("all-gather", "queries", deployment.dcp, queries)
        yield from self._merge(tokens, self._out_width)
        yield self._output_sum(tokens // deployment.dcp, deployment.head_groups)
        states = tokens * model.hidden_size * self.item
        yield self._each("all-gather", "attention outputs", deployment.dcp, states)

    def _check_queries(self) -> None:
        if self.model.latent is not None:
            raise UnsupportedCombination(
                "prefill_gather='q' splits a chunk's tokens over ranks that share a KV head, and a "
                "model with a latent cache computes them all on each rank",
                prefill_gather=self.deployment.prefill_gather,
                model=self.model.name,
            )

    # With PCP

    def _pcp_prompts(self, step: StepTokens) -> Iterator[Collective]:
        """New rows to all ranks, and copies of layers that no rank has, or one alone."""
        deployment = self.deployment
        kind = "all-reduce" if deployment.prefill_kv == "layer_split" else "all-gather"
        for part in deployment_parts(self.model, deployment):
            if part.is_draft:
                continue
            heads = self._heads.group_kv_heads
            rows = step.prompt * heads * self._row_values(part.name) * self.item
            purpose = f"new rows: {part.name}"
            yield Collective("all-gather", purpose, deployment.pcp, rows, part.layers)
            if deployment.prefill_kv == "replicated" or deployment.keeps_whole(part):
                continue
            copied = step.prompt_rows * step.context * heads * part.bytes_per_token
            ranks = max(deployment.dcp, deployment.pcp)
            yield Collective(kind, f"copy: {part.name}", ranks, copied, part.layers)

    def _pcp_decode(self, step: StepTokens) -> Iterator[Collective]:
        """Decode rows, which all PCP ranks compute alike as far as they have the tokens."""
        if self.deployment.prefill_kv == "sharded":
            yield from self._by_heads(step.decode, step.context)
        elif self.deployment.prefill_kv == "layer_split":
            yield from self._from_owner(step.decode, step.context)

    def _from_owner(self, tokens: int, context: int) -> Iterator[Collective]:
        """What the rank that has a layer has found: outputs, and the choice of tokens."""
        pcp, indexer = self.deployment.pcp, self.model.indexer
        outputs = tokens * self._heads.group_heads * self._out_width * PARTIAL_BYTES
        yield self._each("all-reduce", "outputs of the owner", pcp, outputs)
        if indexer is not None:
            counts, layers = tokens * PARTIAL_BYTES, len(indexer.layers)
            chosen = counts * min(indexer.topk, context)
            yield Collective("all-reduce", "choice of the owner", pcp, chosen, layers)
            yield Collective("all-reduce", "number of chosen tokens", pcp, counts, layers)

    def _each(self, kind: CollectiveKind, purpose: str, ranks: int, num_bytes: int) -> Collective:
        """Once in every layer."""
        return Collective(kind, purpose, ranks, num_bytes, self.model.num_layers)
