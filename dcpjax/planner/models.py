"""The shape of a model, as far as memory, traffic and time depend on it.

Read from a config.json in the spelling of Hugging Face: GLM-5 and later, DeepSeek-V3 and V3.2,
Qwen3, Llama 3, SmolLM2. Known names stand in ``data/models.json``, each with its source, or are
those of models that come with the package.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dcpjax.errors import CheckpointError, ConfigError
from dcpjax.models.catalog import SHIPPED, bring_model
from dcpjax.planner.data import read_data
from dcpjax.planner.provenance import Kind

LATENT_TYPES = ("glm_moe_dsa", "deepseek_v3", "deepseek_v32")
HEAD_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
SKIP_TOPK_OFFSET = 2
"""Of models whose config does not say it: the first layers that choose for themselves."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (MLA): widths of its projections."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def key_width(self) -> int:
        """Of the absorbed form, in which all heads share one key."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class Indexer:
    """What chooses the tokens that sparse attention reads; ``layers`` have one of their own."""

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True)
class Experts:
    """The feed-forward of the layers that have experts; ``inner`` is one expert's width."""

    count: int
    per_token: int
    shared: int
    inner: int
    layers: int


@dataclass(frozen=True)
class ModelShape:
    """One decoder. ``latent`` is None for attention with key and value heads.

    Attributes:
        model_type: the family, as config.json names it.
        weights: the type of the stored weights.
        source, kind: where the shape comes from.
    """

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    max_context: int
    is_tied: bool = False
    latent: Latent | None = None
    indexer: Indexer | None = None
    experts: Experts | None = None
    mtp_layers: int = 0
    weights: str = "bfloat16"
    source: str = ""
    kind: Kind = "datasheet"

    @property
    def stored_heads(self) -> int:
        """KV heads of the cache: latents are one."""
        return 1 if self.latent else self.num_kv_heads

    @property
    def index_layers(self) -> int:
        return len(self.indexer.layers) if self.indexer else 0

    @property
    def dense_layers(self) -> int:
        """Layers without experts."""
        return self.num_layers - (self.experts.layers if self.experts else 0)


Model = str | ModelShape | Mapping[str, Any]
"""A known name or a path, a shape, or the contents of a config.json."""


def known_models() -> tuple[str, ...]:
    """Names that :func:`find_model` knows."""
    return (*read_data("models"), *SHIPPED)


def find_model(model: Model) -> ModelShape:
    """The shape of a model.

    Args:
        model: a known name in any case, a config.json or the folder of one, its contents, or a
            shape, which is returned.

    Raises:
        ConfigError: no known name and no file.
        CheckpointError: a config that is not understood.
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping):
        return read_shape(model, name=str(model.get("_name_or_path") or model.get("model_type")))
    name, entries = model.lower(), read_data("models")
    if name in entries:
        return read_shape(entries[name]["config"], name, entries[name])
    path = bring_model(name) if name in SHIPPED else Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            "MODEL is a known name, a config.json or the folder of one",
            model=model,
            known=list(known_models()),
        )
    return read_shape(_read_json(file), name=_name_of(file))


def _name_of(file: Path) -> str:
    """A config.json has the name of its folder."""
    return file.resolve().parent.name if file.name == "config.json" else file.stem


def _read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"config.json is a JSON file: {error}", file=str(file)) from error
    if not isinstance(config, dict):
        raise CheckpointError("config.json is a JSON object", file=str(file))
    return cast(dict[str, Any], config)


def read_shape(
    config: Mapping[str, Any], name: str, entry: Mapping[str, Any] | None = None
) -> ModelShape:
    """The shape that a config.json describes; ``entry`` says where it comes from."""
    kind = config.get("model_type")
    if kind not in LATENT_TYPES + HEAD_TYPES:
        raise CheckpointError(
            "the planner knows the model_type", model_type=kind, known=LATENT_TYPES + HEAD_TYPES
        )
    layers, heads = _count(config, "num_hidden_layers"), _count(config, "num_attention_heads")
    hidden = _count(config, "hidden_size")
    entry = entry or {"source": "config.json", "kind": "datasheet"}
    return ModelShape(
        name=name,
        model_type=kind,
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=_count(config, "vocab_size"),
        num_heads=heads,
        num_kv_heads=_count(config, "num_key_value_heads", heads),
        # GLM's head_dim is no width of its attention, see qk_*_head_dim.
        head_dim=0 if kind in LATENT_TYPES else _count(config, "head_dim", hidden // heads),
        inner_size=_count(config, "intermediate_size"),
        max_context=_count(config, "max_position_embeddings"),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        latent=_read_latent(config) if kind in LATENT_TYPES else None,
        indexer=_read_indexer(config, layers) if config.get("index_topk") else None,
        experts=_read_experts(config, layers),
        mtp_layers=int(config.get("num_nextn_predict_layers") or 0),
        weights=entry.get("weights") or _stored_weights(config),
        source=entry["source"],
        kind=entry["kind"],
    )


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json has {key}, a whole number above 0", **{key: value})
    return value


def _stored_weights(config: Mapping[str, Any]) -> str:
    quantization: Any = config.get("quantization_config") or {}
    is_quantized = quantization.get("quant_method") == "fp8"
    return (
        "fp8"
        if is_quantized
        else str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    )


def _read_latent(config: Mapping[str, Any]) -> Latent:
    return Latent(
        q_rank=_count(config, "q_lora_rank"),
        kv_rank=_count(config, "kv_lora_rank"),
        nope_dim=_count(config, "qk_nope_head_dim"),
        rope_dim=_count(config, "qk_rope_head_dim"),
        value_dim=_count(config, "v_head_dim"),
    )


def _read_indexer(config: Mapping[str, Any], num_layers: int) -> Indexer:
    types = config.get("indexer_types")
    if types:
        layers = tuple(index for index, kind in enumerate(types) if kind == "full")
    else:
        offset = config.get("index_skip_topk_offset")
        layers = index_layers(
            num_layers,
            _count(config, "index_topk_freq", 1),
            SKIP_TOPK_OFFSET if offset is None else int(offset),
        )
    return Indexer(
        layers,
        heads=_count(config, "index_n_heads"),
        head_dim=_count(config, "index_head_dim"),
        topk=_count(config, "index_topk"),
    )


def index_layers(num_layers: int, freq: int, offset: int) -> tuple[int, ...]:
    """Layers with an indexer of their own; the others use the choice of the last such layer."""
    layers = range(num_layers)
    return tuple(layer for layer in layers if max(layer - offset + 1, 0) % freq == 0)


def _read_experts(config: Mapping[str, Any], num_layers: int) -> Experts | None:
    count = config.get("n_routed_experts") or config.get("num_experts")
    if not count:
        return None
    types = config.get("mlp_layer_types")
    dense = int(config.get("first_k_dense_replace") or 0)
    return Experts(
        count=int(count),
        per_token=_count(config, "num_experts_per_tok"),
        shared=int(config.get("n_shared_experts") or 0),
        inner=_count(config, "moe_intermediate_size"),
        layers=types.count("sparse") if types else num_layers - dense,
    )
