"""How many programs an engine compiles. Their shapes are the engine's own, see ``Blueprint``: every
number of sequences × every context × chunks and segments."""

from collections.abc import Mapping

from dcpjax.errors import ConfigError

MAX_PROGRAMS = 96
"""More programs than this are refused unless asked for. One takes the compiler minutes, large ones
up to an hour."""


def refuse_too_many(counts: Mapping[str, int], max_programs: int) -> None:
    """Raise ConfigError where so many programs of each kind are more than ``max_programs``."""
    programs = sum(counts.values())
    if programs > max_programs:
        raise ConfigError(
            "the compiler runs once for each program, and these are too many: take fewer sequences "
            "or a shorter context, or a higher limit",
            max_programs=max_programs,
            programs=programs,
            **counts,
        )
