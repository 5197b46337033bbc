"""What a compiled prompt step tells about work, exchanges and overlap, put together."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dcpjax.planner.deployment import Deployment
from dcpjax.planner.models import find_model
from dcpjax.planner.traffic import StepTokens, step_traffic
from scripts.prefill.models import score_widths
from scripts.prefill.overlap import Overlap, exchanged, find_exchanges, find_overlaps
from scripts.prefill.program import Program
from scripts.prefill.reads import Work, rank_work
from scripts.prefill.steps import PLAIN, PromptStep

VALUE_BYTES = 4  # everything is float32


@dataclass(frozen=True)
class Findings:
    """A step and its compiled program."""

    step: PromptStep
    program: Program

    @classmethod
    def of(cls, step: PromptStep, compiled: Any) -> "Findings":
        widths = score_widths(step.blueprint.model)
        return cls(step, Program.of(compiled.as_text(), widths))

    def trips(self, prior: int, rank: int) -> dict[str, int]:
        """Runs of each kind of loop in every layer that has one."""
        return {kind: work.trips for kind, work in self._work(prior, rank).items()}

    def rank_flops(self, priors: Sequence[int]) -> list[float]:
        """FLOPs of each rank, of all chunks behind these numbers of tokens together."""
        return [
            sum(self.program.total(self.trips(prior, rank)) for prior in priors)
            for rank in range(self.step.ranks)
        ]

    def loop_flops(self, kind: str, priors: Sequence[int]) -> list[float]:
        """The same of all loops of a kind."""
        return [
            sum(self.program.loops(kind, self.trips(prior, rank)) for prior in priors)
            for rank in range(self.step.ranks)
        ]

    def pairs(self, kind: str, prior: int) -> list[int]:
        """Of a query and a token, by rank: the work without what is read too much."""
        return [self._work(prior, rank)[kind].pairs for rank in range(self.step.ranks)]

    def _work(self, prior: int, rank: int) -> dict[str, Work]:
        return rank_work(self.step, prior, rank)

    @cached_property
    def exchanged_bytes(self) -> int:
        """Of all collectives."""
        return sum(array.num_bytes for array in exchanged(self.program))

    def layer_bytes(self) -> dict[str, dict[str, float]]:
        """Bytes that each part exchanges in one of its layers: of new rows, and of copies."""
        found = {}
        for name, part in find_exchanges(self.program, self.step).items():
            pool = self.step.pools.by_part[name]
            token = pool.num_heads * pool.width * VALUE_BYTES
            layers = len(part.layers)
            found[name] = {
                "rows": len(part.rows) / layers * self.step.chunk * token,
                "copies": len(part.copies) / layers * self.step.copied_tokens * token,
            }
        return found

    def overlaps(self, prior: int) -> list[Overlap]:
        """Of the rank that has most to do."""
        if self.step.config.residency not in ("sharded", "layer_split"):
            return []
        rank = max(range(self.step.ranks), key=lambda r: self.program.total(self.trips(prior, r)))
        parts = find_exchanges(self.program, self.step)
        return find_overlaps(self.program, parts, self.trips(prior, rank))


def imbalance(work: Sequence[float]) -> float:
    """The busiest rank over the mean."""
    return max(work) / statistics.mean(work) if any(work) else 1.0


def predicted_bytes(step: PromptStep, values: Mapping[str, Any]) -> int:
    """What the planner says about a step of a model with these values as its config.json."""
    config = step.config
    deployment = Deployment(
        pcp=step.ranks,
        dcp=config.decode_context_parallel_size,
        prefill_kv=config.residency or "replicated",
        page_size=config.block_size,
        cache_dtype="float32",
    )
    shape = step.shape
    tokens = StepTokens(
        prompt_rows=shape.prefill_rows,
        prompt_width=shape.prefill_width,
        context=step.copied_tokens,
    )
    found = step_traffic(find_model(dict(values)), deployment, tokens, dtype="float32")
    return found.num_bytes


def label(step: PromptStep) -> str:
    return PLAIN if step.ranks == 1 else f"{step.config.residency} {step.ranks}"
