"""What stands as MODEL in the printed commands: a name says a shape, and serving takes weights."""

from dataclasses import dataclass
from pathlib import Path

from dcpjax.models.catalog import known_models
from dcpjax.planner.models import Model, ModelShape

_WEIGHTS = "*.safetensors"
_DUMMY = (
    "With config.json alone, add --load-format dummy --skip-tokenizer-init: random weights, "
    "token ids"
)


@dataclass(frozen=True)
class ServedModel:
    """MODEL of ``dcpjax serve``; ``note`` says what to do about it, None where it serves as is."""

    argument: str
    note: str | None = None


def served_model(model: Model, shape: ModelShape) -> ServedModel:
    """What ``dcpjax serve`` takes for a model that was planned.

    Args:
        model: as the plan was told: a known name, a path, a shape or a config.
    """
    if isinstance(model, str):
        if model.lower() in known_models():
            return ServedModel(model.lower())
        path = Path(model)
        if path.is_dir() or path.name == "config.json":
            return _served_folder(path if path.is_dir() else path.parent)
    argument = f"/path/to/{Path(shape.name).name}"
    return ServedModel(
        argument,
        f"{argument} stands for the folder of the model: config.json, {_WEIGHTS} and the "
        f"tokenizer (--model-path names it). {_DUMMY}",
    )


def _served_folder(folder: Path) -> ServedModel:
    if next(folder.glob(_WEIGHTS), None):
        return ServedModel(str(folder))
    note = f"{folder} has no {_WEIGHTS}: put weights and tokenizer there. {_DUMMY}"
    return ServedModel(str(folder), note)
