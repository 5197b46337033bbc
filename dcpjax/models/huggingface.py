"""The config.json of a Hugging Face folder as a ModelConfig, whatever its family."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dcpjax.config import ModelConfig
from dcpjax.errors import CheckpointError
from dcpjax.models import huggingface_glm, huggingface_llama
from dcpjax.models.config_values import Values, named_dtype, token_ids

_READERS: Mapping[str, Callable[[Values], ModelConfig]] = {
    **dict.fromkeys(huggingface_llama.ARCHITECTURES, huggingface_llama.read_llama),
    **dict.fromkeys(huggingface_glm.ARCHITECTURES, huggingface_glm.read_glm),
}


def read_config(source: Path) -> tuple[ModelConfig, str]:
    """The model's config, and the stored type that config.json names.

    Args:
        source: a folder with a config.json, or such a file alone.

    Raises:
        CheckpointError: config.json is missing, broken, or has something not understood.
    """
    folder = source.parent if source.is_file() else source
    path = source if source.is_file() else folder / "config.json"
    values = _read_json(path)
    config = _READERS[_architecture(values)](values)
    generation = folder / "generation_config.json"
    more = _read_json(generation) if source.is_dir() and generation.is_file() else {}
    ends = token_ids(values, "eos_token_id") + token_ids(more, "eos_token_id")
    config = replace(
        config,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        bos_token_id=next(iter(token_ids(values, "bos_token_id")), None),
    )
    return config, named_dtype(values)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError("the file cannot be read", path=str(path)) from error
    except ValueError as error:  # broken JSON or broken UTF-8
        raise CheckpointError("the file is valid JSON", path=str(path), found=str(error)) from error
    if not isinstance(values, dict):
        raise CheckpointError("the file is a JSON object", path=str(path), found=type(values))
    return values


def _architecture(values: Values) -> str:
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _READERS:
        raise CheckpointError(
            f"architectures in config.json is one of {', '.join(_READERS)}",
            architectures=names,
        )
    return names[0]
