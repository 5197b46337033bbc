"""What prefill context parallelism (PCP) asks of the other settings of an engine."""

from typing import TYPE_CHECKING, Any

from dcpjax.errors import ConfigError, MeshError, UnsupportedCombination

if TYPE_CHECKING:
    from dcpjax.config.engine import EngineConfig


def check_without_pcp(config: "EngineConfig") -> None:
    """Refuse settings that are about PCP ranks.

    Raises:
        UnsupportedCombination: there are none.
    """
    asked = {
        "prefill_kv": config.prefill_kv != "auto",
        "prefill_gather": config.prefill_gather == "kv",
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise UnsupportedCombination(
                f"{name}={getattr(config, name)!r} is about PCP ranks, so it needs "
                "prefill_context_parallel_size > 1",
                prefill_context_parallel_size=config.prefill_context_parallel_size,
            )


def check_pcp(config: "EngineConfig") -> None:
    """Refuse what does not go with several PCP ranks.

    Raises:
        MeshError: DCP ranks that are not spread over the PCP ranks.
        ConfigError: steps too small to cut.
        UnsupportedCombination: another setting.
    """
    tp, dcp = config.tensor_parallel_size, config.decode_context_parallel_size
    pcp = config.prefill_context_parallel_size
    if dcp not in (1, pcp, tp * pcp):
        raise MeshError(
            "with PCP, decode_context_parallel_size is 1, prefill_context_parallel_size, or that "
            "times tensor_parallel_size",
            decode_context_parallel_size=dcp,
            prefill_context_parallel_size=pcp,
            tensor_parallel_size=tp,
        )
    if config.max_num_batched_tokens < 2 * pcp:
        raise ConfigError(
            "max_num_batched_tokens is at least twice prefill_context_parallel_size: each rank "
            "takes two chunks",
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_context_parallel_size=pcp,
        )
    for is_refused, rule, values in _rules(config):
        if is_refused:
            raise UnsupportedCombination(rule, prefill_context_parallel_size=pcp, **values)


def _rules(config: "EngineConfig") -> list[tuple[bool, str, dict[str, Any]]]:
    """Whether a rule is broken, the rule, and the values that break it."""
    dcp, residency = config.decode_context_parallel_size, config.residency
    is_sharded = residency == "sharded"
    gather, transfer = config.prefill_gather, config.kv_transfer_config
    kept = {"prefill_kv": residency, "decode_context_parallel_size": dcp}
    gathered = {"prefill_gather": gather, "prefill_kv": residency}
    return [
        (
            is_sharded and dcp == 1,
            "prefill_kv='sharded' spreads tokens over DCP ranks, so it needs "
            "decode_context_parallel_size > 1",
            kept,
        ),
        (
            not is_sharded and dcp > 1,
            f"prefill_kv={residency!r} keeps all tokens of a layer on one rank, so it needs "
            "decode_context_parallel_size 1",
            kept,
        ),
        (
            gather == "q",
            "prefill_gather='q' splits prompts by the owners of their tokens, PCP by chunks",
            gathered,
        ),
        (
            gather != "auto" and (gather == "kv") != is_sharded,
            "PCP gathers the cache (prefill_gather='kv') where it is sharded, and only there",
            gathered,
        ),
        (
            config.dcp_comm_backend == "a2a",
            "dcp_comm_backend='a2a' exchanges query heads, and PCP ranks have the same ones",
            {"dcp_comm_backend": config.dcp_comm_backend},
        ),
        (
            config.index_kv == "replicated" and residency == "layer_split",
            "index_kv='replicated' keeps the indexer's keys of all layers on each rank, and "
            "prefill_kv='layer_split' those of its own layers",
            {"index_kv": config.index_kv, "prefill_kv": residency},
        ),
        (
            config.step_form in ("static", "unrolled"),
            "PCP has steps of the dynamic form alone",
            {"step_form": config.step_form},
        ),
        (
            config.apply_prefill_dcp,
            "apply_prefill_dcp orders the ranks of an engine without PCP",
            {"apply_prefill_dcp": True},
        ),
        (
            transfer is not None and transfer.kv_role != "kv_producer",
            "PCP engines compute prompts, for themselves or with kv_role='kv_producer'",
            {"kv_role": None if transfer is None else transfer.kv_role},
        ),
    ]
