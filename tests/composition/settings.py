"""The settings that can be combined today, and the pairs of them that are refused."""

from typing import Any

from dcpjax.config import EngineConfig
from dcpjax.errors import ConfigError
from tests.composition.pairwise import Choice, all_choices
from tests.engine.pair import transfer

OPTIONS: dict[str, tuple[Any, ...]] = {
    "mesh (tp, dcp)": ((1, 1), (2, 4), (4, 2), (8, 1), (1, 8), (2, 2), (1, 3)),
    "interleave": (1, 4, "page"),
    "block_size": (8, 16, 64),
    "dcp_comm_backend": ("ag_rs", "a2a"),
    "prefill_gather": ("none", "q"),
    "prefix caching": ("on", "off"),
    "kv_cache_dtype": ("float32", "bfloat16"),
    "prompt computed": ("here", "by another engine"),
    "step_form": ("dynamic", "static"),
    "speculation": ("off", "ngram"),
}
"""A mesh is shown by its axes; -tp is their product."""

SPECULATION = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
    }
}


def engine_settings(choice: Choice) -> dict[str, Any]:
    """A combination of OPTIONS as settings of an engine."""
    tp, dcp = choice["mesh (tp, dcp)"]
    page_size = choice["block_size"]
    interleave = page_size if choice["interleave"] == "page" else choice["interleave"]
    return {
        "tensor_parallel_size": tp * dcp,
        "decode_context_parallel_size": dcp,
        "cp_kv_cache_interleave_size": interleave,
        "max_num_batched_tokens": max(32, dcp * interleave),
        "block_size": page_size,
        "dcp_comm_backend": choice["dcp_comm_backend"],
        "prefill_gather": choice["prefill_gather"],
        "enable_prefix_caching": choice["prefix caching"] == "on",
        "kv_cache_dtype": choice["kv_cache_dtype"],
        "step_form": choice["step_form"],
        **(SPECULATION if choice["speculation"] == "ngram" else {}),
        **(transfer("kv_consumer") if choice["prompt computed"] != "here" else {}),
    }


def is_refused(choice: Choice) -> bool:
    """Whether the rules say no: what exchanges between DCP ranks needs some."""
    has_dcp = choice["mesh (tp, dcp)"][1] > 1
    return not has_dcp and (choice["dcp_comm_backend"], choice["prefill_gather"]) != (
        "ag_rs",
        "none",
    )


def refusal(choice: Choice) -> ConfigError | None:
    """The error of a start with these settings."""
    try:
        EngineConfig.from_settings("any", engine_settings(choice))
    except ConfigError as error:
        return error
    return None


SERVED = all_choices(OPTIONS, lambda choice: not is_refused(choice))
REFUSED = all_choices(OPTIONS, is_refused)
