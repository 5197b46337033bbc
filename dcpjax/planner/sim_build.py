"""Simulated clusters from deployments: pages by memory, step times by estimate or by a table."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dcpjax.errors import ConfigError
from dcpjax.planner.cache_parts import check_cache_dtype
from dcpjax.planner.candidates import Candidate
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.hardware import GIB, Device, constant
from dcpjax.planner.memory import Capacity, capacity, check_host_memory, deployment_parts
from dcpjax.planner.models import ModelShape
from dcpjax.planner.sim_cluster import Cluster, Failure, Routing
from dcpjax.planner.sim_step import EngineSpec, PromptShape
from dcpjax.planner.step_times import EstimatedSteps, StepTimes
from dcpjax.planner.steps import acceptance_length
from dcpjax.planner.transfers import transfer_cost

TYPICAL_TOKENS = 65_536
"""Length at which the cost of a token's transfer is taken."""


def build_cluster(
    model: ModelShape,
    device: Device,
    candidate: Candidate,
    *,
    context: int,
    host_gib: float = 0.0,
    max_batch: int = 256,
    chunk: int = 8192,
    acceptance: float | None = None,
    routing: Routing = "least_loaded",
    failures: Sequence[Failure] = (),
    steps: StepTimes | None = None,
    prompt_shape: PromptShape | None = None,
) -> Cluster:
    """The engines of a candidate, one for each copy of the attention.

    Args:
        context: longest sequence, for the temporary copies of prefill.
        host_gib: the host's memory for evicted prefixes, of each engine that computes prompts.
        acceptance: tokens of a decode step, default as measured for the model.
        steps: step times of all engines, instead of estimated ones.
        prompt_shape: how the engines choose a shape for prompts, where their programs have few.

    Raises:
        ConfigError: an engine without room for a single page, sizes that no engine has, or a type
            that the cache does not have.
    """
    check_host_memory(host_gib)
    check_cache_dtype(model, candidate.decode.cache_dtype)
    settings: dict[str, Any] = {
        "host_gib": host_gib,
        "max_batch": max_batch,
        "chunk": chunk,
        "steps": steps,
        "prompt_shape": prompt_shape,
    }
    decode_room = _room(model, device, candidate.decode, context)
    accepted = acceptance
    if accepted is None:
        accepted = acceptance_length(model, candidate.decode.draft_tokens)
    is_split = candidate.prefill is not None
    decode_settings: dict[str, Any] = {**settings, "host_gib": 0.0} if is_split else settings
    decode = _engines(decode_room, candidate.num_decode, acceptance=accepted, **decode_settings)
    cluster = Cluster(
        decode=decode,
        num_devices=candidate.num_devices,
        routing=routing,
    )
    if candidate.prefill is not None:
        room = _room(model, device, candidate.prefill, context)
        prefill = _engines(room, candidate.num_prefill, acceptance=1.0, **settings)
        base = constant("transfer_base_us").value * 1e-6
        cost = transfer_cost(model, candidate.prefill, candidate.decode, TYPICAL_TOKENS)
        cluster = replace(
            cluster,
            prefill=prefill,
            transfer_base=base,
            transfer_per_token=(cost.seconds(device) - base) / TYPICAL_TOKENS,
        )
    return replace(cluster, failures=tuple(failures))


def _room(model: ModelShape, device: Device, deployment: Deployment, context: int) -> Capacity:
    room = capacity(model, device, deployment, context=context)
    if not room.num_pages:
        raise ConfigError(f"an engine has room for its cache. {room.explain(context)}")
    return room


def _engines(
    room: Capacity,
    count: int,
    *,
    acceptance: float,
    host_gib: float,
    max_batch: int,
    chunk: int,
    steps: StepTimes | None,
    prompt_shape: PromptShape | None,
) -> tuple[EngineSpec, ...]:
    deployment = room.deployment
    copies = count * deployment.dp
    token_bytes = sum(part.total for part in deployment_parts(room.model, deployment))
    page_bytes = token_bytes * deployment.virtual_page
    spec = EngineSpec(
        steps=steps or EstimatedSteps(room.model, room.device, deployment),
        num_pages=room.num_pages,
        page_tokens=deployment.virtual_page,
        host_pages=int(host_gib * GIB / deployment.dp // page_bytes),
        host_seconds=page_bytes / deployment.num_devices / (room.device.host_gb_s * 1e9),
        max_batch=max_batch,
        chunk=chunk,
        acceptance=acceptance,
        prompt_shape=prompt_shape,
        looks_ahead=not deployment.draft_tokens,  # drafts follow from what was accepted
    )
    return (spec,) * copies
