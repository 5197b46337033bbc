"""What a setting may be: its type, and the rules that several settings share."""

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args, get_origin

from dcpjax.errors import ConfigError


def has_type(value: Any, annotation: Any) -> bool:
    """Whether a value is what a field's annotation says. No bool is a number, an int is a float.

    Args:
        annotation: a class, a Literal of strings, a union, or a tuple type.
    """
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind is types.UnionType:
        return any(has_type(value, part) for part in parts)
    if kind is tuple:
        items = cast(tuple[Any, ...], value) if isinstance(value, tuple) else None
        if items is None:
            return False
        wanted = parts[:1] * len(items) if parts[-1] is Ellipsis else parts
        return len(items) == len(wanted) and all(map(has_type, items, wanted))
    if isinstance(value, bool):
        return annotation is bool
    return isinstance(value, int | float if annotation is float else annotation)


def check_types(settings: Any) -> None:
    """Raise ConfigError for the first field of a dataclass whose value has another type."""
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        if not has_type(value, item.type):
            rule = f"{item.name} is {type_words(item.type)}"
            raise ConfigError(rule, **{item.name: value})


def check_names(kind: type, settings: Mapping[str, Any], what: str = "") -> None:
    """Raise ConfigError for names in a JSON object that are no fields of a dataclass.

    Args:
        what: kind of setting, as the error names it.
    """
    known = {item.name for item in dataclasses.fields(kind)}
    if unknown := sorted(set(settings) - known):
        words = f"{what} setting".strip() + "s" * (len(unknown) > 1)
        raise ConfigError(f"unknown {words} {', '.join(unknown)}", known=sorted(known))


def type_words(annotation: Any) -> str:
    """What :func:`has_type` asks for, as the end of a sentence."""
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(get_args(annotation))}"
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return f"of type {name}"


@dataclass(frozen=True)
class Rule:
    """What holds for the value of a setting, and the same in words."""

    holds: Callable[[Any], bool]
    words: str

    def check(self, settings: Any, *names: str) -> None:
        for name in names:
            value = getattr(settings, name)
            if value is not None and not self.holds(value):
                raise ConfigError(f"{name} is {self.words}", **{name: value})


COUNT = Rule(lambda value: value >= 1, "at least 1")
SEED = Rule(lambda value: 0 <= value < 2**63, "in [0, 2**63)")
FILLED = Rule(bool, "not empty")
PORT = Rule(lambda value: 0 <= value <= 65535, "in [0, 65535], 0 for any free one")
POSITIVE = Rule(lambda value: 0 < value < math.inf, "a finite number above 0")  # NaN is not
