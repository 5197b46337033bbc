"""Expert layers for tests: on a mesh with given parameters, and by NumPy token by token."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dcpjax.config.glm import ExpertsConfig, GlmConfig
from dcpjax.form import FORMS
from dcpjax.mesh import ALL_RANKS, HeadLayout, decode_mesh, partition
from dcpjax.models.experts import Experts
from dcpjax.models.sharding import Sharding

Parameters = dict[str, np.ndarray]


def glm_config(hidden_size: int, **experts: Any) -> GlmConfig:
    """The shape of a model of which only the expert layers matter."""
    return GlmConfig(
        architecture="GlmMoeDsaForCausalLM",
        vocab_size=8,
        hidden_size=hidden_size,
        intermediate_size=8,
        num_layers=1,
        num_heads=8,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        max_position_embeddings=64,
        experts=ExpertsConfig(layers=(0,), **experts),
    )


def random_parameters(config: GlmConfig, seed: int) -> Parameters:
    """By the names of the module's tree, as float32, without padding."""
    random = np.random.default_rng(seed)
    experts, width = config.experts, config.hidden_size
    num, inner = experts.num_experts, experts.width
    shared = experts.num_shared * inner
    shapes = {
        "router.weight": (num, width),
        "router.bias": (num,),
        "gate_up": (num, width, 2, inner),
        "down": (num, inner, width),
        "shared.gate_up": (width, 2, shared),
        "shared.down": (shared, width),
    }
    return {
        name: (random.standard_normal(shape) * 0.5).astype(np.float32)
        for name, shape in shapes.items()
        if 0 not in shape
    }


def sharding_of(ranks: int, dcp: int, form: str) -> Sharding:
    return Sharding(HeadLayout(8, 1, ranks // dcp, dcp), form=FORMS[form])


def make_layer(
    config: GlmConfig,
    parameters: Parameters,
    *,
    ranks: int = 1,
    dcp: int = 1,
    form: str = "dynamic",
    dtype: Any = jnp.float32,
) -> Callable[..., jax.Array]:
    """The layer over a mesh: (x, is_real or None) to the output of every rank [ranks, T, E]."""
    mesh = decode_mesh(jax.devices()[:ranks], dcp)
    graph, state = nnx.split(Experts(config, sharding_of(ranks, dcp, form), dtype))
    flat = nnx.to_flat_state(state)
    specs = [partition(*one.get_metadata("axes")) for _, one in flat]
    values = [
        jax.device_put(_pad(parameters[".".join(path)], one), NamedSharding(mesh, spec))
        for (path, one), spec in zip(flat, specs, strict=True)
    ]

    def on_rank(values, x, is_real, ranks):
        merged = nnx.merge(graph, nnx.from_flat_state(_placed(flat, values)))
        return merged(x, ranks[0], is_real)[None]

    run = jax.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(), PartitionSpec(), PartitionSpec(ALL_RANKS)),
        out_specs=PartitionSpec(ALL_RANKS),
        check_vma=False,
    )
    numbers = jnp.arange(ranks, dtype=jnp.int32)
    return jax.jit(lambda x, is_real=None: run(values, x, is_real, numbers))


def _pad(value: np.ndarray, parameter: Any) -> np.ndarray:
    """Zeros up to the parameter's shape, in its type."""
    width = [(0, more - have) for have, more in zip(value.shape, parameter.shape, strict=True)]
    return np.pad(value, width).astype(parameter.dtype)


def _placed(flat: Any, values: list[jax.Array]) -> list[tuple[Any, Any]]:
    return [(path, one.replace(value)) for (path, one), value in zip(flat, values, strict=True)]


def choose_by_numpy(
    experts: ExpertsConfig, parameters: Parameters, row: np.ndarray
) -> dict[int, float]:
    """The weight of each expert that one token chooses."""
    logits = parameters["router.weight"].astype(np.float64) @ row.astype(np.float64)
    scores = 1 / (1 + np.exp(-logits))
    biased = scores + parameters["router.bias"]
    groups = np.split(np.arange(experts.num_experts), experts.num_groups)

    def group_score(group: int) -> float:
        return float(np.sum(np.sort(biased[groups[group]])[-2:]))

    best_groups = sorted(range(experts.num_groups), key=lambda g: (-group_score(g), g))
    allowed = [e for g in best_groups[: experts.groups_per_token] for e in groups[g]]
    chosen = sorted(allowed, key=lambda e: (-biased[e], e))[: experts.num_per_token]
    total = sum(scores[e] for e in chosen) + 1e-20 if experts.is_normalised else 1.0
    return {int(e): float(scores[e] / total * experts.scale) for e in chosen}


def layer_by_numpy(config: GlmConfig, parameters: Parameters, x: np.ndarray) -> np.ndarray:
    """The output [T, E] in float64."""
    wide = {name: value.astype(np.float64) for name, value in parameters.items()}

    def gated(row: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
        gate, up = row @ gate_up[:, 0], row @ gate_up[:, 1]
        return (gate / (1 + np.exp(-gate)) * up) @ down

    out = np.zeros(x.shape)
    for token, row in enumerate(x.astype(np.float64)):
        for expert, weight in choose_by_numpy(config.experts, parameters, row).items():
            out[token] += weight * gated(row, wide["gate_up"][expert], wide["down"][expert])
        if config.experts.num_shared:
            out[token] += gated(row, wide["shared.gate_up"], wide["shared.down"])
    return out
