"""A prompt computed by PCP ranks goes on in an engine that decodes, whatever each rank holds."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from dcpjax.cache.parts import DRAFT_INDEXER, DRAFT_LATENT, DRAFT_PARTS, INDEXER, KV, LATENT
from dcpjax.engine import blueprint, sampler
from dcpjax.engine.kv_local import LocalKV
from dcpjax.engine.kv_moves import Moved
from dcpjax.engine.request import FinishReason
from dcpjax.models.checkpoint import open_checkpoint
from tests.engine.drafting_glm import drafting_glm
from tests.engine.pair import (
    Node,
    ask_prefill,
    begin_prefill,
    decode_request,
    hand_over,
    node,
    skip_without,
    transfer,
)
from tests.engine.serving import Served, request_of
from tests.engine.test_pipelined_sends import finish, num_moved, until
from tests.golden.tiny import random_tokens, write_tiny_model
from tests.golden.tiny_glm import write_tiny_glm

PAGE = 4
SMALL: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 96,
    "block_size": PAGE,
    "num_pages": 60,
}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
SPLIT, DCP4 = "split 8", "dcp 4"
SOURCES: dict[str, dict[str, Any]] = {
    SPLIT: {"prefill_context_parallel_size": 8, "prefill_kv": "layer_split"},
    "tp 2, split 2": {
        "tensor_parallel_size": 2,
        "prefill_context_parallel_size": 2,
        "prefill_kv": "layer_split",
    },
    "sharded 4": {"prefill_context_parallel_size": 4, "decode_context_parallel_size": 4},
    "sharded 3, whole index": {
        "prefill_context_parallel_size": 3,
        "decode_context_parallel_size": 3,
        "index_kv": "replicated",
    },
    "token by token": {
        "prefill_context_parallel_size": 4,
        "decode_context_parallel_size": 4,
        "cp_kv_cache_interleave_size": 1,
    },
    "tp 2, sharded 2": {
        "tensor_parallel_size": 2,
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 2,
    },
    "tp 2, sharded 4": {
        "tensor_parallel_size": 2,
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 4,
    },
    "replicated 2": {"prefill_context_parallel_size": 2},
    "tp 2, replicated 3": {"tensor_parallel_size": 2, "prefill_context_parallel_size": 3},
}
TARGETS: dict[str, dict[str, Any]] = {
    "alone": {},
    "dcp 2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "dcp 3": {"tensor_parallel_size": 3, "decode_context_parallel_size": 3},
    DCP4: {"tensor_parallel_size": 4, "decode_context_parallel_size": 4},
    "token by token": {
        "tensor_parallel_size": 4,
        "decode_context_parallel_size": 4,
        "cp_kv_cache_interleave_size": 1,
    },
}
TOKENS, VOCABULARY = 10, 61
PROMPTS = {n: random_tokens(f"pcp {n}", n, VOCABULARY) for n in (1, 2, 9, 16, 17, 65)}
LONGER = 82
PROMPTS[LONGER] = PROMPTS[65] + PROMPTS[17]
DEEP_LAYERS, DEEP_CHOOSING = 9, 5
"""Eight ranks have two latents or one, and the keys of one layer or none."""
LATENT_BYTES, KEY_BYTES = (16 + 6) * 4, 12 * 4
"""Of a token in one layer of the deep model."""


def write_deep(folder) -> Any:
    types = [("full", "shared")[layer % 2] for layer in range(DEEP_LAYERS)]
    changed = {"num_hidden_layers": DEEP_LAYERS, "num_nextn_predict_layers": 1}
    return open_checkpoint(str(write_tiny_glm(folder, "periodic", indexer_types=types, **changed)))


MODELS = {
    "deep": write_deep,
    "glm": drafting_glm,
    "gqa": lambda folder: open_checkpoint(
        str(write_tiny_model(folder, "gqa", num_hidden_layers=3))
    ),
}
CONNECTORS = ("InProcessConnector", "NixlConnector", "MooncakeConnector")


@dataclass
class Pair:
    """Two engines, what has moved between them, and what one engine says alone."""

    source: Node
    target: Node
    expected: Mapping[int, list[int]]
    moved: list[Moved]

    @property
    def num_failed(self) -> int:
        sides = (self.source, self.target)
        return sum(side.engine.stats()["kv_transfer"]["num_failed"] for side in sides)

    def hand_over(self, length: int, *, is_known: bool = False) -> Served:
        """A prompt through both; the target has nothing of it, or what it had of one before."""
        if not is_known:
            self.target.engine.reset_prefix_cache()
        self.moved.clear()
        return hand_over(
            self.source, self.target, PROMPTS[length], max_tokens=TOKENS, ignore_eos=True
        )


@dataclass
class Engines:
    """Opened when they are asked for, and kept."""

    tmp_path: Any
    opened: ExitStack
    moved: list[Moved] = field(default_factory=list)
    models: dict[str, Any] = field(default_factory=dict)
    nodes: dict[tuple, Node] = field(default_factory=dict)
    expected: dict[str, dict[int, list[int]]] = field(default_factory=dict)

    def pair(self, model: str, source: str, target: str, connector: str, **changes: Any) -> Pair:
        """With drafts of the model's own where it has them, except in one that is alone."""
        skip_without(connector)
        sides = (
            self._node(model, source, "kv_producer", connector, changes),
            self._node(model, target, "kv_consumer", connector, {}),
        )
        return Pair(*sides, self._alone(model), self.moved)

    def _node(
        self, model: str, shape: str, role: str, connector: str, changes: Mapping[str, Any]
    ) -> Node:
        key = (model, shape, role, connector, *changes.items())
        if key not in self.nodes:
            is_source = role == "kv_producer"
            settings = SMALL | (SOURCES if is_source else TARGETS)[shape]
            if model != "gqa" and shape != "alone":
                settings |= MTP
            config = {"pipelined_sends": is_source, **changes}
            made = node(self._model(model), **settings, **transfer(role, connector, **config))
            self.nodes[key] = self.opened.enter_context(made)
        return self.nodes[key]

    def _model(self, name: str) -> Any:
        if name not in self.models:
            self.models[name] = MODELS[name](self.tmp_path / name)
        return self.models[name]

    def _alone(self, model: str) -> dict[int, list[int]]:
        """What one engine says that computes everything on one device, without drafts."""
        if model not in self.expected:
            alone = self._node(model, "alone", "kv_consumer", CONNECTORS[0], {})
            for length, prompt in PROMPTS.items():
                request = request_of(f"{length}", prompt, max_tokens=TOKENS, ignore_eos=True)
                alone.engine.add(request)
            alone.run(*map(str, PROMPTS))
            self.expected[model] = {n: alone.served[f"{n}"].tokens for n in PROMPTS}
        return self.expected[model]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """With one bucket of decode rows and one of sampled rows: there is little to compile."""
    arrived = LocalKV._arrived
    with ExitStack() as opened, pytest.MonkeyPatch.context() as patch:
        engines = Engines(tmp_path_factory.mktemp("models"), opened)

        def arriving(self: LocalKV, *arguments: Any) -> Moved:
            engines.moved.append(arrived(self, *arguments))
            return engines.moved[-1]

        patch.setattr(LocalKV, "_arrived", arriving)
        patch.setattr(blueprint, "decode_buckets", lambda least, most: (most,))
        patch.setattr(sampler, "_SEGMENT_BUCKETS", ())
        yield engines


