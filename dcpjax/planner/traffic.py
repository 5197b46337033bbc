"""Messages between the ranks of an engine: which collectives a step has, and how large they are.

The collectives of a step with key and value heads are those of our own compiled programs, which a
test compares with this list one by one.
"""

from dataclasses import dataclass
from typing import Literal

from dcpjax.cache.widths import value_bytes
from dcpjax.layout.heads import HeadLayout
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.hardware import Device, collective_seconds
from dcpjax.planner.memory import deployment_parts
from dcpjax.planner.models import ModelShape

CollectiveKind = Literal["all-gather", "reduce-scatter", "all-to-all", "all-reduce"]

PARTIAL_BYTES = 4
"""Of a value of partial attention results, which are float32."""


@dataclass(frozen=True)
class Collective:
    """One collective of a step.

    Attributes:
        purpose: what is exchanged.
        ranks: size of a group.
        num_bytes: the whole message: the gathered result, what is scattered or summed, all that a
            rank exchanges.
        count: times per step.
    """

    kind: CollectiveKind
    purpose: str
    ranks: int
    num_bytes: int
    count: int

    def seconds(self, device: Device) -> float:
        """All of a step's."""
        return self.count * collective_seconds(self.kind, self.ranks, self.num_bytes, device)


@dataclass(frozen=True)
class Traffic:
    """What a step exchanges."""

    collectives: tuple[Collective, ...]

    @property
    def num_messages(self) -> int:
        return sum(item.count for item in self.collectives)

    @property
    def num_bytes(self) -> int:
        return sum(item.count * item.num_bytes for item in self.collectives)

    def seconds(self, device: Device) -> float:
        return sum(item.seconds(device) for item in self.collectives)


def traffic(
    model: ModelShape,
    deployment: Deployment,
    tokens: int,
    *,
    context: int = 0,
    is_prefill: bool = False,
    dtype: str = "bfloat16",
) -> Traffic:
    """The collectives of one step of ``tokens`` tokens on one copy of the attention.

    Args:
        context: tokens before a prompt chunk: PCP ranks that share a cache gather all of it.
        dtype: of activations.
    """
    item = value_bytes(dtype)
    if deployment.pcp > 1:
        attention = _prompt_gathers(model, deployment, tokens if is_prefill else 0, context)
    else:
        attention = decode_collectives(model, deployment, tokens, item)
    sums = _hidden_sums(model, deployment, tokens, item)
    return Traffic((*attention, *sums))


def decode_collectives(
    model: ModelShape, deployment: Deployment, tokens: int, item: int
) -> tuple[Collective, ...]:
    """Around the attention of each layer, where DCP ranks gather queries and merge outputs."""
    ranks, layers = deployment.dcp, model.num_layers
    if ranks == 1:
        return ()
    heads, key_width, out_width = _group_widths(model, deployment)
    queries = tokens * heads * key_width * item
    outputs = tokens * heads * out_width * PARTIAL_BYTES
    lses = tokens * heads * PARTIAL_BYTES
    gather = Collective("all-gather", "queries", ranks, queries, layers)
    if deployment.exchange == "a2a":
        exchange = Collective("all-to-all", "outputs and lse", ranks, outputs + lses, layers)
        return (gather, exchange)
    return (
        gather,
        Collective("all-gather", "lse", ranks, ranks * lses, layers),
        Collective("reduce-scatter", "outputs", ranks, outputs, layers),
    )


def _group_widths(model: ModelShape, deployment: Deployment) -> tuple[int, int, int]:
    """Query heads of a head group, zeros included, and the widths of queries and outputs."""
    if model.latent:
        heads = -(-model.num_heads // deployment.head_groups)
        return heads, model.latent.key_width, model.latent.kv_rank
    layout = HeadLayout(model.num_heads, model.num_kv_heads, deployment.head_groups, deployment.dcp)
    return layout.group_heads, model.head_dim, model.head_dim


def _hidden_sums(
    model: ModelShape, deployment: Deployment, tokens: int, item: int
) -> tuple[Collective, ...]:
    """Sums of hidden states after embedding, attention and feed-forward, and the choice of tokens.

    With experts over all ranks of several copies, tokens travel instead: see the floors of
    :mod:`dcpjax.planner.roofline`.
    """
    ranks = deployment.tp
    if ranks == 1:
        return ()
    hidden = tokens * model.hidden_size * item
    best = 2 * ranks * tokens * PARTIAL_BYTES
    return (
        Collective("all-reduce", "embedding", ranks, hidden, 1),
        Collective("all-reduce", "attention outputs", ranks, hidden, model.num_layers),
        Collective("all-reduce", "feed-forward outputs", ranks, hidden, model.num_layers),
        Collective("all-gather", "most likely tokens", ranks, best, 1),
    )


def _prompt_gathers(
    model: ModelShape, deployment: Deployment, tokens: int, context: int
) -> tuple[Collective, ...]:
    """New KV of a chunk to all PCP ranks; with a shared cache, the prior tokens as well."""
    gathered = tokens + (context if deployment.prefill_kv == "sharded" else 0)
    if not gathered:
        return ()
    prior = "shared KV" if deployment.prefill_kv == "sharded" else "new KV"
    collectives = [
        Collective(
            "all-gather",
            f"{prior}: {part.name}",
            deployment.pcp,
            gathered * part.heads * part.bytes_per_token,
            part.layers,
        )
        for part in deployment_parts(model, deployment)
        if not part.is_draft
    ]
    if deployment.prefill_kv == "layer_split" and context:
        collectives += [
            Collective(
                "all-gather",  # a broadcast takes about as long
                f"prefix from its owner: {part.name}",
                deployment.pcp,
                context * part.heads * part.bytes_per_token,
                part.layers,
            )
            for part in deployment_parts(model, deployment)
            if not part.is_draft
        ]
    return tuple(collectives)
