"""One long prompt on eight ranks in each residency, and its hand-over to a decode engine.

    python -m scripts.long_request [--tokens 131072]

The model is a GLM of reduced width with random weights, of eight layers, of which two have an
indexer. All engines run in this process on virtual devices. Every residency computes the same
prompt and goes on itself, or with --hand-over lets one engine with DCP 4 go on; the tokens have to
be the same in all residencies. Memory is read from the arrays and compared with what follows from
shapes and from the planner. Nothing here is fast: eight devices share the cores of this machine,
and a program is compiled for each of several lengths. How long a part takes is printed as it ends.
The last line of stdout is JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dcpjax.config import EngineConfig
from dcpjax.engine.engine import Engine
from dcpjax.engine.request import Request, SamplingParams
from dcpjax.mesh import find_devices
from dcpjax.models.checkpoint import Checkpoint
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.memory import page_bytes
from dcpjax.planner.models import find_model
from scripts.prefill.models import GLM, write_model
from scripts.prefill.steps import PLAIN, RESIDENCIES, pcp_settings

SMALL: Mapping[str, Any] = {
    **GLM,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 64,
    "indexer_types": ["full", *["shared"] * 3, "full", *["shared"] * 3],
}
DECODE_RANKS = 4
NEW_TOKENS = 8
BLOCK_SIZE = 64


def settings_of(options: argparse.Namespace, role: str, **more: Any) -> dict[str, Any]:
    """Of an engine for one sequence."""
    transfer = {"kv_role": role, "kv_connector": options.connector}
    settings = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 1,
        "max_num_batched_tokens": options.chunk,
        "max_model_len": options.tokens,
        "enable_prefix_caching": False,
        "cp_kv_cache_interleave_size": BLOCK_SIZE,
        "kv_transfer_config": transfer if options.hand_over else None,
        **more,
    }
    page = BLOCK_SIZE * settings.get("decode_context_parallel_size", 1)
    # One more than the prompt's: a copy of a layer may then not be taken for one of a pool that has
    # a single layer.
    return {**settings, "num_pages": -(-options.tokens // page) + 1}


def side_settings(options: argparse.Namespace, residency: str) -> dict[str, Any]:
    return settings_of(
        options,
        "kv_producer",
        **pcp_settings(residency, 1 if residency == PLAIN else options.ranks),
    )


def decode_settings(options: argparse.Namespace) -> dict[str, Any]:
    return settings_of(
        options,
        "kv_consumer",
        tensor_parallel_size=DECODE_RANKS,
        decode_context_parallel_size=DECODE_RANKS,
    )


@contextmanager
def opened(checkpoint: Checkpoint, settings: dict[str, Any]) -> Iterator[Engine]:
    engine = Engine(EngineConfig.from_settings(str(checkpoint.path), settings), checkpoint)
    try:
        yield engine
    finally:
        engine.close()


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def request_of(name: str, prompt: tuple[int, ...], max_tokens: int, **transfer: Any) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    request = Request(name, prompt, params)
    request.kv_transfer_params = transfer or None
    return request


def compute(engine: Engine, prompt: tuple[int, ...]) -> Mapping[str, Any]:
    """Compute a prompt for another engine; what that one needs to fetch it."""
    transfer = {"do_remote_decode": True, "do_remote_prefill": False}
    engine.add(request_of("prompt", prompt, 1, **transfer))
    offer = None
    while offer is None:
        for output in engine.step():
            assert output.error is None, output.error
            offer = output.kv_transfer_params or offer
    return offer


def go_on(engine: Engine, prompt: tuple[int, ...]) -> list[int]:
    """The tokens behind a prompt, by the engine that has computed it."""
    engine.add(request_of("prompt", prompt, NEW_TOKENS))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
    return tokens


def fetch(
    decode: Engine, prefill: Engine, name: str, prompt: tuple[int, ...], offer: Mapping[str, Any]
) -> list[int]:
    """The tokens behind a prompt that the other engine has computed."""
    decode.add(request_of(name, prompt, NEW_TOKENS, **offer))
    tokens: list[int] = []
    while len(tokens) < NEW_TOKENS:
        prefill.step()  # holds the pages until they are fetched
        for output in decode.step():
            assert output.error is None, output.error
            tokens += output.token_ids
        if decode.is_blocked:
            time.sleep(0.001)
    return tokens


def memory_of(engine: Engine) -> dict[str, Any]:
    """Bytes of a rank: measured from the arrays, from shapes, and from the planner's formulas."""
    config, pools = engine.config, engine.pool_shapes
    deployment = Deployment(
        pcp=config.prefill_context_parallel_size,
        dcp=config.decode_context_parallel_size,
        prefill_kv=config.residency or "replicated",
        page_size=config.block_size,
        cache_dtype="float32",
    )
    planned = page_bytes(find_model(config.model), deployment) * (pools.num_pages + 1)
    return {
        "pool_bytes": engine.runner.pool_bytes,
        "pool_bytes_by_shapes": pools.rank_bytes(config.head_groups),
        "pool_bytes_by_planner": planned,
        "temporary_bytes": max(audit.temporary_bytes for audit in engine.runner.audits),
    }


def run_residency(
    residency: str,
    checkpoint: Checkpoint,
    prompt: tuple[int, ...],
    decode: Engine | None,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One residency from start to tokens."""
    settings, begin = side_settings(options, residency), time.perf_counter()
    with opened(checkpoint, settings) as engine:
        row: dict[str, Any] = {"residency": residency, "start_s": time.perf_counter() - begin}
        if decode is None:
            tokens, row["prefill_and_decode_s"] = timed(lambda: go_on(engine, prompt))
        else:
            offer, row["prefill_s"] = timed(lambda: compute(engine, prompt))
            tokens, row["hand_over_and_decode_s"] = timed(
                lambda: fetch(decode, engine, residency, prompt, offer)
            )
        return {**row, "tokens": tokens, **memory_of(engine)}


def run(checkpoint: Checkpoint, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All residencies, one after the other."""
    ids = np.random.default_rng(0).integers(
        checkpoint.config.vocab_size, size=options.tokens - NEW_TOKENS
    )
    prompt = tuple(ids.tolist())
    with ExitStack() as stack:
        decode = None
        if options.hand_over:
            decode = stack.enter_context(opened(checkpoint, decode_settings(options)))
        for residency in options.residencies:
            yield run_residency(residency, checkpoint, prompt, decode, options)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--hand-over", action="store_true", help="to an engine with DCP 4")
    parser.add_argument("--connector", default="InProcessConnector")
    sides = [*RESIDENCIES, PLAIN]
    parser.add_argument("--residencies", nargs="+", choices=sides, default=list(RESIDENCIES))
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    find_devices(max(options.ranks, DECODE_RANKS), "cpu")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in run(write_model(Path(folder), SMALL), options):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    are_equal = all(row["tokens"] == rows[0]["tokens"] for row in rows)
    print(json.dumps({"tokens": options.tokens, "are_equal": are_equal, "rows": rows}))
    if not are_equal:
        sys.exit("the residencies do not find the same tokens")


if __name__ == "__main__":
    main()
