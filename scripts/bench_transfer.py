"""KV transfers over NIXL between two processes, against one contiguous read of the same bytes.

The cache is GLM-5.2's: 78 layers × 576 B per token, one latent head, pages of 64 tokens; 32K
tokens are 1.47 GB. Each side has that much memory, and the reading side as much again for the naive
baseline: 4.4 GB together. `--tokens` scales all of it down; pieces keep their size, there are
fewer.

The floor is the contiguous read: it moves every byte once, in one piece. All variants take turns,
round by round; a share is the median over the rounds of (time of the floor / time of the variant).
A variant's time is everything after binding: addresses, submission, the copy, release.
The last line of stdout is JSON.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

from dcpjax.layout import KVPlacement
from dcpjax.transfer import BoundTransfer, RankMemory, SequenceMemory, bind, plan_transfer
from dcpjax.transfer.backend import TransferState, copy, wait
from dcpjax.transfer.bind import BoundPath, StridedBlocks
from dcpjax.transfer.nixl import NixlBackend

LAYERS, TOKEN_BYTES, PAGE = 78, 576, 64
CACHE = {"layers": LAYERS, "kv_heads": 1, "page_size": PAGE}
SPLIT = KVPlacement.layer_split(8, **CACHE)
DCP4 = KVPlacement.decode(4, 4, interleave=PAGE, **CACHE)
DCP2 = KVPlacement.decode(2, 2, interleave=PAGE, **CACHE)
TP = KVPlacement.tensor_parallel(1, **CACHE)
RUN = 32  # pages in a row where pages come in runs
GAP = 64  # bytes between the layers of a page, so that no two pieces of it merge
DEADLINE = 120.0  # seconds for one transfer
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Memory:
    """One flat piece of memory, cut into regions anew for each variant."""

    data: np.ndarray

    @property
    def address(self) -> int:
        return self.data.ctypes.data

    @property
    def region(self) -> RankMemory:
        return RankMemory(self.address, 1, self.data.nbytes, self.data.nbytes, self.data.nbytes, 1)


def cache_bytes(num_tokens: int) -> int:
    """Room for the cache with gaps."""
    return num_tokens * LAYERS * TOKEN_BYTES + num_tokens // PAGE * (LAYERS * GAP)


def allocate(num_bytes: int) -> Memory:
    """Memory that is touched; every eight bytes are their own number."""
    return Memory(np.arange(num_bytes // 8, dtype=np.int64))


def serve(pipe: Connection, num_bytes: int) -> None:
    """The process that is read from."""
    memory = allocate(num_bytes)
    backend = NixlBackend()
    backend.register([memory.region])
    pipe.send((backend.agent, memory.address))
    pipe.recv()
    backend.close()


@contextmanager
def source_process_of(num_bytes: int) -> Iterator[tuple[bytes, int]]:
    """A process with so much memory: its agent bytes and the address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, num_bytes))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
        ours.send("done")
    finally:
        process.join(10)
        process.kill()


def sequence(
    placement: KVPlacement, address: int, num_tokens: int, *, seed: int, runs: bool, gap: int = 0
) -> SequenceMemory:
    """All pages of all ranks, one rank after the other; ids scattered by ``seed``, or in runs."""
    layer = PAGE * TOKEN_BYTES + gap
    num_pages = num_tokens // (PAGE * placement.shares[0].ranks)
    ranks: list[RankMemory] = []
    for share in placement.shares:
        page = share.num_layers * layer
        ranks.append(RankMemory(address, num_pages, page, layer, layer, TOKEN_BYTES))
        address += num_pages * page
    return SequenceMemory(placement, tuple(ranks), page_ids(num_pages, RUN if runs else 1, seed))


def page_ids(num_pages: int, run: int, seed: int) -> np.ndarray:
    """All pages, in runs of ``run`` (and what remains) in random order."""
    starts = np.random.default_rng(seed).permutation(np.arange(0, num_pages, run))
    return np.concatenate([np.arange(start, min(start + run, num_pages)) for start in starts])


def contiguous(source: int, target: int, num_bytes: int) -> BoundTransfer:
    """One piece."""
    place, page = np.zeros(1, np.int64), np.zeros(1, np.int32)
    blocks = StridedBlocks(num_bytes, place, place, page, page)
    ranks = [
        RankMemory(address, 1, num_bytes, num_bytes, num_bytes, 1) for address in (source, target)
    ]
    return BoundTransfer((ranks[0],), (ranks[1],), (BoundPath(0, 0, (blocks,)),))


def bound_variants(source: int, target: int, num_tokens: int) -> dict[str, BoundTransfer]:
    """Every variant that is one bound transfer; all move the same number of bytes."""

    def between(placement: KVPlacement, *, runs: bool, gap: int = 0) -> BoundTransfer:
        plan = plan_transfer(placement, DCP4, num_tokens=num_tokens)
        sides = ((placement, source), (DCP4, target))
        memory = [
            sequence(side, address, num_tokens, seed=seed, runs=runs, gap=gap)
            for seed, (side, address) in enumerate(sides)
        ]
        return bind(plan, *memory)

    variants = {"contiguous": contiguous(source, target, num_tokens * LAYERS * TOKEN_BYTES)}
    names = {"layer split 8": SPLIT, "tp 1": TP, "dcp 2": DCP2, "dcp 4": DCP4}
    for name, placement in names.items():
        for runs in (False, True):
            pages = "in runs" if runs else "scattered"
            variants[f"{name} to dcp 4, {pages}"] = between(placement, runs=runs)
    per_layer = "layer split 8 to dcp 4, per (layer, page)"
    variants[per_layer] = between(SPLIT, runs=False, gap=GAP)
    return variants


