"""Prompts on several ranks (PCP): work per rank, bytes, overlap, and time against one device.

    python -m scripts.bench_prefill [--parts work bytes overlap time]

Work, bytes and overlap are read from the compiled program of the engine's step: products are
counted in it, loop by loop. How often a loop over prior tokens runs depends on the length of a
prompt, which no compiler knows; those runs are counted by the functions of the layout. The floor of
a rank's work is 1 / N of what one device does, and of the busiest rank's attention the mean.
Time: N virtual devices share the cores of this machine, so at best all of them together take as
long as one device with the same work, ratio 1; what is above are exchanges, copies and waiting.
All sides take turns in one process; ratios are medians over rounds of the ratio within a round.
The last line of stdout is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from dcpjax.mesh import find_devices
from dcpjax.models.checkpoint import Checkpoint
from scripts.bench_workers import ratio, take_turns
from scripts.prefill.findings import Findings, imbalance, label, predicted_bytes
from scripts.prefill.models import MODELS, write_model
from scripts.prefill.steps import PLAIN, RESIDENCIES, RunningStep, prompt_step

MOST_RANKS = 8
PARTS = ("work", "bytes", "overlap", "time")


def cases(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Residencies and numbers of ranks, the plain engine first."""
    yield PLAIN, 1
    for residency in options.residencies:
        for ranks in options.ranks:
            if ranks > 1:
                yield residency, ranks


def work_of(found: Findings, plain: Findings, context: int) -> dict[str, Any]:
    """Of the last chunk of a prompt, and of all its chunks."""
    chunk, ranks = found.step.chunk, found.step.ranks
    last, every = [context - chunk], list(range(0, context, chunk))
    result: dict[str, Any] = {
        "rank_gflops": max(found.rank_flops(last)) / 1e9,
        "work_over_plain": sum(found.rank_flops(last)) / sum(plain.rank_flops(last)),
        "balance": imbalance(found.rank_flops(last)),
    }
    for kind in found.program.score_widths:
        own, shared = found.loop_flops(kind, last), sum(plain.loop_flops(kind, last))
        if not shared:
            raise SystemExit(f"--context {context} is one read of the cache: no loop to analyse")
        result |= {
            f"{kind}_over_share": max(own) * ranks / shared,
            f"{kind}_balance": imbalance(own),
            f"{kind}_balance_prompt": imbalance(found.loop_flops(kind, every)),
            f"{kind}_balance_pairs": imbalance(found.pairs(kind, context - chunk)),
        }
    return result


def bytes_of(found: Findings, values: dict[str, Any]) -> dict[str, Any]:
    predicted = predicted_bytes(found.step, values) if found.step.ranks > 1 else 0
    return {
        "exchanged_bytes": found.exchanged_bytes,
        "predicted_bytes": predicted,
        "is_as_predicted": found.exchanged_bytes == predicted,
        "bytes_per_layer": found.layer_bytes() if found.step.ranks > 1 else {},
    }


def overlap_of(found: Findings, context: int) -> dict[str, Any]:
    layers = found.overlaps(context - found.step.chunk)
    if not layers:
        return {}
    return {
        "awaited_flops": sum(one.awaited for one in layers),
        "beside": min(one.beside for one in layers),
        "scheduled_behind": statistics.mean(one.behind for one in layers),
    }


def static_rows(
    name: str, checkpoint: Checkpoint, devices: list[jax.Device], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """What compiled programs tell."""
    plain = None
    for residency, ranks in cases(options):
        step = prompt_step(
            checkpoint, residency, devices[:ranks], chunk=options.chunk, context=options.context
        )
        found = Findings.of(step, step.compile())
        plain = plain or found
        row: dict[str, Any] = {"model": name, "case": label(found.step)}
        if "work" in options.parts:
            row |= work_of(found, plain, options.context)
        if "bytes" in options.parts:
            row |= bytes_of(found, dict(MODELS[name]))
        if "overlap" in options.parts:
            row |= overlap_of(found, options.context)
        yield row


def time_rows(
    name: str, checkpoint: Checkpoint, devices: list[jax.Device], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Seconds of a chunk behind so many tokens, all sides in turn."""
    chunk, longest = options.chunk, max(options.priors) + options.chunk
    sides: dict[str, RunningStep] = {}
    for residency, ranks in cases(options):
        step = prompt_step(checkpoint, residency, devices[:ranks], chunk=chunk, context=longest)
        sides[label(step)] = RunningStep(step.outline, step.shape, checkpoint)
    for prior in options.priors:
        for side in sides.values():
            side.seconds(prior)  # the first run takes longer
        calls = {case: partial(side.seconds, prior) for case, side in sides.items()}
        times = take_turns(options.rounds, **calls)
        for case in sides:
            yield {
                "model": name,
                "case": case,
                "prior": prior,
                "ms": statistics.median(times[case]) * 1e3,
                "over_plain": ratio(times, case, PLAIN),
            }


def show(row: dict[str, Any]) -> None:
    """A row for people."""
    values = {key: value for key, value in row.items() if not isinstance(value, (str, dict))}
    numbers = "  ".join(f"{key} {value:.4g}" for key, value in values.items())
    print(f"{row['model']:>6} {row['case']:>14}  {numbers}", file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--residencies", nargs="+", choices=RESIDENCIES, default=list(RESIDENCIES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, MOST_RANKS])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--context", type=int, default=32768, help="tokens of the prompt analysed")
    parser.add_argument("--priors", type=int, nargs="+", default=[0, 3072, 15360])
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    devices = find_devices(MOST_RANKS, "cpu")
    rows: dict[str, list[dict[str, Any]]] = {"static": [], "time": []}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            checkpoint = write_model(Path(folder) / name, MODELS[name])
            if set(options.parts) - {"time"}:
                for row in static_rows(name, checkpoint, devices, options):
                    show(row)
                    rows["static"].append(row)
            if "time" in options.parts:
                for row in time_rows(name, checkpoint, devices, options):
                    show(row)
                    rows["time"].append(row)
    print(json.dumps({"chunk": options.chunk, "context": options.context, **rows}))


if __name__ == "__main__":
    main()
