"""A million tokens of GLM-5.2 on PCP ranks, as far as it goes without weights and devices.

    python -m scripts.long_outline [--compile]

For each residency, every program of the engine is lowered for a mesh of 8 × 8 ranks, and the
transfer of a whole prompt to a decode engine is planned and bound. With ``--compile`` the largest
prompt step is compiled for that many virtual CPU devices, to plain machine code, and what a rank's
memory holds is read from the compiler (minutes each). XLA:CPU computes in float32: what it says of
temporary memory includes weights that it has widened, so the copies of layers are reported by
themselves.
The last line of stdout is JSON.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dcpjax.config import EngineConfig
from dcpjax.engine.blueprint import Blueprint
from dcpjax.engine.kv_parts import rank_memory
from dcpjax.mesh import find_devices, pcp_mesh
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from dcpjax.transfer import SequenceMemory, bind, plan_transfer
from scripts.plain_code import plain_code
from scripts.prefill.outline import Outline, abstract_mesh
from scripts.prefill.steps import RESIDENCIES, pcp_settings

MODEL = Path(__file__).resolve().parents[1] / "tests" / "assets" / "glm-5.2" / "config.json"
GIB = 2**30


def settings_of(options: argparse.Namespace, **ranks: Any) -> dict[str, Any]:
    """Of an engine for one sequence of so many tokens, its cache as the model is served with."""
    return {
        "dtype": "bfloat16",
        "kv_cache_dtype": options.cache,
        "block_size": 64,
        "cp_kv_cache_interleave_size": 64,
        "max_num_seqs": 1,
        "max_num_batched_tokens": options.chunk,
        "max_model_len": options.tokens,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
        "tensor_parallel_size": options.tp,
        **ranks,
    }


def outline_of(
    checkpoint: Checkpoint, settings: dict[str, Any], devices: list[jax.Device]
) -> Outline:
    """An engine on these devices or, with none, on as many as it needs."""
    config = EngineConfig.from_settings(str(checkpoint.path), settings)
    blueprint = Blueprint(config, checkpoint.config, "cpu", checkpoint.dtype)
    pcp = config.prefill_context_parallel_size
    mesh = pcp_mesh(devices, pcp, config.weight_dcp) if devices else abstract_mesh(config)
    return Outline(blueprint, mesh, max(blueprint.table_widths))


def lower_all(outline: Outline) -> dict[str, Any]:
    """Every step, and the drafts behind it."""
    start = time.perf_counter()
    for shape in outline.shapes:
        outline.lower(shape)
        outline.lower_drafts(shape)
    return {
        "programs": 2 * len(outline.shapes),
        "lower_s": time.perf_counter() - start,
    }


def shaped_memory(outline: Outline, tokens: int) -> dict[str, Any]:
    """Bytes of a rank that follow from shapes; copies are of the layer at work and the next one."""
    config, pools = outline.config, outline.pools
    groups = config.head_groups
    parts = [part for part in outline.blueprint.parts if not part.name.startswith("draft")]
    row = sum(
        pools.by_part[part.name].page_bytes(groups)
        // pools.by_part[part.name].num_layers
        // config.block_size
        for part in parts
    )
    is_copied = config.residency in ("sharded", "layer_split")
    return {
        "weight_gib": outline.weight_bytes / GIB,
        "pool_gib": pools.rank_bytes(groups) / GIB,
        "pool_gib_by_part": {
            name: pool.rank_bytes(groups) / GIB for name, pool in pools.by_part.items()
        },
        "copies_gib": 2 * tokens * row / GIB if is_copied else 0.0,
    }


def compiled_memory(outline: Outline) -> dict[str, Any]:
    """What the compiler says of the largest step."""
    start = time.perf_counter()
    compiled = outline.lower(outline.shapes[-1]).compile()
    found = compiled.memory_analysis()
    return {
        "compile_s": time.perf_counter() - start,
        "argument_gib": found.argument_size_in_bytes / GIB,
        "aliased_gib": found.alias_size_in_bytes / GIB,
        "temporary_gib": found.temp_size_in_bytes / GIB,
    }


def sequence_of(outline: Outline, part: str, rng: np.random.Generator) -> SequenceMemory:
    """A prompt that fills the pools, on pages in any order at addresses that are made up."""
    placement, pool = outline.blueprint.placements[part], outline.pools.by_part[part]
    array = outline.pool_arrays[part]
    share = jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)
    region = rank_memory(pool, share, 1 << 40)
    page_ids = rng.permutation(outline.num_pages)
    return SequenceMemory(placement, (region,) * placement.num_ranks, page_ids)


def transfer_of(source: Outline, target: Outline, tokens: int, repeats: int) -> dict[str, Any]:
    """All parts of a prompt from one engine to the other, planned and bound."""
    found: dict[str, Any] = {"ms": 0.0, "bytes": 0, "least_bytes": 0, "blocks": 0}
    rng = np.random.default_rng(0)
    for part in source.blueprint.placements:
        pair = [sequence_of(side, part, rng) for side in (source, target)]
        token_bytes = pair[0].ranks[0].token_bytes
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            plan = plan_transfer(pair[0].placement, pair[1].placement, num_tokens=tokens)
            bound = bind(plan, *pair)
            times.append((time.perf_counter() - start) * 1e3)
        found["ms"] += min(times)
        found["bytes"] += bound.num_bytes
        found["least_bytes"] += least_bytes(target, part, tokens, token_bytes)
        found["blocks"] += bound.num_blocks
    return found


def least_bytes(target: Outline, part: str, tokens: int, token_bytes: int) -> int:
    """Every token once on each rank of the target that keeps it."""
    layers = next(one for one in target.blueprint.parts if one.name == part).layers
    config = target.config
    copies = config.num_ranks // config.decode_context_parallel_size
    if part.startswith("draft"):
        copies = config.num_ranks
    return copies * len(layers) * tokens * token_bytes


def examine(residency: str, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one residency."""
    checkpoint = open_checkpoint(options.model, weights=False)
    settings = settings_of(options, **pcp_settings(residency, options.pcp))
    outline = outline_of(checkpoint, settings, [])
    row: dict[str, Any] = {"residency": residency, **shaped_memory(outline, options.tokens)}
    if options.lower:
        row |= lower_all(outline)
    transfer = {"kv_transfer_config": {"kv_role": "kv_consumer"}}
    decode = settings_of(options, decode_context_parallel_size=options.dcp, **transfer)
    target = outline_of(checkpoint, decode, [])
    row["transfer"] = transfer_of(outline, target, options.tokens, options.repeats)
    if options.compile:
        devices = find_devices(options.tp * options.pcp, "cpu")
        row |= compiled_memory(outline_of(checkpoint, settings, devices))
    return row


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--cache", default="fp8_ds_mla")
    parser.add_argument("--pcp", type=int, default=8)
    parser.add_argument("--tp", type=int, default=8, help="of both engines")
    parser.add_argument("--dcp", type=int, default=8, help="of the decode engine")
    parser.add_argument("--repeats", type=int, default=3, help="of planning; the least counts")
    parser.add_argument("--residencies", nargs="+", choices=RESIDENCIES, default=list(RESIDENCIES))
    parser.add_argument("--lower", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.compile:  # before JAX makes devices for anything else
        os.environ["XLA_FLAGS"] = " ".join([*plain_code(), os.environ.get("XLA_FLAGS", "")])
        find_devices(options.tp * options.pcp, "cpu")
    rows = []
    for residency in options.residencies:
        rows.append(examine(residency, options))
        print(json.dumps(rows[-1], indent=1), file=sys.stderr, flush=True)
    print(
        json.dumps({"tokens": options.tokens, "pcp": options.pcp, "tp": options.tp, "rows": rows})
    )


if __name__ == "__main__":
    main()