PAIRS = [
    ("deep", SPLIT, DCP4),
    ("deep", SPLIT, "alone"),
    ("glm", "sharded 4", "dcp 2"),
    ("glm", "sharded 4", "alone"),
    ("glm", "replicated 2", "dcp 2"),
    ("gqa", "tp 2, split 2", "dcp 3"),
    ("gqa", "sharded 4", "dcp 3"),
    ("gqa", "sharded 4", "alone"),
    ("gqa", "replicated 2", "dcp 3"),
]
MORE_PAIRS = [
    ("deep", SPLIT, "token by token"),
    ("deep", "tp 2, split 2", "dcp 2"),
    ("glm", "sharded 3, whole index", "dcp 3"),
    ("glm", "token by token", "dcp 2"),
    ("glm", "token by token", "token by token"),
    ("glm", "tp 2, sharded 2", DCP4),
    ("glm", "tp 2, sharded 4", "dcp 2"),
    ("glm", "tp 2, replicated 3", DCP4),
    ("gqa", "tp 2, split 2", "token by token"),
    ("gqa", "tp 2, sharded 2", "dcp 3"),
    ("gqa", "token by token", "dcp 2"),
    ("gqa", "tp 2, replicated 3", "alone"),
]
MATRIX = [pytest.param(*pair, marks=pytest.mark.matrix) for pair in MORE_PAIRS]
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


