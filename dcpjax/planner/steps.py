"""How long the steps of an engine take, from operations, bytes, messages and floors.

``seconds = Σ max(operations / rate, bytes / bandwidth) + collectives + floors``: parts of a step do
not overlap. Rates are the data sheet's times one efficiency for memory and one for compute. Nothing
here is fitted to a whole step; what the estimate misses is on the validation page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dcpjax.cache.widths import value_bytes
from dcpjax.planner.cache_parts import INDEXER
from dcpjax.planner.data import read_data
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.hardware import Device, constant
from dcpjax.planner.memory import deployment_parts
from dcpjax.planner.models import ModelShape
from dcpjax.planner.parameters import attention_parameters, count_parameters, weight_bytes
from dcpjax.planner.roofline import INDEX_ID_BYTES, IO_BYTES, indexer_flops
from dcpjax.planner.traffic import StepTokens, Traffic, draft_traffic, step_traffic, traffic


@dataclass(frozen=True)
class Cost:
    """One part of a step on one rank, and what it is bound by.

    Attributes:
        num_bytes: read and written in the rank's memory.
        link_seconds: that bytes are on the links between ranks.
        fixed_seconds: that pass whatever the sizes are.
    """

    name: str
    flops: float = 0.0
    num_bytes: float = 0.0
    fixed_seconds: float = 0.0
    link_seconds: float = 0.0

    def seconds(self, device: Device, dtype: str) -> float:
        return self.fixed_seconds + max(self._limits(device, dtype).values())

    def bound(self, device: Device, dtype: str) -> str:
        """``compute``, ``memory``, ``links`` or ``latency``, whichever takes longest."""
        limits = self._limits(device, dtype)
        limits["latency"] = self.fixed_seconds
        return max(limits, key=lambda name: limits[name])

    def _limits(self, device: Device, dtype: str) -> dict[str, float]:
        rate = device.tflops(dtype) * 1e12 * constant("compute_efficiency").value
        bandwidth = device.memory_tb_s * 1e12 * constant("memory_efficiency").value
        return {
            "compute": self.flops / rate,
            "memory": self.num_bytes / bandwidth,
            "links": self.link_seconds,
        }


@dataclass(frozen=True)
class StepCost:
    """The parts of a step."""

    device: Device
    dtype: str
    costs: tuple[Cost, ...]

    @property
    def seconds(self) -> float:
        return sum(cost.seconds(self.device, self.dtype) for cost in self.costs)

    def by_part(self) -> dict[str, float]:
        """Seconds of each part."""
        return {cost.name: cost.seconds(self.device, self.dtype) for cost in self.costs}

    def bottleneck(self) -> str:
        """The longest part and what bounds it."""
        cost = max(self.costs, key=lambda cost: cost.seconds(self.device, self.dtype))
        return f"{cost.name} ({cost.bound(self.device, self.dtype)})"


def acceptance_length(model: ModelShape, draft_tokens: int) -> float:
    """Tokens that a step of verification yields, as measured; 1 without a draft.

    For a number of draft tokens that was not measured: that of the largest measured number below.
    """
    if not draft_tokens or not model.mtp_layers:
        return 1.0
    table = read_data("acceptance")["glm" if model.model_type.startswith("glm") else "deepseek"]
    known = [int(count) for count in table if int(count) <= draft_tokens]
    return table[str(max(known))] if known else 1.0


def decode_step(
    model: ModelShape, device: Device, deployment: Deployment, batch: int, context: float
) -> StepCost:
    """One decode step of ``batch`` sequences of ``context`` tokens on each copy of the attention.

    With a draft: the verification of all its tokens, and the draft's own forwards.
    """
    step = StepTokens(batch, 1 + deployment.draft_tokens, context=int(context))
    tokens = step.decode
    exchanges = [found(model, deployment, step) for found in (step_traffic, draft_traffic)]
    costs = [
        _projections(model, deployment, tokens),
        *_attention(model, deployment, tokens, batch, context),
        *_feed_forward(model, deployment, tokens),
        _head(model, deployment, tokens),
        _collectives(exchanges, device),
        _floors(model),
    ]
    if deployment.draft_tokens:
        costs.append(_draft(model, device, deployment, batch, context))
    return StepCost(device, model.weights, tuple(costs))


def prefill_step(
    model: ModelShape, device: Device, deployment: Deployment, tokens: int, prior: float
) -> StepCost:
    """One prompt chunk of ``tokens`` tokens after ``prior`` tokens, on one copy."""
    own = tokens / deployment.pcp
    exchange = traffic(model, deployment, tokens, context=int(prior), is_prefill=True)
    overhead = constant("prefill_step_overhead_ms").value * 1e-3
    costs = [
        _projections(model, deployment, own),
        *_prompt_attention(model, deployment, own, prior + tokens / 2),
        *_feed_forward(model, deployment, own, is_prompt=True),
        _head(model, deployment, 1),
        _collectives([exchange], device),
        replace(_floors(model), fixed_seconds=_floors(model).fixed_seconds + overhead),
    ]
    return StepCost(device, model.weights, tuple(costs))


def _collectives(exchanges: Sequence[Traffic], device: Device) -> Cost:
    latency = sum(one.latency(device) for one in exchanges)
    seconds = sum(one.seconds(device) for one in exchanges)
    return Cost("collectives", fixed_seconds=latency, link_seconds=seconds - latency)


def _projections(model: ModelShape, deployment: Deployment, tokens: float) -> Cost:
    parameters = model.num_layers * attention_parameters(model) / deployment.tp
    num_bytes = parameters * value_bytes(model.weights)
    return Cost("projections", 2 * tokens * parameters, num_bytes)


def _attention(
    model: ModelShape, deployment: Deployment, tokens: int, batch: int, context: float
) -> list[Cost]:
    """Reads of the cache by one rank, and the products with it."""
    parts = {part.name: part for part in deployment_parts(model, deployment)}
    local = context / deployment.dcp
    if model.latent is None:
        kv = parts["kv"]
        shares = deployment.part_placement(kv, model).shares
        held = max(share.num_heads for share in shares)
        heads = model.num_heads / model.num_kv_heads * held
        flops = kv.layers * 4 * tokens * heads * local * model.head_dim
        return [Cost("attention", flops, kv.layers * batch * local * held * kv.bytes_per_token)]
    latent = parts["latent"]
    heads = model.num_heads / deployment.head_groups
    widths = model.latent.key_width + model.latent.kv_rank
    rows = local if model.indexer is None else min(context, model.indexer.topk) / deployment.dcp
    readers = batch if model.indexer is None else tokens
    row_bytes = latent.bytes_per_token + (INDEX_ID_BYTES if model.indexer else 0)
    num_bytes = readers * rows * row_bytes + tokens * IO_BYTES * heads * widths
    flops = 2 * tokens * heads * rows * widths
    costs = [Cost("attention", latent.layers * flops, latent.layers * num_bytes)]
    if model.indexer is not None:
        index = parts[INDEXER]
        scored = context if deployment.keeps_whole(index) else local
        scores = index.layers * tokens * indexer_flops(model, scored)
        costs.append(Cost(INDEXER, scores, index.layers * batch * scored * index.bytes_per_token))
    return costs


def _prompt_attention(
    model: ModelShape, deployment: Deployment, own: float, seen: float
) -> list[Cost]:
    """Of ``own`` query tokens of a rank that see ``seen`` tokens each, on average."""
    heads = model.num_heads / deployment.tp
    if model.latent is None:
        return [Cost("attention", model.num_layers * 4 * own * heads * seen * model.head_dim)]
    latent = model.latent
    if model.indexer is None:  # not absorbed: keys and values of every head
        widths = latent.nope_dim + latent.rope_dim + latent.value_dim
        return [Cost("attention", model.num_layers * 2 * own * heads * seen * widths)]
    parts = {part.name: part for part in deployment_parts(model, deployment)}
    widths = latent.key_width + latent.kv_rank
    rows = min(seen, model.indexer.topk)
    row_bytes = parts["latent"].bytes_per_token + INDEX_ID_BYTES
    num_bytes = own * (rows * row_bytes + IO_BYTES * heads * widths)
    flops = own * 2 * heads * rows * widths
    scores = model.index_layers * own * indexer_flops(model, seen)
    return [
        Cost("attention", model.num_layers * flops, model.num_layers * num_bytes),
        Cost(INDEXER, scores, model.index_layers * seen * parts[INDEXER].bytes_per_token),
    ]


def _feed_forward(
    model: ModelShape, deployment: Deployment, tokens: float, *, is_prompt: bool = False
) -> list[Cost]:
    """Dense layers over ``tp``; experts over all ranks, for the tokens of all copies.

    Args:
        tokens: of one copy; of one PCP rank.
    """
    parameters = count_parameters(model)
    item = value_bytes(model.weights)
    dense = parameters.dense / deployment.tp
    costs = [Cost("feed-forward", 2 * tokens * dense, dense * item)]
    if model.experts is None:
        return costs
    experts, ranks = model.experts, deployment.num_devices
    one = 3 * model.hidden_size * experts.inner
    everywhere = tokens * deployment.dp * deployment.pcp
    touched = 1 - (1 - 1 / experts.count) ** (everywhere * experts.per_token)
    held = experts.count / ranks * touched + experts.shared
    work = 2 * everywhere * (experts.per_token + experts.shared) * one / ranks
    fixed = 0.0
    if deployment.dp > 1:  # tokens travel to the ranks of their experts, and back
        floor = constant("expert_exchange_floor_us").value
        each = constant("expert_exchange_us_per_token").value
        fixed = experts.layers * max(floor, each * tokens) * 1e-6
    name = "experts"
    cost = Cost(name, experts.layers * work, experts.layers * held * one * item, fixed)
    return [*costs, cost] if model.dense_layers else [cost]


def _head(model: ModelShape, deployment: Deployment, rows: float) -> Cost:
    parameters = model.vocab_size * model.hidden_size / deployment.tp
    return Cost(
        "output head", 2 * rows * parameters, parameters * max(2, value_bytes(model.weights))
    )


def _floors(model: ModelShape) -> Cost:
    """What a layer takes however little there is to do."""
    if model.indexer is not None:
        layer_us = constant("sparse_attention_floor_us").value
    else:
        layer_us = constant("launch_us").value * constant("kernels_per_layer").value
    return Cost("launches", fixed_seconds=model.num_layers * layer_us * 1e-6)


def _draft(
    model: ModelShape, device: Device, deployment: Deployment, batch: int, context: float
) -> Cost:
    """The draft's forwards, one after the other; each reads its layer's whole cache."""
    weights = weight_bytes(
        model, tp=deployment.tp, expert_ranks=deployment.num_devices, mtp=True
    ).mtp
    parts = [part for part in deployment_parts(model, deployment) if part.is_draft]
    rows = min(context, model.indexer.topk) if model.indexer else context
    cache = sum(
        batch * part.total * (context if part.name == "mtp indexer" else rows) for part in parts
    )
    layer = _floors(model).fixed_seconds / model.num_layers
    forwards = deployment.draft_tokens
    head = _head(model, deployment, batch)
    flops = forwards * (2 * batch * weights / value_bytes(model.weights) + head.flops)
    num_bytes = forwards * (weights + cache + head.num_bytes)
    return Cost("draft", flops, num_bytes, forwards * layer)
