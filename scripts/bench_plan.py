"""Time of planning and binding a transfer, per part of the cache and request.

The goal is less than 2 ms for 32K tokens, less than 50 ms for 1M, with 78 layers and 8 × 8 ranks.
Page ids are random, so that nothing merges by luck; what only the two placements decide is cached,
as in a running engine, and its first time is reported apart. Nothing moves: the addresses are
invented. Goals are for the least time of a row, since other programs only add to it. The last line
of stdout is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dcpjax.layout import KVPlacement
from dcpjax.transfer import (
    BoundTransfer,
    RankMemory,
    SequenceMemory,
    StagingMemory,
    TransferPlan,
    bind,
    num_staging_pages,
    plan_transfer,
)

CACHE = {"layers": 78, "kv_heads": 1, "page_size": 64}
TOKEN_BYTES = 576
LAYER_SPLIT = KVPlacement.layer_split(8, **CACHE)
PAGES = KVPlacement.decode(8, 8, interleave=64, **CACHE)
QUARTERS = KVPlacement.decode(8, 8, interleave=16, **CACHE)
ROUND_ROBIN = KVPlacement.decode(8, 8, interleave=1, **CACHE)
WHOLE = KVPlacement.tensor_parallel(1, **CACHE)


@dataclass(frozen=True)
class Case:
    name: str
    source: KVPlacement
    target: KVPlacement
    has_goal: bool


CASES = [
    Case("layer split 8 -> DCP 8", LAYER_SPLIT, PAGES, has_goal=True),
    Case("DCP 8 -> DCP 8, interleave 64 -> 16", PAGES, QUARTERS, has_goal=True),
    Case("DCP 8, interleave 1 -> one rank, staged", ROUND_ROBIN, WHOLE, has_goal=False),
]
GOALS_MS = {32 * 1024: 2.0, 1024 * 1024: 50.0}


def regions(placement: KVPlacement, num_pages: int, page_size: int) -> tuple[RankMemory, ...]:
    return tuple(
        RankMemory.dense(
            1 << 40,
            num_pages=num_pages,
            num_layers=share.num_layers,
            num_heads=share.num_heads,
            page_size=page_size,
            token_bytes=TOKEN_BYTES,
        )
        for share in placement.shares
    )


def sequence(placement: KVPlacement, num_tokens: int, rng: np.random.Generator) -> SequenceMemory:
    """A sequence on random pages of a pool twice its size."""
    num_ids = -(-num_tokens // (placement.shares[0].ranks * placement.page_size))
    page_ids = rng.permutation(2 * num_ids)[:num_ids]
    return SequenceMemory(placement, regions(placement, 2 * num_ids, placement.page_size), page_ids)


def make_call(case: Case, num_tokens: int) -> Callable[[], tuple[TransferPlan, BoundTransfer]]:
    """A call that plans and binds once; staging is offered, :func:`bind` chooses."""
    rng = np.random.default_rng(0)
    source = sequence(case.source, num_tokens, rng)
    target = sequence(case.target, num_tokens, rng)
    plan = plan_transfer(case.source, case.target, num_tokens=num_tokens)
    num_pages = num_staging_pages(plan)
    staging = StagingMemory(
        regions(case.target, num_pages, case.source.page_size), range(num_pages)
    )

    def call() -> tuple[TransferPlan, BoundTransfer]:
        plan = plan_transfer(case.source, case.target, num_tokens=num_tokens)
        return plan, bind(plan, source, target, staging=staging)

    return call


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def measure(case: Case, num_tokens: int, repeats: int) -> dict[str, object]:
    call = make_call(case, num_tokens)
    times = [milliseconds(call) for _ in range(repeats)]
    plan, bound = call()
    goal = GOALS_MS.get(num_tokens) if case.has_goal else None
    return {
        "case": case.name,
        "tokens": num_tokens,
        "median_ms": round(statistics.median(times), 3),
        "least_ms": round(min(times), 3),
        "goal_ms": goal,
        "is_reached": None if goal is None else min(times) < goal,
        "paths": len(plan.paths),
        "strided_runs": plan.num_runs,
        "blocks": bound.num_blocks,
        "bytes_over_least": bound.num_bytes / plan.bytes_by_path(TOKEN_BYTES).sum(),
        "is_staged": bool(bound.landings),
    }


def first_time(case: Case) -> float:
    """The plan of a pair of placements that has not been seen, in milliseconds."""
    return milliseconds(lambda: plan_transfer(case.source, case.target, num_tokens=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[*GOALS_MS, 32 * 1024 + 7])
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    first = {case.name: round(first_time(case), 3) for case in CASES}
    rows = [
        measure(case, num_tokens, options.repeats)
        for case in CASES
        for num_tokens in options.tokens
    ]
    for row in rows:
        goal = f"goal < {row['goal_ms']:g}" if row["goal_ms"] else "no goal"
        print(
            f"{row['case']:<42}{row['tokens']:>9} tokens {row['least_ms']:>8} ms ({goal})"
            f" {row['paths']:>3} paths {row['blocks']:>8} blocks"
        )
    print(json.dumps({"first_plan_ms": first, "rows": rows}))


if __name__ == "__main__":
    main()
