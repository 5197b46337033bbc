"""What a rank's memory holds, and how many tokens are left room for.

Widths of tokens, pages and pools are the engine's own functions (``cache/widths.py``).
"""

import math
from dataclasses import dataclass

from dcpjax.cache import widths
from dcpjax.cache.widths import PartWidth
from dcpjax.errors import ConfigError
from dcpjax.layout import KVPlacement
from dcpjax.planner.cache_parts import kv_parts
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.hardware import GIB, Device, constant, find_device
from dcpjax.planner.models import Model, ModelShape, find_model
from dcpjax.planner.parameters import weight_bytes


@dataclass(frozen=True)
class MemoryItem:
    """One user of a rank's memory."""

    name: str
    num_bytes: float


@dataclass(frozen=True)
class Capacity:
    """The memory of one rank, and the tokens that fit.

    Attributes:
        used: what is there before the cache.
        page_bytes: of one page id on one rank, all parts; a draft's part has all tokens of the
            virtual page.
        num_pages: usable pages of a rank; 0 where none fits.
    """

    model: ModelShape
    device: Device
    deployment: Deployment
    memory_bytes: float
    used: tuple[MemoryItem, ...]
    page_bytes: int
    num_pages: int

    @property
    def free_bytes(self) -> int:
        """For the cache of a rank; negative where the rest alone does not fit."""
        return int(self.memory_bytes - sum(item.num_bytes for item in self.used))

    @property
    def rank_token_bytes(self) -> float:
        """Bytes that one token of a sequence costs each rank."""
        return self.page_bytes / self.deployment.virtual_page

    @property
    def tokens(self) -> int:
        """Tokens of sequences that one copy of the attention can hold."""
        return self.num_pages * self.deployment.virtual_page

    @property
    def total_tokens(self) -> int:
        """Of the engine: all copies."""
        return self.tokens * self.deployment.dp

    def num_requests(self, context: int) -> int:
        """Sequences of so many tokens that fit at the same time, in all copies."""
        pages = -(-context // self.deployment.virtual_page)
        return self.num_pages // pages * self.deployment.dp

    def missing_bytes(self, context: int) -> int:
        """What a rank lacks for one sequence of so many tokens; 0 where it fits."""
        pages = -(-context // self.deployment.virtual_page)
        needed = widths.pool_bytes(pages, self.page_bytes)
        return max(0, needed - self.free_bytes)

    def explain(self, context: int) -> str:
        """Whether one sequence fits, with the numbers."""
        name = self.deployment.label()
        if self.free_bytes < 0:
            return (
                f"{name}: weights and buffers alone are {-self.free_bytes / GIB:.1f} GiB too much"
            )
        needed = context * self.rank_token_bytes / GIB
        free, missing = self.free_bytes / GIB, self.missing_bytes(context) / GIB
        start = f"{name}: a sequence of {context:,} tokens takes {needed:.1f} GiB of each rank"
        if missing:
            return f"{start}, of which {free:.1f} GiB are free: {missing:.1f} GiB short"
        return f"{start}; {free:.1f} GiB are free, {self.num_requests(context)} such sequences fit"


def capacity(
    model: Model,
    device: str | Device,
    deployment: Deployment | None = None,
    *,
    context: int = 0,
    utilization: float | None = None,
    workspace_bytes: float | None = None,
    expert_ranks: int | None = None,
) -> Capacity:
    """What fits into a rank's memory beside the weights.

    Args:
        context: longest sequence that is computed; PCP ranks that share a cache, by tokens or by
            layers, copy one layer of it whole, and the next one meanwhile.
        utilization: share of the memory that may be used; default 0.9.
        workspace_bytes: activations, graphs, buffers; default 10 GiB.
        expert_ranks: over which experts are spread; default all ranks of all copies.

    Raises:
        ConfigError: a model, device or cache type that does not exist, or a utilization outside
            (0, 1].
    """
    shape, chip = find_model(model), find_device(device)
    deployment = deployment or Deployment()
    share = constant("memory_utilization").value if utilization is None else utilization
    if not 0 < share <= 1:
        raise ConfigError("utilization is in (0, 1]", utilization=share)
    page = page_bytes(shape, deployment)
    workspace = (
        constant("workspace_gib").value * GIB if workspace_bytes is None else workspace_bytes
    )
    weights = weight_bytes(
        shape,
        tp=deployment.tp,
        expert_ranks=expert_ranks or deployment.num_devices,
        mtp=deployment.draft_tokens > 0,
    )
    used = [
        MemoryItem("attention weights", weights.attention),
        MemoryItem("expert weights", weights.experts),
        MemoryItem("dense feed-forward weights", weights.dense),
        MemoryItem("embedding and head", weights.embedding),
        MemoryItem("draft layer weights", weights.mtp),
        MemoryItem("activations, graphs, buffers", workspace),
        MemoryItem("temporary copies of a layer", _copied_bytes(shape, deployment, context)),
    ]
    used = tuple(item for item in used if item.num_bytes)
    memory = chip.memory_bytes * share
    free = int(memory - sum(item.num_bytes for item in used))
    num_pages = max(0, widths.affordable_pages(free, page))
    return Capacity(shape, chip, deployment, memory, used, page, num_pages)


def check_host_memory(host_gib: float) -> None:
    """Refuse what is no amount of the host's memory.

    Raises:
        ConfigError: it is below 0, endless or no number.
    """
    if not 0 <= host_gib < math.inf:
        raise ConfigError("the host's memory for prefixes is at least 0 GiB", host_gib=host_gib)


def deployment_parts(model: ModelShape, deployment: Deployment) -> tuple[PartWidth, ...]:
    """The parts of the cache that an engine of this deployment has."""
    dtype = deployment.stored_dtype(model)
    return kv_parts(model, cache_dtype=dtype, mtp=deployment.draft_tokens > 0)


def page_bytes(model: ModelShape, deployment: Deployment) -> int:
    """Bytes of one page id on the rank that holds most, all parts together."""
    return sum(_part_page_bytes(model, deployment, p) for p in deployment_parts(model, deployment))


def _part_page_bytes(model: ModelShape, deployment: Deployment, part: PartWidth) -> int:
    placement = deployment.part_placement(part, model)
    layers = max(share.num_layers for share in placement.shares)
    heads = _rank_heads(placement)
    return widths.page_bytes(layers, heads, placement.page_size, part.bytes_per_token)


def _rank_heads(placement: KVPlacement) -> int:
    return max(share.num_heads for share in placement.shares)


def _copied_bytes(model: ModelShape, deployment: Deployment, context: int) -> int:
    """Temporary copies of a layer's cache that prefill makes: of one layer, and of the next."""
    if deployment.prefill_kv == "replicated":
        return 0
    return (
        2
        * context
        * sum(
            _rank_heads(deployment.part_placement(part, model)) * part.bytes_per_token
            for part in deployment_parts(model, deployment)
            if not deployment.keeps_whole(part)
        )
    )
