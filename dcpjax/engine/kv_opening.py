"""An engine gets ready for transfers: each process registers its memory, the leader knows of all.

Followers have nothing else to do with KV: leases, offers and the side channel are the leader's, and
other engines read from each process's memory by the agent that registered it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from dcpjax.cache.pool import PoolShapes
from dcpjax.engine.blueprint import Blueprint
from dcpjax.engine.kv_local import LocalKV
from dcpjax.engine.kv_parts import Regions, describe_parts
from dcpjax.engine.kv_staging import StagingArea
from dcpjax.engine.processes import Processes
from dcpjax.engine.runner import Runner
from dcpjax.transfer.backend import TransferBackend
from dcpjax.transfer.engine_info import EngineInfo, compatibility_factors
from dcpjax.transfer.memory import RankMemory
from dcpjax.transfer.part_info import PartInfo


class ProcessMemory(msgspec.Struct, frozen=True):
    """What one process has registered.

    Attributes:
        agent: bytes of its backend.
        ranks: of this process, ascending.
        regions: by cache part, in the order of ``ranks``.
    """

    agent: bytes
    ranks: tuple[int, ...]
    regions: dict[str, tuple[RankMemory, ...]]


@dataclass(frozen=True)
class EngineMemory:
    """What all processes of an engine have registered: their agents, and the regions of all ranks,
    each of which says which agent it is with."""

    agents: tuple[bytes, ...]
    regions: Regions


def memory_platform(blueprint: Blueprint) -> str:
    """Of the memory that other engines read and write."""
    return "cpu" if blueprint.mirrors_pool else blueprint.platform


def open_local_kv(
    blueprint: Blueprint,
    runner: Runner,
    pools: PoolShapes,
    backend: TransferBackend,
    processes: Processes,
    *,
    engine_id: str,
    weights: str,
) -> LocalKV | None:
    """The engine's side of its transfers, once all processes have registered their memory.

    Args:
        weights: fingerprint of the checkpoint.

    Returns:
        None on a follower.

    Raises:
        TransferError: the library refuses the memory.
        EngineDeadError: another process is gone or failed.
    """
    config = blueprint.config.kv_transfer_config
    assert config is not None, "an engine with a backend has settings for it"
    is_staging = config.is_consumer and backend.pulls and memory_platform(blueprint) == "cpu"
    staging = StagingArea(runner.mesh.size) if is_staging else None
    memory = share_memory(runner, backend, processes, staging)
    if not blueprint.config.distributed.is_leader:
        return None
    parts = describe_parts(blueprint.parts, pools, blueprint.placements, memory.regions)
    info = _describe(blueprint, parts, memory.agents, backend.name, engine_id, weights)
    return LocalKV(info, backend, timeout=config.transfer_timeout, staging=staging)


def share_memory(
    runner: Runner, backend: TransferBackend, processes: Processes, staging: StagingArea | None
) -> EngineMemory:
    """Register this process's memory, and see that all others have done so."""
    memory = runner.memory
    regions = itertools.chain(*memory.values(), staging.regions if staging else ())
    backend.register(list(regions))
    own = ProcessMemory(backend.agent, runner.own_ranks, dict(memory))
    found = processes.gather(msgspec.msgpack.encode(own))
    return join_memory([msgspec.msgpack.decode(one, type=ProcessMemory) for one in found])


def join_memory(processes: Sequence[ProcessMemory]) -> EngineMemory:
    """The memory of all processes, by node rank, as that of one engine."""
    regions = {name: _regions_of(name, processes) for name in processes[0].regions}
    return EngineMemory(tuple(process.agent for process in processes), regions)


def _regions_of(part: str, processes: Sequence[ProcessMemory]) -> tuple[RankMemory, ...]:
    by_rank = {
        rank: replace(region, agent=agent)
        for agent, process in enumerate(processes)
        for rank, region in zip(process.ranks, process.regions[part], strict=True)
    }
    return tuple(by_rank[rank] for rank in sorted(by_rank))


def _describe(
    blueprint: Blueprint,
    parts: tuple[PartInfo, ...],
    agents: tuple[bytes, ...],
    backend: str,
    engine_id: str,
    weights: str,
) -> EngineInfo:
    """The engine as its peers shall know it."""
    config, model, transfer = blueprint.config, blueprint.model, blueprint.config.kv_transfer_config
    assert transfer is not None, "an engine that is described transfers KV"
    return EngineInfo(
        engine_id=engine_id,
        factors=compatibility_factors(
            model=model.architecture,
            weights=weights,
            dtype=str(blueprint.dtype),
            cache_format=parts[0].cache_format,
            cache_dtype=parts[0].cache_dtype,
            num_hidden_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_size=blueprint.parts[0].width,
        ),
        parts=parts,
        tp_size=config.tensor_parallel_size,
        pcp_size=config.prefill_context_parallel_size,
        dcp_size=config.decode_context_parallel_size,
        interleave=config.interleave,
        backend=backend,
        agents=agents,
        kv_lease_duration=transfer.kv_lease_duration,
        kv_lease_extension=transfer.kv_lease_extension,
        heartbeat_interval=transfer.heartbeat_interval,
    )
