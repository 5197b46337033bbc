"""A prompt of a model with several cache parts, computed by one engine, goes on in another."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from dcpjax.cache.parts import DRAFT_INDEXER, DRAFT_LATENT, DRAFT_PARTS, INDEXER, LATENT
from dcpjax.engine.handoff import Handoff
from dcpjax.engine.request import FinishReason
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.engine.pair import (
    Node,
    ask_prefill,
    decode_request,
    hand_over,
    node,
    skip_without,
    transfer,
)
from tests.engine.serving import request_of
from tests.golden.tiny import random_tokens
from tests.models.tiny_glm import GLM, write_model

MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
SMALL: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "block_size": 4,
    "num_pages": 20,
}
ENGINES: dict[str, dict[str, Any]] = {
    "alone": {},
    "sharded": {
        "tensor_parallel_size": 4,
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": 2,
        **MTP,
    },
    "whole index": {
        "tensor_parallel_size": 4,
        "decode_context_parallel_size": 4,
        "index_kv": "replicated",
        **MTP,
    },
}
"""``alone`` has no drafts, the others keep the index in two ways."""
VALUES = GLM | {"num_hidden_layers": 2}
TOKENS = 10
PROMPTS = {
    length: [token % VALUES["vocab_size"] for token in random_tokens(f"latent {length}", length)]
    for length in (1, 2, 9, 16, 17, 41)
}


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers with an indexer that chooses 4 tokens, and a draft layer."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, VALUES)
    return str(folder)


def checkpoint_for(model: str, shape: Mapping[str, Any]) -> Checkpoint:
    """As it is opened for an engine: without the draft layer if nothing drafts with it."""
    return open_checkpoint(model, draft_layers="speculative_config" in shape)


TRANSFERS: dict[str, dict[str, Any]] = {
    "in process": transfer("kv_both"),
    "through the host": transfer("kv_both", kv_buffer_device="cpu"),
    "nixl": transfer("kv_both", "NixlConnector"),
    "mooncake": transfer("kv_both", "MooncakeConnector"),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.matrix if name == "mooncake" else ())
        for name in TRANSFERS
    ],
)
def nodes(request, glm) -> Iterator[dict[str, Node]]:
    settings = TRANSFERS[request.param]
    skip_without(settings["kv_transfer_config"]["kv_connector"])
    with ExitStack() as opened:
        yield {
            name: opened.enter_context(
                node(checkpoint_for(glm, shape), **SMALL, **shape, **settings)
            )
            for name, shape in ENGINES.items()
        }


@pytest.fixture(scope="module")
def expected(nodes) -> dict[int, list[int]]:
    """What one engine says that computes everything and has no drafts."""
    alone = nodes["alone"]
    for length, prompt in PROMPTS.items():
        alone.engine.add(request_of(f"{length}", prompt, max_tokens=TOKENS, ignore_eos=True))
        alone.run(f"{length}")
    return {length: alone.served[f"{length}"].tokens for length in PROMPTS}


def rows_of(node: Node, part: str, page_ids: Sequence[int], num_tokens: int) -> list[np.ndarray]:
    """[tokens, layers, width] of each rank: the rows that it holds, NaN for the others."""
    engine = node.engine
    placement, pool = engine.placements[part], engine.runner.pools[part]
    shares = {shard.device: np.asarray(shard.data) for shard in pool.addressable_shards}
    tokens, found = np.arange(num_tokens), []
    for device, share in zip(engine.runner.mesh.devices.flat, placement.shares, strict=True):
        held = np.asarray(share.holds(0, 0, tokens))
        page, offset = np.divmod(np.arange(held.sum()), placement.page_size)
        stored = shares[device][np.asarray(page_ids)[page], :, 0, offset]
        rows = np.full((num_tokens, *stored.shape[1:]), np.nan, stored.dtype)
        rows[held] = stored
        found.append(rows)
    return found


def landing(
    prefill: Node, decode: Node, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, list[np.ndarray]], dict[str, list[np.ndarray]]]:
    """Rows of the parts that the target has, at the source and where they have just landed."""
    offer = ask_prefill(prefill, prompt)
    parts, num_tokens = decode.engine.placements, len(prompt) - 1
    source = {p: rows_of(prefill, p, offer["remote_block_ids"], num_tokens) for p in parts}
    target: dict[str, list[np.ndarray]] = {}
    copy_in = decode.engine.runner.copy_in

    def copying_in(page_ids: Sequence[int]) -> None:
        copy_in(page_ids)
        target.update({p: rows_of(decode, p, page_ids, num_tokens) for p in parts})

    decode.engine.reset_prefix_cache()
    request = decode_request(prompt, offer, max_tokens=1)
    with monkeypatch.context() as patch:
        patch.setattr(decode.engine.runner, "copy_in", copying_in)
        decode.engine.add(request)
        decode.run(request.request_id)
    return source, target


PAIRS = [
    ("sharded", "whole index"),
    ("whole index", "sharded"),
    ("sharded", "alone"),
    ("whole index", "alone"),
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_shape_goes_on_in_any_other(source, target, nodes, expected):
    prefill, decode = nodes[source], nodes[target]
    decode.engine.reset_prefix_cache()
    for length, prompt in [*PROMPTS.items(), (41, PROMPTS[41])]:
        served = hand_over(prefill, decode, prompt, max_tokens=TOKENS, ignore_eos=True)
        assert served.tokens == expected[length], f"{length} tokens"
        assert served.finish_reason is FinishReason.LENGTH
    assert served.num_cached_tokens > 0
    prefill.drain()
    decode.drain()


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("length", [17, 41])
def test_every_rank_gets_its_rows_of_every_part(source, target, length, nodes, monkeypatch):
    """Those of the draft layer too, which the tokens do not tell."""
    before, after = landing(nodes[source], nodes[target], PROMPTS[length], monkeypatch)
    assert after.keys() == set(nodes[target].engine.placements) <= before.keys()
    for part, ranks in after.items():
        whole = np.nanmax(before[part], axis=0)
        assert np.isfinite(whole).all()
        for rows in ranks:
            held = np.isfinite(rows[:, 0, 0])
            np.testing.assert_array_equal(rows[held], whole[held])
        assert np.isfinite(np.stack(ranks)).any(axis=0).all(), "nobody has a token"
    source_drafts = [rank for part in DRAFT_PARTS & after.keys() for rank in after[part]]
    assert all(np.isfinite(rows).all() for rows in source_drafts), "a rank lacks drafts"


@pytest.mark.parametrize(
    ("target", "copies"),
    [
        ("whole index", {LATENT: 1, INDEXER: 4, DRAFT_LATENT: 4, DRAFT_INDEXER: 4}),
        ("alone", {LATENT: 1, INDEXER: 1}),
    ],
)
def test_what_has_moved_is_shown_by_part(target, copies, nodes):
    """Every rank that keeps a part whole gets a copy; what the target lacks does not move."""
    prefill, decode = nodes["sharded"], nodes[target]
    decode.engine.reset_prefix_cache()
    hand_over(prefill, decode, PROMPTS[41], max_tokens=1)
    moved = (side.engine.stats()["kv_transfer"]["last_transfer"] for side in (decode, prefill))
    last = next(one for one in moved if one)  # the side that reads, or the one that writes
    latent, key, layers = 18 * 4, 8 * 4, 2
    token_bytes = {
        LATENT: layers * latent,
        INDEXER: layers * key,
        DRAFT_LATENT: latent,
        DRAFT_INDEXER: key,
    }
    assert last["num_tokens"] == 40
    assert last["parts"] == {part: 40 * n * token_bytes[part] for part, n in copies.items()}
    assert np.sum(last["bytes"]) == sum(last["parts"].values()) <= last["num_bytes"]
    assert (np.array(last["bytes"]) > 0).tolist() == (np.array(last["pieces"]) > 0).tolist()


def test_a_target_with_drafts_wants_them(nodes):
    prefill, decode = nodes["alone"], nodes["sharded"]
    request = decode_request(PROMPTS[9], ask_prefill(prefill, PROMPTS[9]), max_tokens=2)
    decode.engine.add(request)
    decode.run(request.request_id)
    assert decode.served[request.request_id].finish_reason is FinishReason.ERROR
    assert "both have speculative_config" in decode.errors[request.request_id]
    decode.drain()


def test_drafting_has_ended_when_pages_change_hands(nodes, monkeypatch):
    """The draft layer writes behind the step whose tokens end a prompt."""
    calls: list[bool] = []
    serve = Handoff.serve

    def serving(self, events):
        if events.exports or events.loads:
            calls.append(all(pool.is_ready() for pool in engine.runner.pools.values()))
        return serve(self, events)

    engine = nodes["whole index"].engine
    monkeypatch.setattr(Handoff, "serve", serving)
    for length in (9, 17, 41):
        ask_prefill(nodes["whole index"], PROMPTS[length])
    assert calls == [True] * 3
