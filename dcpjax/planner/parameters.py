"""How many parameters a model has, by part, and how many bytes of them a rank holds."""

from dataclasses import dataclass

from dcpjax.cache.widths import value_bytes
from dcpjax.planner.models import Experts, Latent, ModelShape


@dataclass(frozen=True)
class Parameters:
    """Parameters by part, all layers together; norms are left out (below 0.01 %).

    ``mtp`` is one draft layer: its attention, indexer, experts and the joining projection.
    """

    attention: int
    indexer: int
    experts: int
    dense: int
    embedding: int
    mtp: int

    @property
    def total(self) -> int:
        """Without the draft layer, as models are named."""
        return self.attention + self.indexer + self.experts + self.dense + self.embedding


def count_parameters(model: ModelShape) -> Parameters:
    """Parameters of a model by part."""
    hidden, experts = model.hidden_size, model.experts
    attention, indexer = attention_parameters(model), indexer_parameters(model)
    expert_layer = expert_parameters(hidden, experts) if experts else 0
    dense_layer = 3 * hidden * model.inner_size
    mtp_layer = 2 * hidden * hidden + attention + indexer + (expert_layer or dense_layer)
    return Parameters(
        attention=model.num_layers * attention,
        indexer=model.index_layers * indexer,
        experts=experts.layers * expert_layer if experts else 0,
        dense=model.dense_layers * dense_layer,
        embedding=(1 if model.is_tied else 2) * model.vocab_size * hidden,
        mtp=model.mtp_layers * mtp_layer,
    )


def attention_parameters(model: ModelShape) -> int:
    """Of one layer."""
    if model.latent:
        return _latent_parameters(model.hidden_size, model.num_heads, model.latent)
    q_and_o = 2 * model.num_heads * model.head_dim
    return model.hidden_size * (q_and_o + 2 * model.num_kv_heads * model.head_dim)


def _latent_parameters(hidden: int, heads: int, latent: Latent) -> int:
    queries = hidden * latent.q_rank + latent.q_rank * heads * (latent.nope_dim + latent.rope_dim)
    keys = hidden * latent.key_width + latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
    return queries + keys + heads * latent.value_dim * hidden


def indexer_parameters(model: ModelShape) -> int:
    """Of one layer that has an indexer."""
    indexer, latent = model.indexer, model.latent
    if indexer is None or latent is None:
        return 0
    queries = latent.q_rank * indexer.heads * indexer.head_dim
    return queries + model.hidden_size * (indexer.head_dim + indexer.heads)


def expert_parameters(hidden: int, experts: Experts) -> int:
    """Of one layer: all experts, the shared ones and the router."""
    return (experts.count + experts.shared) * 3 * hidden * experts.inner + hidden * experts.count


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of one rank's weights by part."""

    attention: int
    experts: int
    dense: int
    embedding: int
    mtp: int

    @property
    def total(self) -> int:
        return self.attention + self.experts + self.dense + self.embedding + self.mtp


def weight_bytes(
    model: ModelShape, *, tp: int, expert_ranks: int, mtp: bool, dtype: str | None = None
) -> WeightBytes:
    """One rank's weights: attention and embedding over ``tp``, experts over ``expert_ranks``.

    Embeddings and the output head of an 8-bit model stay in bfloat16.
    """
    parameters = count_parameters(model)
    item = value_bytes(dtype or model.weights)
    experts = parameters.experts // expert_ranks
    draft = 0
    if mtp and model.mtp_layers:
        expert_layer = experts // model.experts.layers if model.experts else 0
        rest = parameters.mtp // model.mtp_layers
        if model.experts:
            rest -= expert_parameters(model.hidden_size, model.experts)
        draft = model.mtp_layers * (expert_layer + rest // tp)
    return WeightBytes(
        attention=(parameters.attention + parameters.indexer) // tp * item,
        experts=experts * item,
        dense=parameters.dense // tp * item,
        embedding=parameters.embedding // tp * max(item, 2),
        mtp=draft * item,
    )
