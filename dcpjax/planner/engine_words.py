"""Engines in words, as plans print them and simulations are told them."""

import re
from typing import Any

from dcpjax.errors import ConfigError
from dcpjax.planner.deployment import LAYER_SPLIT, Deployment

_ENGINES = re.compile(r"(?:(\d+)\s*[x×]\s*)?(.+)", re.IGNORECASE)
_SIZE = re.compile(r"(TP|DCP|PCP|DP)(\d+)", re.IGNORECASE)
_SPLIT = re.compile(r"layer[\s_-]+split", re.IGNORECASE)


def engines_label(count: int, deployment: Deployment) -> str:
    """``2 × TP8 DCP4``; sizes and the split of layers, no other settings."""
    return f"{count} × {deployment.label()}"


def parse_engines(text: str, **settings: Any) -> tuple[int, Deployment]:
    """What :func:`engines_label` wrote, or a person: ``PCP8 DCP8``, ``2 x TP8 DCP4``.

    Args:
        settings: further ones of the deployment.

    Raises:
        ConfigError: words that are not understood, or sizes that do not fit together.
    """
    match = _ENGINES.fullmatch(text.strip())
    count, words = (int(match[1] or 1), match[2]) if match else (0, "")
    rest, num_splits = _SPLIT.subn(" ", words)
    sizes = [_SIZE.fullmatch(word) for word in rest.split()]
    named: dict[str, Any] = {size[1].lower(): int(size[2]) for size in sizes if size}
    if count == 0 or not named or len(named) < len(sizes) or num_splits > 1:
        raise ConfigError(
            f"engines are written as in '2 x TP8 DCP4', 'PCP8 DCP8' or 'PCP8 {LAYER_SPLIT}'",
            engines=text,
        )
    if num_splits:
        named["prefill_kv"] = "layer_split"
    elif named.get("pcp", 1) > 1 and named.get("dcp", 1) > 1:
        named["prefill_kv"] = "sharded"
    return count, Deployment(**named, **settings)