@pytest.mark.parametrize(("model", "source", "target", "connector"), CASES)
def test_the_tokens_are_those_of_one_device(model, source, target, connector, engines):
    pair = engines.pair(model, source, target, connector)
    for length in PROMPTS:
        served = pair.hand_over(length)
        assert served.tokens == pair.expected[length], f"{length} tokens"
        assert served.finish_reason is FinishReason.LENGTH
        assert bool(pair.moved) == (length > 1)
    assert pair.num_failed == 0
    pair.source.drain()
    pair.target.drain()


@pytest.mark.parametrize(("model", "source", "target", "connector"), CASES)
def test_no_byte_moves_that_is_not_wanted(model, source, target, connector, engines):
    """Neither of a prompt, nor of one whose beginning both have already."""
    pair = engines.pair(model, source, target, connector)
    mover = pair.source if connector == "MooncakeConnector" else pair.target
    page = pair.target.engine.config.virtual_page_size
    for length, is_known in ((2, False), (17, False), (65, False), (LONGER, True)):
        served = pair.hand_over(length, is_known=is_known)
        assert served.tokens == pair.expected[length]
        cached = 65 // page * page if is_known else 0
        assert served.num_cached_tokens == cached
        last = mover.engine.stats()["kv_transfer"]["last_transfer"]
        least = least_bytes(pair.target, range(cached, length - 1))
        assert last["parts"] == least and np.sum(last["bytes"]) == sum(least.values())
        assert last["num_bytes"] == sum(moved.bound.num_bytes for moved in pair.moved)
        if "token by token" in (source, target):  # whole pages move, and are put in order
            assert last["num_bytes"] >= sum(least.values())
        else:
            assert last["num_bytes"] == sum(least.values())


@pytest.mark.parametrize("connector", CONNECTORS)
def test_each_path_carries_its_layers_of_a_quarter_of_the_pages(connector, engines):
    """Eight ranks of layers to four of pages; a page of two layers is one piece."""
    pair = engines.pair("deep", SPLIT, DCP4, connector)
    pair.hand_over(65)
    (moved,) = pair.moved
    quarter = 64 // 4
    layers = {LATENT: [2, 1, 1, 1, 1, 1, 1, 1], INDEXER: [1, 1, 1, 1, 1, 0, 0, 0]}
    widths = {LATENT: LATENT_BYTES, INDEXER: KEY_BYTES}
    names = list(moved.plans)
    assert names == [LATENT, DRAFT_LATENT, INDEXER, DRAFT_INDEXER]
    for part, held in layers.items():
        wanted = np.outer(held, [quarter * widths[part]] * 4)
        assert (moved.plans[part].bytes_by_path(widths[part]) == wanted).all()
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


@pytest.mark.parametrize(("model", "source", "target"), [*PAIRS, *MATRIX])
def test_every_rank_gets_its_rows(model, source, target, engines, monkeypatch):
    """From whichever copy; those of the draft layer too, which the tokens do not tell."""
    pair = engines.pair(model, source, target, CONNECTORS[0])
    prompt, num_tokens = PROMPTS[65], 64
    offer = ask_prefill(pair.source, prompt)
    parts = pair.target.engine.placements
    before = {p: rows_of(pair.source, p, offer["remote_block_ids"], num_tokens) for p in parts}
    after: dict[str, np.ndarray] = {}
    runner = pair.target.engine.runner
    monkeypatch.setattr(
        runner,
        "copy_in",
        lambda ids: after.update({p: rows_of(pair.target, p, ids, num_tokens) for p in parts}),
    )
    pair.target.engine.reset_prefix_cache()
    request = decode_request(prompt, offer, max_tokens=1)
    pair.target.engine.add(request)
    pair.target.run(request.request_id)
    assert after.keys() == before.keys() and set(parts) <= {KV, LATENT, INDEXER, *DRAFT_PARTS}
    for part, ranks in after.items():
        whole = np.nanmax(before[part], axis=0)
        assert np.isfinite(whole).all(), "nobody computed a token"
        assert all((np.isnan(rows) | (rows == whole)).all() for rows in before[part]), "copies"
        assert all((np.isnan(rows) | (rows == whole)).all() for rows in ranks)
        assert np.isfinite(ranks).any(axis=0).all(), "nobody has a token"
        assert len(np.unique(whole)) > whole.size // 2, "all rows are alike"


