"""Open a checkpoint, whatever its form, as a config and named tensors in Hugging Face's order.

Sources: a Hugging Face folder, a GGUF file, a name of the catalog. Nothing is read until asked for,
everything is checked before: what opens has exactly the tensors of its model.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dcpjax.config import GlmConfig, LlamaConfig, ModelConfig
from dcpjax.errors import CheckpointError
from dcpjax.models import catalog, gguf, huggingface, safetensors_files
from dcpjax.models.tensors import (
    FINAL_NORM,
    Shapes,
    StoredTensors,
    check_tensors,
    has_draft_layer,
    layer_prefix,
)
from dcpjax.models.tensors import expected_tensors as expected_tensors


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    ``shapes`` has the names of :func:`expected_tensors`; ``read`` and ``dtype`` are those of
    :class:`StoredTensors`. ``path`` is the folder or file, where the tokenizer is found as well.
    """

    config: ModelConfig
    shapes: Shapes
    read: Callable[[str], np.ndarray]
    dtype: str
    path: Path


def locate_checkpoint(model: str, progress: catalog.DownloadProgress | None = None) -> Path:
    """The folder, .gguf file or bare config.json that ``model`` means; a known name is brought when
    missing.

    Raises:
        CheckpointError: there is no such folder, file or name.
    """
    if model in catalog.known_models():
        return catalog.bring_model(model, progress)
    path = Path(model)
    if model and (path.is_dir() or (path.is_file() and path.suffix in (".gguf", ".json"))):
        return path
    raise CheckpointError(
        "the model is a folder, a .gguf file, a config.json or a known name",
        model=model,
        known=sorted(catalog.known_models()),
    )


def open_checkpoint(
    model: str,
    *,
    weights: bool = True,
    draft_layers: bool | None = None,
    progress: catalog.DownloadProgress | None = None,
) -> Checkpoint:
    """Open ``model`` and check that it has the tensors that its config asks for.

    Args:
        weights: False opens the config alone (random weights); ``read`` then raises.
        draft_layers: whether to open the draft layer (MTP). True: the model has to have one.
            False: it is left out, and nothing of it can be read. None: it is opened if there is
            one; a config may name a draft layer of which no tensor is there, as transformers
            leaves such layers out of what it saves. A layer of which some tensors are missing is
            refused always. What was decided is ``config.num_draft_layers`` of the result.
        progress: told how the download of a known name goes.

    Raises:
        CheckpointError: the model is missing, broken or not understood.
    """
    path = locate_checkpoint(model, progress)
    is_gguf = path.suffix == ".gguf"
    config, dtype = gguf.read_config(path) if is_gguf else huggingface.read_config(path)
    _check_token_ids(config)
    if draft_layers and not has_draft_layer(config):
        raise CheckpointError("the config names a draft layer (MTP)", model=model)
    if not weights:
        config = _without_drafts(config) if draft_layers is False else config
        return Checkpoint(config, expected_tensors(config), _refuse_to_read, dtype, path)
    stored = _open_gguf(path, config) if is_gguf else _open_safetensors(path)
    if not draft_layers and not _has_draft_tensors(stored.shapes, config):
        config = _without_drafts(config)
    check_tensors(stored.shapes, config)
    config = _without_drafts(config) if draft_layers is False else config
    shapes = expected_tensors(config)
    return Checkpoint(config, shapes, _limited_to(stored, shapes), stored.dtype, path)


def fingerprint(checkpoint: Checkpoint) -> str:
    """Hex digest of what has to agree for two engines to read each other's KV.

    Covers the config and a sample of the weights, enough to tell a fine-tuned model from its base
    and one quantisation from another: the final norm, and the projection that makes the last
    layer's keys. Not the draft layer, which an engine may have or not.
    """
    config = _without_drafts(checkpoint.config)
    digest = hashlib.sha256(repr(config).encode())
    keys = "kv_a_proj_with_mqa" if isinstance(config, GlmConfig) else "k_proj"
    last = layer_prefix(config.num_layers - 1)
    for name in (FINAL_NORM, f"{last}self_attn.{keys}.weight"):
        digest.update(np.ascontiguousarray(checkpoint.read(name), np.float32).tobytes())
    return digest.hexdigest()


def _has_draft_tensors(shapes: Shapes, config: ModelConfig) -> bool:
    prefix = layer_prefix(config.num_layers)
    return any(name.startswith(prefix) for name in shapes)


def _without_drafts(config: ModelConfig) -> ModelConfig:
    return replace(config, num_draft_layers=0) if has_draft_layer(config) else config


def _open_gguf(path: Path, config: ModelConfig) -> StoredTensors:
    assert isinstance(config, LlamaConfig), "GGUF files are of Llama's family"
    return gguf.open_tensors(path, config)


def _open_safetensors(path: Path) -> StoredTensors:
    if path.is_file():
        raise CheckpointError(
            "a bare config.json has no weights: it needs load_format='dummy'", model=str(path)
        )
    return safetensors_files.open_tensors(path)


def _check_token_ids(config: ModelConfig) -> None:
    bos = () if config.bos_token_id is None else (config.bos_token_id,)
    unknown = [token for token in (*config.eos_token_ids, *bos) if token >= config.vocab_size]
    if unknown:
        raise CheckpointError(
            "the special tokens of a model are in its vocabulary",
            token_ids=unknown,
            vocab_size=config.vocab_size,
        )


def _refuse_to_read(name: str) -> np.ndarray:
    raise CheckpointError("the checkpoint was opened without its weights", tensor=name)


def _limited_to(stored: StoredTensors, shapes: Shapes) -> Callable[[str], np.ndarray]:
    """``stored.read`` for the model's tensors alone, so that no one reads a harmless extra."""

    def read(name: str) -> np.ndarray:
        if name not in shapes:
            raise CheckpointError("the model has no such tensor", tensor=name)
        return stored.read(name)

    return read
