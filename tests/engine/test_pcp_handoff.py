"""A prompt computed by PCP ranks goes on in an engine that decodes, whatever each rank holds."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from dcpjax.cache.parts import DRAFT_INDEXER, DRAFT_LATENT, DRAFT_PARTS, INDEXER, KV, LATENT
from dcpjax.engine import blueprint, sampler
from dcpjax.engine.kv_local import LocalKV
from dcpjax.engine.kv_moves import Moved
from dcpjax.engine.request import FinishReason
from tests.engine.pair import Node, ask_prefill, begin_prefill, decode_request
from tests.engine.pcp_pairs import (
    CONNECTORS,
    DCP4,
    KEY_BYTES,
    LATENT_BYTES,
    LONGER,
    PAGE,
    PROMPTS,
    SPLIT,
    TOKENS,
    Engines,
    Pair,
)
from tests.engine.test_pipelined_sends import finish, until


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """With one bucket of decode rows and one of sampled rows: there is little to compile."""
    engines = Engines(tmp_path_factory.mktemp("models"))
    arrived = LocalKV._arrived

    def arriving(self: LocalKV, *arguments: Any) -> Moved:
        engines.moved.append(arrived(self, *arguments))
        return engines.moved[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalKV, "_arrived", arriving)
        patch.setattr(blueprint, "decode_buckets", lambda least, most: (most,))
        patch.setattr(sampler, "_SEGMENT_BUCKETS", ())
        yield engines
        engines.close()


@pytest.fixture
def reshard(engines) -> Pair:
    """Eight ranks of layers to four of pages."""
    return engines.pair("deep", SPLIT, DCP4, CONNECTORS[0])


PAIRS = [
    ("deep", SPLIT, DCP4),
    ("glm", "sharded 4", "dcp 2"),
    ("gqa", "tp 2, split 2", "dcp 3"),
    ("gqa", "sharded 4", "alone"),
    ("gqa", "replicated 2", "dcp 3"),
]
MORE_PAIRS = [
    ("deep", SPLIT, "alone"),
    ("glm", "sharded 4", "alone"),
    ("gqa", "sharded 4", "dcp 3"),
    ("deep", SPLIT, "token by token"),
    ("deep", "tp 2, split 2", "dcp 2"),
    ("glm", "sharded 3, whole index", "dcp 3"),
    ("glm", "token by token", "dcp 2"),
    ("glm", "token by token", "token by token"),
    ("glm", "tp 2, sharded 2", DCP4),
    ("glm", "tp 2, sharded 4", "dcp 2"),
    ("glm", "replicated 2", "dcp 2"),
    ("glm", "tp 2, replicated 3", DCP4),
    ("gqa", "tp 2, split 2", "token by token"),
    ("gqa", "tp 2, sharded 2", "dcp 3"),
    ("gqa", "token by token", "dcp 2"),
    ("gqa", "tp 2, replicated 3", "alone"),
]
CASES = [
    *((*pair, CONNECTORS[0]) for pair in PAIRS),
    *((*PAIRS[0], connector) for connector in CONNECTORS[1:]),
    *(
        pytest.param(*pair, connector, marks=pytest.mark.matrix)
        for pairs, connectors in ((PAIRS[1:], CONNECTORS[1:]), (MORE_PAIRS, CONNECTORS[:1]))
        for connector in connectors
        for pair in pairs
    ),
]


@pytest.mark.parametrize("rank", [0, 7])
def test_the_tokens_depend_on_the_layers_of_every_rank(rank, reshard):
    """What a rank has computed is lost before it is sent, and is missed."""
    pair = reshard
    offer = ask_prefill(pair.source, PROMPTS[65])
    region = pair.source.engine.runner.memory[LATENT][rank]
    for page in offer["remote_block_ids"]:
        start = region.address + page * region.page_stride
        ctypes.memset(start, 255, region.page_stride)  # not a number
    assert pair.go_on(PROMPTS[65], offer) != pair.expected[65]
    for side in (pair.source, pair.target):  # these pages hold no prefix
        side.engine.reset_prefix_cache()
    pair.drain()


@pytest.mark.parametrize(("model", "source", "target", "connector"), CASES)
def test_a_prompt_goes_on_as_on_one_device(model, source, target, connector, engines, monkeypatch):
    """Whatever a rank of the source holds of the cache, and a rank of the target wants of it."""
    pair = engines.pair(model, source, target, connector)
    check_tokens(pair)
    check_bytes(pair, are_whole_pages="token by token" in (source, target))
    check_rows(pair, monkeypatch)
    check_many_at_once(pair)
    check_chunks(pair)
    if (source, target) == (SPLIT, DCP4):
        check_paths_of_layers_and_pages(pair)


def check_tokens(pair: Pair) -> None:
    for length in PROMPTS:
        served = pair.hand_over(length)
        assert served.tokens == pair.expected[length], f"{length} tokens"
        assert served.finish_reason is FinishReason.LENGTH
        assert bool(pair.moved) == (length > 1)
    pair.drain()


def check_bytes(pair: Pair, *, are_whole_pages: bool) -> None:
    """Only what is wanted: of a prompt, and of one whose beginning both have already.

    Args:
        are_whole_pages: more may move, to be put in order where it lands.
    """
    page = pair.target.engine.config.virtual_page_size
    for length, is_known in ((2, False), (17, False), (65, False), (LONGER, True)):
        served = pair.hand_over(length, is_known=is_known)
        assert served.tokens == pair.expected[length]
        cached = 65 // page * page if is_known else 0
        assert served.num_cached_tokens == cached
        least = least_bytes(pair.target, range(cached, length - 1))
        last = pair.last_transfer
        assert last["parts"] == least and np.sum(last["bytes"]) == sum(least.values())
        assert last["num_bytes"] == sum(moved.bound.num_bytes for moved in pair.moved)
        more = last["num_bytes"] - sum(least.values())
        assert more >= 0 if are_whole_pages else more == 0


def least_bytes(target: Node, span: range) -> dict[str, int]:
    """Of each part, each token of ``span``, layer and head once for each rank that keeps it."""
    memory = target.engine.runner.memory
    return {
        part: sum(
            (share.num_tokens(span.stop) - share.num_tokens(span.start))
            * share.num_layers
            * share.num_heads
            for share in placement.shares
        )
        * memory[part][0].token_bytes
        for part, placement in target.engine.placements.items()
    }


def rows_of(node: Node, part: str, page_ids: Sequence[int], num_tokens: int) -> np.ndarray:
    """[ranks, layers, heads, tokens, width]: what each rank holds, NaN for the rest."""
    engine = node.engine
    placement, pool = engine.placements[part], engine.runner.pools[part]
    arrays = {shard.device: np.asarray(shard.data) for shard in pool.addressable_shards}
    size = (placement.num_ranks, placement.layers, placement.kv_heads, num_tokens, pool.shape[-1])
    rows, tokens = np.full(size, np.nan, pool.dtype), np.arange(num_tokens)
    devices = engine.runner.mesh.devices.flat
    for found, device, share in zip(rows, devices, placement.shares, strict=True):
        layers = slice(share.layer_start, share.layer_stop)
        heads = slice(share.head_start, share.head_stop)
        held = tokens[np.asarray(share.holds(share.layer_start, share.head_start, tokens))]
        page, offset = np.divmod(np.arange(held.size), placement.page_size)
        stored = arrays[device][np.asarray(page_ids)[page], : share.num_layers, :, offset]
        if not share.is_empty:
            found[layers, heads, held] = np.moveaxis(stored, 0, 2)
    return rows


def check_rows(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank gets its own, from whichever copy; those of the draft layer, too."""
    prompt, num_tokens = PROMPTS[65], 64
    offer = ask_prefill(pair.source, prompt)
    config = pair.source.engine.config
    sizes = {
        "tp_size": config.tensor_parallel_size,
        "pcp_size": config.prefill_context_parallel_size,
        "dcp_size": config.decode_context_parallel_size,
    }
    assert {name: offer[name] for name in sizes} == sizes
    parts, runner = pair.target.engine.placements, pair.target.engine.runner
    before = {p: rows_of(pair.source, p, offer["remote_block_ids"], num_tokens) for p in parts}
    after: dict[str, np.ndarray] = {}

    def landing(page_ids: Sequence[int]) -> None:
        after.update({p: rows_of(pair.target, p, page_ids, num_tokens) for p in parts})

    with monkeypatch.context() as patch:
        patch.setattr(runner, "copy_in", landing)
        pair.go_on(prompt, offer)
    assert after.keys() == before.keys() and set(parts) <= {KV, LATENT, INDEXER, *DRAFT_PARTS}
    for part, ranks in after.items():
        whole = np.nanmax(before[part], axis=0)
        assert np.isfinite(whole).all(), "nobody has computed a token"
        assert (np.isnan(before[part]) | (before[part] == whole)).all(), "copies differ"
        assert (np.isnan(ranks) | (ranks == whole)).all()
        assert np.isfinite(ranks).any(axis=0).all(), "nobody has a token"
        assert len(np.unique(whole)) > whole.size // 2, "all rows are alike"


