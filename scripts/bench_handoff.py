"""Decode steps of a decode engine while KV of other prompts lands in its pool over NIXL.

Another process holds prompts' KV in the shape of a tensor parallel engine; a thread here reads
them, one after the other, into pages of the engine that no request has. Steps with and without take
turns, phase by phase; the ratio is the median over the rounds.

The floor is a step that is slowed only by the share of the memory bandwidth that landing takes: 1 +
2 * (bytes landed per second) / (bytes per second of one copy alone), since each byte is read and
written. The goal is 1.2 plus that share. The last line of stdout is JSON.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from bench_transfer import Memory, source_process_of

from dcpjax.cache.parts import KV
from dcpjax.config import EngineConfig
from dcpjax.engine.engine import Engine
from dcpjax.engine.request import Request, SamplingParams
from dcpjax.layout import KVPlacement
from dcpjax.models.checkpoint import open_checkpoint
from dcpjax.transfer import BoundTransfer, RankMemory, SequenceMemory, bind, plan_transfer
from dcpjax.transfer.backend import TransferState, wait
from dcpjax.transfer.nixl import NixlBackend

PAGE, DCP, ROWS, CONTEXT = 16, 3, 4, 256
LANDING_TOKENS = 4608  # of each prompt that lands
STEPS = 24  # of a phase
GOAL = 1.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    engine = open_engine()
    fill(engine, options.rounds)
    with source_of(engine) as (backend, bound):
        results = take_turns(engine, backend, bound, options.rounds)
    engine.close()
    print(json.dumps(results))


def open_engine() -> Engine:
    pages = LANDING_TOKENS // (PAGE * DCP) + ROWS * 64
    config = EngineConfig.from_settings(
        "smollm2-135m",
        {
            "tensor_parallel_size": DCP,
            "decode_context_parallel_size": DCP,
            "cp_kv_cache_interleave_size": PAGE,
            "block_size": PAGE,
            "max_num_seqs": ROWS,
            "num_pages": pages,
        },
    )
    return Engine(config, open_checkpoint(config.model))


def fill(engine: Engine, rounds: int) -> None:
    """Decode rows that last for the whole run."""
    params = SamplingParams(temperature=0.0, max_tokens=2 * (rounds + 1) * STEPS, ignore_eos=True)
    for row in range(ROWS):
        prompt = np.random.default_rng(row).integers(10, 1000, CONTEXT)
        engine.add(Request(str(row), tuple(prompt.tolist()), params))
    for _ in range(ROWS + STEPS):
        engine.step()


@contextmanager
def source_of(engine: Engine) -> Iterator[tuple[NixlBackend, BoundTransfer]]:
    """The other process, and a prompt of it bound to the last pages of the engine's pool."""
    model = engine.model_config
    placement = KVPlacement.tensor_parallel(
        model.num_kv_heads,
        layers=model.num_layers,
        kv_heads=model.num_kv_heads,
        page_size=PAGE,
    )
    token_bytes = engine.runner.memory[KV][0].token_bytes
    num_pages = LANDING_TOKENS // PAGE
    rank_bytes = num_pages * model.num_layers * PAGE * token_bytes
    with source_process_of(placement.num_ranks * rank_bytes) as (agent, address):
        ranks = tuple(
            RankMemory.dense(
                address + rank * rank_bytes,
                num_pages=num_pages,
                num_layers=model.num_layers,
                num_heads=1,
                page_size=PAGE,
                token_bytes=token_bytes,
            )
            for rank in range(placement.num_ranks)
        )
        backend = NixlBackend()
        backend.register(engine.runner.memory[KV])
        backend.connect("source", agent)
        landing = LANDING_TOKENS // (PAGE * DCP)
        last = engine.pool_shapes.num_pages
        bound = bind(
            plan_transfer(placement, engine.placements[KV], num_tokens=LANDING_TOKENS),
            SequenceMemory(placement, ranks, np.arange(num_pages)),
            SequenceMemory(
                engine.placements[KV], engine.runner.memory[KV], np.arange(last - landing, last)
            ),
        )
        yield backend, bound
        backend.close()


def take_turns(
    engine: Engine, backend: NixlBackend, bound: BoundTransfer, rounds: int
) -> dict[str, object]:
    ratios, rates, quiet_ms, busy_ms = [], [], [], []
    for _ in range(rounds):
        quiet = step_ms(engine)
        with landing(backend, bound) as landed:
            started = time.perf_counter()
            busy = step_ms(engine)
            seconds = time.perf_counter() - started
        ratios.append(busy / quiet)
        rates.append(landed[0] * bound.num_bytes / seconds)
        quiet_ms.append(quiet)
        busy_ms.append(busy)
    share = 2 * statistics.median(rates) / copy_rate(bound.num_bytes)
    return {
        "step_ms": statistics.median(quiet_ms),
        "step_ms_while_landing": statistics.median(busy_ms),
        "ratio": statistics.median(ratios),
        "landed_gb_per_s": statistics.median(rates) / 1e9,
        "bandwidth_share": share,
        "goal": GOAL + share,
        "holds": statistics.median(ratios) <= GOAL + share,
    }


def step_ms(engine: Engine) -> float:
    """Median of a phase."""
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        engine.step()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


@contextmanager
def landing(backend: NixlBackend, bound: BoundTransfer) -> Iterator[list[int]]:
    """Transfers one after the other, in a thread, and how many have landed."""
    stop, landed = threading.Event(), [0]

    def run() -> None:
        while not stop.is_set():
            handle = backend.submit(bound, "source")
            assert wait(handle, 60.0) is TransferState.DONE
            handle.release()
            landed[0] += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield landed
    finally:
        stop.set()
        thread.join()


def copy_rate(num_bytes: int) -> float:
    """Bytes per second, read and written counted together, of one copy in main memory."""
    source, target = Memory(np.zeros(num_bytes, np.uint8)), np.ones(num_bytes, np.uint8)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source.data)
        times.append(time.perf_counter() - started)
    return 2 * num_bytes / min(times)


if __name__ == "__main__":
    main()
