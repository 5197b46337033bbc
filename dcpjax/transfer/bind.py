"""Plans to addresses: page ids and memory regions make a plan something that can be moved."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BoundTransfer:
    """A plan with addresses."""