def check_many_at_once(pair: Pair) -> None:
    """More than both compute at the same time."""
    pair.target.engine.reset_prefix_cache()
    requests: dict[str, int] = {}
    for length in (65, 17, 65, 2, 16, 9):
        offer = ask_prefill(pair.source, PROMPTS[length])
        request = decode_request(PROMPTS[length], offer, max_tokens=TOKENS, ignore_eos=True)
        requests[request.request_id] = length
        pair.target.engine.add(request)
    pair.target.run(*requests)
    for name, length in requests.items():
        assert pair.target.served[name].tokens == pair.expected[length]
    pair.drain()


def check_chunks(pair: Pair, *, are_whole_pages: bool = False) -> None:
    """They move while later ones are computed, each once, but for the rest of whole pages."""
    for side in (pair.source, pair.target):
        side.engine.reset_prefix_cache()
    pair.moved.clear()
    offer = begin_prefill(pair.source, PROMPTS[65])
    assert offer["remote_is_partial"] is True
    request = decode_request(PROMPTS[65], offer, max_tokens=TOKENS, ignore_eos=True)
    pair.target.engine.add(request)
    for _ in range(2):
        pair.source.step()
    until(lambda: pair.moved, pair.target)
    assert pair.source.served[offer["remote_request_id"]].finish_reason is None
    assert finish(pair.source, pair.target, request) == pair.expected[65]
    assert len(pair.moved) >= 2
    tables = [
        plan.bytes_by_path(pair.token_bytes(part)).sum()
        for moved in pair.moved
        for part, plan in moved.plans.items()
    ]
    more = sum(tables) - sum(least_bytes(pair.target, range(64)).values())
    assert more >= 0 if are_whole_pages else more == 0
    until(lambda: not pair.source.engine.num_offers, pair.source, pair.target)
    pair.drain()


