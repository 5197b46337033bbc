"""The plan of a training run: what is trained when, on what, and how long.

Top-k passes no gradient to the indexer. So the model learns with dense attention first, then the
indexers learn which tokens it attends to, then both learn on with sparse attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Stage:
    """``num_steps`` steps over batches of ``rows`` rows of ``length`` tokens.

    ``is_sparse``: attention sees the indexer's choice. ``trains_indexer``, ``trains_model``: what
    changes. The rate goes in a line from ``rate`` to ``last_rate`` after a short warm-up.
    """

    name: str
    num_steps: int
    rows: int
    length: int
    mixture: Mapping[str, float]
    is_sparse: bool = False
    trains_indexer: bool = False
    trains_model: bool = True
    num_drafts: int = 1
    rate: float = 1.0
    last_rate: float = 1.0


_FIRST = {"pairs": 4, "copying": 3, "prose": 2, "arithmetic": 1}
_THEN = {"pairs": 2, "needles": 2, "dialogue": 1, "copying": 2, "prose": 3, "arithmetic": 2}
_LONG = {"pairs": 1, "needles": 3, "dialogue": 2, "copying": 2, "prose": 2, "arithmetic": 1}

PLAN = (
    Stage("short", 1600, 48, 64, _FIRST),
    Stage("middle", 900, 16, 192, _THEN),
    Stage("long", 400, 6, 512, _LONG, last_rate=0.5),
    Stage("indexer", 300, 6, 512, _LONG, trains_indexer=True, trains_model=False, num_drafts=0),
    Stage(
        "sparse", 900, 6, 512, _LONG, True, True, num_drafts=3, rate=0.6, last_rate=0.03
    ),
)


def plan(scale: float) -> tuple[Stage, ...]:
    """The stages with ``scale`` times as many steps, at least two of each."""
    return tuple(
        replace(stage, num_steps=max(2, round(scale * stage.num_steps))) for stage in PLAN
    )