@pytest.mark.parametrize("rank", [0, 7])
def test_the_tokens_depend_on_the_layers_of_every_rank(rank, engines):
    """What a rank has computed is lost before it is sent, and is missed."""
    pair = engines.pair("deep", SPLIT, DCP4, CONNECTORS[0])
    offer = ask_prefill(pair.source, PROMPTS[65])
    region = pair.source.engine.runner.memory[LATENT][rank]
    for page in offer["remote_block_ids"]:
        start = region.address + page * region.page_stride
        ctypes.memset(start, 255, region.page_stride)  # not a number
    pair.target.engine.reset_prefix_cache()
    request = decode_request(PROMPTS[65], offer, max_tokens=TOKENS, ignore_eos=True)
    pair.target.engine.add(request)
    pair.target.run(request.request_id)
    assert pair.target.served[request.request_id].tokens != pair.expected[65]
    for side in (pair.source, pair.target):  # these pages hold no prefix
        side.engine.reset_prefix_cache()
        side.drain()


@pytest.mark.parametrize(
    ("model", "source", "sizes"),
    [
        ("deep", SPLIT, (1, 8, 1)),
        ("glm", "sharded 4", (1, 4, 4)),
        ("gqa", "tp 2, split 2", (2, 2, 1)),
    ],
)
def test_an_offer_names_the_sizes_of_its_engine(model, source, sizes, engines):
    target = "dcp 3" if model == "gqa" else "alone"
    prefill = engines.pair(model, source, target, CONNECTORS[0]).source
    offer = ask_prefill(prefill, PROMPTS[9])
    assert (offer["tp_size"], offer["pcp_size"], offer["dcp_size"]) == sizes
    prefill.engine.abort(offer["remote_request_id"])


@pytest.mark.parametrize(
    ("model", "source", "target"), [("deep", SPLIT, DCP4), ("gqa", "sharded 4", "dcp 3")]
)
def test_several_requests_at_once(model, source, target, engines):
    """More than both compute at the same time."""
    pair = engines.pair(model, source, target, CONNECTORS[0])
    pair.target.engine.reset_prefix_cache()
    requests = []
    for length in (65, 17, 65, 2, 16, 9):
        offer = ask_prefill(pair.source, PROMPTS[length])
        requests.append(
            (length, decode_request(PROMPTS[length], offer, max_tokens=TOKENS, ignore_eos=True))
        )
    for _, request in requests:
        pair.target.engine.add(request)
    pair.target.run(*(request.request_id for _, request in requests))
    for length, request in requests:
        assert pair.target.served[request.request_id].tokens == pair.expected[length]
    assert pair.num_failed == 0
    pair.source.drain()
    pair.target.drain()


@pytest.mark.parametrize(
    ("model", "source", "target", "connector"),
    [
        *(("deep", SPLIT, DCP4, connector) for connector in CONNECTORS),
        ("gqa", "sharded 4", "dcp 3", CONNECTORS[0]),
    ],
)
def test_chunks_move_while_later_ones_are_computed(model, source, target, connector, engines):
    pair = engines.pair(model, source, target, connector)
    for side in (pair.source, pair.target):
        side.engine.reset_prefix_cache()
    pair.moved.clear()
    offer = begin_prefill(pair.source, PROMPTS[65])
    assert offer["remote_is_partial"] is True
    request = decode_request(PROMPTS[65], offer, max_tokens=TOKENS, ignore_eos=True)
    pair.target.engine.add(request)
    before = num_moved(pair.source, pair.target)
    for _ in range(2):
        pair.source.step()
    until(lambda: num_moved(pair.source, pair.target) > before, pair.target)
    assert pair.source.served[offer["remote_request_id"]].finish_reason is None
    assert finish(pair.source, pair.target, request) == pair.expected[65]
    assert len(pair.moved) >= 2
    sent = sum(moved.bound.num_bytes for moved in pair.moved)
    assert sent == sum(least_bytes(pair.target, range(64)).values())
    until(lambda: not pair.source.engine.num_offers, pair.source, pair.target)
    pair.source.drain()
    pair.target.drain()


@pytest.mark.matrix
@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(("model", "source", "target"), [PAIRS[2], PAIRS[5]])
def test_pages_pass_through_the_host(model, source, target, connector, engines):
    changes = {"pipelined_sends": False, "kv_buffer_device": "cpu"}
    pair = engines.pair(model, source, target, connector, **changes)
    for length in PROMPTS:
        assert pair.hand_over(length).tokens == pair.expected[length]
    pair.source.drain()
    pair.target.drain()