def move(backend: NixlBackend, bound: BoundTransfer) -> None:
    handle = backend.submit(bound, "source")
    if wait(handle, DEADLINE) is not TransferState.DONE:
        raise SystemExit(f"a transfer of {bound.num_bytes} bytes did not end well")
    handle.release()


def move_naively(backend: NixlBackend, bound: BoundTransfer, source: int, staging: int) -> None:
    """Everything to every rank in one piece, then each rank takes its share."""
    everything = contiguous(source, staging, bound.num_bytes)
    staged = tuple(
        replace(rank, address=rank.address - source + staging) for rank in bound.source_ranks
    )
    for rank in range(len(bound.target_ranks)):
        move(backend, everything)
        paths = tuple(path for path in bound.paths if path.target_rank == rank)
        copy(replace(bound, source_ranks=staged, paths=paths))


def check_arrived(bound: BoundTransfer, source: int, target: Memory) -> None:
    """The first eight bytes of every piece are the number that the source has there."""
    for path in bound.paths:
        start, to, _ = bound.addresses(path)
        if not np.array_equal(target.data[(to - target.address) // 8], (start - source) // 8):
            raise SystemExit(f"path {path.source_rank} to {path.target_rank}: wrong bytes arrived")


def take_turns(variants: dict[str, Callable[[], None]], rounds: int) -> Times:
    """Seconds of every variant in every round after the first."""
    times: Times = {name: [] for name in variants}
    for index in range(rounds + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if index:
                times[name].append(time.perf_counter() - start)
    return times


def shares(times: Times) -> dict[str, float]:
    """How much of the floor's speed each variant reaches."""
    floor = times["contiguous"]
    return {
        name: round(statistics.median(a / b for a, b in zip(floor, values, strict=True)), 3)
        for name, values in times.items()
    }


def measure(num_tokens: int, rounds: int) -> tuple[dict[str, BoundTransfer], Times]:
    """Every variant over one pair of processes."""
    target, staging = allocate(cache_bytes(num_tokens)), allocate(cache_bytes(num_tokens))
    with source_process_of(cache_bytes(num_tokens)) as (agent, source):
        backend = NixlBackend()
        backend.register([target.region, staging.region])
        backend.connect("source", agent)
        bounds = bound_variants(source, target.address, num_tokens)
        for bound in bounds.values():
            target.data.fill(-1)
            move(backend, bound)
            check_arrived(bound, source, target)
        variants: dict[str, Callable[[], None]] = {
            name: partial(move, backend, bound) for name, bound in bounds.items()
        }
        planned = bounds["layer split 8 to dcp 4, scattered"]
        variants["layer split 8 to dcp 4, naive"] = partial(
            move_naively, backend, planned, source, staging.address
        )
        times = take_turns(variants, rounds)
        backend.close()
    return bounds, times


def planning_ms(source: KVPlacement, target: KVPlacement, num_tokens: int, rounds: int) -> float:
    """Median milliseconds of planning and binding; nothing is touched, any address will do."""
    memory = [
        sequence(side, 1 << 20, num_tokens, seed=seed, runs=False)
        for seed, side in enumerate((source, target))
    ]

    def plan_and_bind() -> None:
        bind(plan_transfer(source, target, num_tokens=num_tokens), *memory)

    times = take_turns({"planning": plan_and_bind}, rounds)["planning"]
    return round(statistics.median(times) * 1e3, 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768, help="a multiple of 256")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.tokens < 4 * PAGE or options.tokens % (4 * PAGE) or options.rounds < 1:
        parser.error(f"--tokens is a multiple of {4 * PAGE}, --rounds at least 1")

    bounds, times = measure(options.tokens, options.rounds)
    least = options.tokens * LAYERS * TOKEN_BYTES
    floor = statistics.median(times["contiguous"])
    print(f"{least / 1e9:.2f} GB; floor: one contiguous read, {least / floor / 1e9:.1f} GB/s")
    reached = shares(times)
    pieces = {
        name: sum(len(bound.addresses(path)[0]) for path in bound.paths)
        for name, bound in bounds.items()
    }
    for name, share in reached.items():
        seconds = statistics.median(times[name])
        count = f"{pieces[name]:6} pieces" if name in pieces else ""
        print(f"{name:44} {seconds * 1e3:8.1f} ms  {share:6.3f} of the floor  {count}")
    planning = {
        "32K tokens, layer split 8 to dcp 4": planning_ms(SPLIT, DCP4, 32768, 20),
        "1M tokens, layer split 8 to dcp 8": planning_ms(
            SPLIT, KVPlacement.decode(8, 8, interleave=PAGE, **CACHE), 2**20, 10
        ),
    }
    for name, milliseconds in planning.items():
        print(f"planning and binding, {name}: {milliseconds} ms")
    report = {
        "tokens": options.tokens,
        "rounds": options.rounds,
        "floor_gb_per_s": round(least / floor / 1e9, 2),
        "moved_over_least": {name: bound.num_bytes / least for name, bound in bounds.items()},
        "share_of_floor": reached,
        "pieces": pieces,
        "planned_over_naive_time": round(
            statistics.median(
                naive / planned
                for naive, planned in zip(
                    times["layer split 8 to dcp 4, naive"],
                    times["layer split 8 to dcp 4, scattered"],
                    strict=True,
                )
            ),
            2,
        ),
        "planning_ms": planning,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