def check_paths_of_layers_and_pages(pair: Pair) -> None:
    """Each carries its layers of a quarter of the pages; a page of two layers is one piece."""
    pair.hand_over(65)
    (moved,) = pair.moved
    quarter = 64 // 4
    layers = {LATENT: [2, 1, 1, 1, 1, 1, 1, 1], INDEXER: [1, 1, 1, 1, 1, 0, 0, 0]}
    names = list(moved.plans)
    assert names == [LATENT, DRAFT_LATENT, INDEXER, DRAFT_INDEXER]
    for part, held in layers.items():
        width = LATENT_BYTES if part == LATENT else KEY_BYTES
        wanted = np.outer(held, [quarter * width] * 4)
        assert (moved.plans[part].bytes_by_path(width) == wanted).all()
        assert (moved_by_path(moved, names.index(part)) == wanted).all()
    whole_latents = moved.plans[DRAFT_LATENT].bytes_by_path(LATENT_BYTES)
    assert whole_latents.sum(axis=0).tolist() == [64 * LATENT_BYTES] * 4
    assert whole_latents.sum(axis=1).tolist() == [32 * LATENT_BYTES] * 8  # of eight copies
    pieces = [path.num_blocks for path in moved.bound.paths if path.source_rank < 8]
    assert pieces == [quarter // PAGE] * 8 * 4


def moved_by_path(moved: Moved, part: int) -> np.ndarray:
    """Bytes of the bound paths of one part, [8, 4]: the ranks of parts lie one behind the other."""
    table = np.zeros((8 * len(moved.plans), 4 * len(moved.plans)), int)
    for path in moved.bound.paths:
        table[path.source_rank, path.target_rank] += path.num_bytes
    return table[8 * part : 8 * part + 8, 4 * part : 4 * part + 4]


ROUNDED = [
    ("sharded 4", "dcp 2", CONNECTORS[0]),
    *(
        pytest.param(*case, marks=pytest.mark.matrix)
        for case in (
            *(("sharded 4", "dcp 2", connector) for connector in CONNECTORS[1:]),
            ("sharded 4", DCP4, CONNECTORS[0]),
            ("tp 2, split 2", "dcp 2", CONNECTORS[0]),
            ("replicated 2", "alone", CONNECTORS[0]),
        )
    ),
]


@pytest.mark.parametrize(("source", "target", "connector"), ROUNDED)
def test_values_with_scales_move_as_they_are_stored(source, target, connector, engines):
    """Latents and keys of fp8_ds_mla: pages of one engine are cut for those of the other."""
    pair = engines.pair("wide", source, target, connector)
    check_tokens(pair)
    check_many_at_once(pair)
    check_chunks(pair, are_whole_pages=True)


@pytest.mark.matrix
@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(("model", "source", "target"), [PAIRS[2], PAIRS[4]])
def test_pages_pass_through_the_host(model, source, target, connector, engines):
    changes = {"pipelined_sends": False, "kv_buffer_device": "cpu"}
    pair = engines.pair(model, source, target, connector, **changes)
    for length in PROMPTS:
        assert pair.hand_over(length).tokens == pair.expected[length]
    pair.drain()
