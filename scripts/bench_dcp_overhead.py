"""What it costs to share the tokens of a sequence over ranks, as a function of context.

    python -m scripts.bench_dcp_overhead [--parts prefill decode]

Prefill: a prompt chunk on N ranks that share the cache (PCP x DCP) over the same on N ranks that
have all of it. What is added is the gather of every layer's prior tokens; the floor of the ratio is
1. Decode: a step of one sequence with DCP N over one with TP N. Queries, outputs and log-sum-exps
are exchanged, whatever the context; what a rank reads of the cache is a share of the tokens instead
of a share of the heads (of latents: instead of all). Bytes are of one step: exchanged as the
compiled program has it, read by a rank as the pools' shapes have it. Sides take turns in one
process on virtual devices that share this machine's cores and memory, which a cluster's ranks do
not: there, reading a share takes a share of the time. Ratios are medians over rounds of the ratio
within a round. The last line of stdout is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from dcpjax.cache.parts import LATENT
from dcpjax.config import EngineConfig, GlmConfig
from dcpjax.engine.blueprint import Blueprint
from dcpjax.engine.step import StepShape
from dcpjax.mesh import decode_mesh, find_devices
from dcpjax.models.checkpoint import Checkpoint
from scripts.bench_workers import ratio, take_turns
from scripts.prefill.models import MODELS, score_widths, write_model
from scripts.prefill.outline import Outline
from scripts.prefill.overlap import exchanged
from scripts.prefill.program import Program
from scripts.prefill.steps import RunningStep, prompt_step

PARTS = ("prefill", "decode")
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Side:
    """A step that runs, and the bytes that its ranks exchange."""

    outline: Outline
    step: RunningStep
    exchanged_bytes: int

    @classmethod
    def of(cls, outline: Outline, shape: StepShape, checkpoint: Checkpoint) -> "Side":
        step = RunningStep(outline, shape, checkpoint)
        widths = score_widths(outline.blueprint.model)
        program = Program.of(step.compiled.as_text(), widths)
        return cls(outline, step, sum(array.num_bytes for array in exchanged(program)))

    def read_bytes(self, context: int) -> int:
        """Of the cache, by one rank for one query."""
        config, total = self.outline.config, 0
        for name, pool in self.outline.pools.by_part.items():
            token = pool.page_bytes(config.head_groups) // config.block_size
            total += token * self._tokens_read(name, context)
        return total // config.decode_context_parallel_size

    def _tokens_read(self, part: str, context: int) -> int:
        model = self.outline.blueprint.model
        indexer = model.indexer if isinstance(model, GlmConfig) else None
        return min(indexer.top_k, context) if indexer and part == LATENT else context


def prompt_sides(
    checkpoint: Checkpoint, devices: list[jax.Device], options: argparse.Namespace, context: int
) -> Mapping[str, Side]:
    """Programs for this context: what is gathered is as long as the page table."""
    sides = {}
    for residency in ("replicated", "sharded"):
        step = prompt_step(
            checkpoint,
            residency,
            devices[: options.ranks],
            chunk=options.chunk,
            context=context,
            block_size=BLOCK_SIZE,
        )
        sides[residency] = Side.of(step.outline, step.shape, checkpoint)
    return sides


def decode_sides(
    checkpoint: Checkpoint, devices: list[jax.Device], options: argparse.Namespace, context: int
) -> Mapping[str, Side]:
    sides = {}
    for name, dcp in (("tp", 1), ("dcp", options.ranks)):
        settings = {
            "tensor_parallel_size": options.ranks,
            "decode_context_parallel_size": dcp,
            "cp_kv_cache_interleave_size": BLOCK_SIZE,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 1,
            "max_model_len": context,
        }
        config = EngineConfig.from_settings(str(checkpoint.path), settings)
        blueprint = Blueprint(config, checkpoint.config, "cpu", checkpoint.dtype)
        (width,) = blueprint.table_widths
        outline = Outline(blueprint, decode_mesh(devices[: options.ranks], dcp), width)
        sides[name] = Side.of(outline, StepShape(1, 0, 0, width), checkpoint)
    return sides


def measure(sides: Mapping[str, Side], prior: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides behind so many tokens; the second one shares them."""
    for side in sides.values():
        side.step.seconds(prior)  # the first run takes longer
    calls = {name: partial(side.step.seconds, prior) for name, side in sides.items()}
    times = take_turns(options.rounds, **calls)
    without, shared = sides
    return {
        "over": ratio(times, shared, without),
        **{f"{name}_ms": statistics.median(times[name]) * 1e3 for name in sides},
        **{f"{name}_exchanged": side.exchanged_bytes for name, side in sides.items()},
        **{f"{name}_read": side.read_bytes(prior) for name, side in sides.items()},
    }


def rows_of(
    name: str, checkpoint: Checkpoint, devices: list[jax.Device], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    for part in options.parts:
        for context in options.contexts:
            start = {"model": name, "part": part, "context": context}
            if part == "prefill":
                sides = prompt_sides(checkpoint, devices, options, context)
                yield {**start, **measure(sides, context - options.chunk, options)}
            else:
                sides = decode_sides(checkpoint, devices, options, context)
                yield {**start, **measure(sides, context - 1, options)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a prompt step")
    parser.add_argument("--rounds", type=int, default=5)
    contexts = [2048, 4096, 8192, 16384, 32768]
    parser.add_argument("--contexts", type=int, nargs="+", default=contexts)
    options = parser.parse_args()
    devices = find_devices(options.ranks, "cpu")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            checkpoint = write_model(Path(folder) / name, MODELS[name])
            for row in rows_of(name, checkpoint, devices, options):
                print("  ".join(f"{key} {value}" for key, value in row.items()), file=sys.stderr)
                rows.append(row)
    print(json.dumps({"ranks": options.ranks, "chunk": options.chunk, "rows": rows}))


if __name__ == "__main__":
    main()
