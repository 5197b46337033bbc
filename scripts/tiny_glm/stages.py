"""The plan of a training run: what is trained when, on what, and how long.

Top-k passes no gradient to the indexer. So the model learns with dense attention first, then the
indexers learn which tokens it attends to, then both learn on, at last with sparse attention.
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


_MIXTURE = {"pairs": 2, "needles": 2, "dialogue": 2, "copying": 2, "prose": 2, "arithmetic": 2}
_RECALL = {"pairs": 1, "reminders": 4, "dialogue": 2, "copying": 1, "prose": 2, "arithmetic": 1}
_LONG = {"pairs": 1, "needles": 3, "dialogue": 2, "copying": 2, "prose": 2, "arithmetic": 1}

PLAN = (
    Stage("short", 350, 32, 64, _MIXTURE),
    Stage("middle", 200, 12, 192, _MIXTURE),
    Stage("long", 60, 4, 512, _LONG, last_rate=0.6),
    Stage("indexer", 100, 4, 512, _LONG, trains_indexer=True, trains_model=False, num_drafts=0),
    Stage("both", 100, 4, 512, _LONG, trains_indexer=True, rate=0.8, last_rate=0.6),
    Stage("sparse", 110, 4, 512, _LONG, True, True, num_drafts=3, rate=0.6, last_rate=0.03),
    Stage("recall", 250, 4, 512, _RECALL, True, True, num_drafts=3, rate=0.4, last_rate=0.03),
)


def smoke_plan() -> tuple[Stage, ...]:
    """Two steps of every stage on a few short rows: shows that all of it runs, and no more."""
    return tuple(replace(stage, num_steps=2, rows=2, length=32) for stage in PLAN)


def plan(scale: float) -> tuple[Stage, ...]:
    """The stages with ``scale`` times as many steps, at least two of each."""
    return tuple(replace(stage, num_steps=max(2, round(scale * stage.num_steps))) for stage in PLAN)
