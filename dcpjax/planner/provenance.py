"""Where a number comes from: every constant says so, and results say what they rest on."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["datasheet", "measured", "reported", "derived"]
"""datasheet: the maker's figure. measured: a published measurement with its method. reported: a
figure that somebody states. derived: arithmetic from the others, or an assumption stated as one."""


@dataclass(frozen=True)
class Constant:
    """One number with its unit, kind and source."""

    name: str
    value: float
    unit: str
    kind: Kind
    source: str


def kinds_of(constants: Iterable[Constant]) -> dict[str, list[str]]:
    """Names of the constants by kind, for the foot of a report."""
    by_kind: dict[str, list[str]] = {}
    for constant in constants:
        names = by_kind.setdefault(constant.kind, [])
        if constant.name not in names:
            names.append(constant.name)
    return by_kind
