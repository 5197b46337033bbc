"""The settings that can be combined today, and the pairs of them that are refused."""

from typing import Any

from dcpjax.config import EngineConfig, LlamaConfig
from dcpjax.engine.blueprint import Blueprint
from dcpjax.errors import ConfigError
from tests.composition.pairwise import Choice, all_choices
from tests.engine.pair import transfer

OPTIONS: dict[str, tuple[Any, ...]] = {
    "mesh (tp, cp)": ((1, 1), (2, 4), (4, 2), (8, 1), (1, 8), (2, 2), (1, 3)),
    "cp": ("dcp", "pcp replicated", "pcp sharded", "pcp layer_split"),
    "interleave": (1, 4, "page"),
    "block_size": (8, 16, 64),
    "dcp_comm_backend": ("ag_rs", "a2a"),
    "prefill_gather": ("auto", "q"),
    "prefix caching": ("on", "off"),
    "kv_cache_dtype": ("float32", "bfloat16"),
    "prompt computed": ("here", "by another engine"),
    "step_form": ("dynamic", "static"),
    "speculation": ("off", "ngram"),
}
"""A mesh is shown by its axes. With DCP, -tp is their product; PCP ranks are beside -tp."""

NUM_LAYERS = 2
MODEL = LlamaConfig(
    architecture="LlamaForCausalLM",
    vocab_size=131,
    hidden_size=32,
    intermediate_size=49,
    num_layers=NUM_LAYERS,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=512,
)
"""As the tiny models are."""

SPECULATION = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
    }
}


def engine_settings(choice: Choice) -> dict[str, Any]:
    """A combination of OPTIONS as settings of an engine."""
    page_size = choice["block_size"]
    interleave = page_size if choice["interleave"] == "page" else choice["interleave"]
    cp = choice["mesh (tp, cp)"][1]
    return {
        **_parallel_sizes(choice),
        "cp_kv_cache_interleave_size": interleave,
        "max_num_batched_tokens": max(32, cp * interleave),
        "block_size": page_size,
        "dcp_comm_backend": choice["dcp_comm_backend"],
        "prefill_gather": choice["prefill_gather"],
        "enable_prefix_caching": choice["prefix caching"] == "on",
        "kv_cache_dtype": choice["kv_cache_dtype"],
        "step_form": choice["step_form"],
        **(SPECULATION if choice["speculation"] == "ngram" else {}),
        **(transfer("kv_consumer") if choice["prompt computed"] != "here" else {}),
    }


def _parallel_sizes(choice: Choice) -> dict[str, Any]:
    tp, cp = choice["mesh (tp, cp)"]
    if choice["cp"] == "dcp":
        return {"tensor_parallel_size": tp * cp, "decode_context_parallel_size": cp}
    residency = choice["cp"].removeprefix("pcp ")
    return {
        "tensor_parallel_size": tp,
        "prefill_context_parallel_size": cp,
        "prefill_kv": residency,
        "decode_context_parallel_size": cp if residency == "sharded" else 1,
    }


def is_refused(choice: Choice) -> bool:
    """Whether the rules say no."""
    return bool(broken_rules(choice))


def broken_rules(choice: Choice) -> list[tuple[str, str]]:
    """The settings whose values do not go together, two by two."""
    (_, cp), kind = choice["mesh (tp, cp)"], choice["cp"]
    is_pcp, is_layered = kind != "dcp", kind == "pcp layer_split"
    exchanges = choice["dcp_comm_backend"] == "a2a"
    gathers = choice["prefill_gather"] == "q"
    rules = {
        ("dcp_comm_backend", "decode_context_parallel_size"): exchanges and cp == 1,
        ("prefill_gather", "decode_context_parallel_size"): gathers and cp == 1,
        ("dcp_comm_backend", "prefill_context_parallel_size"): exchanges and is_pcp,
        ("prefill_gather", "prefill_context_parallel_size"): gathers and is_pcp,
        ("prefill_kv", "prefill_context_parallel_size"): is_pcp and cp == 1,
        ("prefill_context_parallel_size", "num_layers"): is_layered and cp > NUM_LAYERS,
        ("step_form", "prefill_context_parallel_size"): is_pcp and choice["step_form"] == "static",
        ("kv_role", "prefill_context_parallel_size"): is_pcp
        and choice["prompt computed"] != "here",
    }
    return [names for names, is_broken in rules.items() if is_broken]


def refusal(choice: Choice) -> ConfigError | None:
    """The error of a start with these settings."""
    try:
        config = EngineConfig.from_settings("any", engine_settings(choice))
        _ = Blueprint(config, MODEL, "cpu", "float32").sharding
    except ConfigError as error:
        return error
    return None


SERVED = all_choices(OPTIONS, lambda choice: not is_refused(choice))
REFUSED = all_choices(OPTIONS, is_refused)
