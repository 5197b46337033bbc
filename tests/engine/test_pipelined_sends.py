"""Chunks of a prompt move while later ones are computed, and nothing else changes."""

import time

import pytest

from dcpjax.engine import kv_peer
from dcpjax.engine.request import FinishReason
from tests.engine.pair import (
    MODULES,
    PATIENCE,
    Node,
    begin_prefill,
    decode_request,
    hand_over,
    node,
    skip_without,
    transfer,
)
from tests.engine.test_handoff import PROMPTS, SHAPES, expected

__all__ = ["expected"]  # a fixture

CHUNKS = {"max_num_batched_tokens": 24, "enable_prefix_caching": False}
LONG = [*PROMPTS[97], *PROMPTS[50]]


def pipelined(connector: str = "InProcessConnector", **changes):
    return {**CHUNKS, **transfer("kv_producer", connector, pipelined_sends=True, **changes)}


def until(is_so, *nodes: Node) -> None:
    """Step the nodes until something is so; the others stand still."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        for other in nodes:
            other.step()
        time.sleep(0.001)


def num_moved(*nodes: Node) -> int:
    """Transfers that were completed; the side that started one counts it."""
    return sum(side.engine.stats()["kv_transfer"]["num_transfers"] for side in nodes)


def finish(prefill: Node, decode: Node, request) -> list[int]:
    served = decode.served[request.request_id]
    until(lambda: served.finish_reason, prefill, decode)
    return served.tokens


def begin_both(prefill: Node, decode: Node):
    """Offer and request of a prompt of which a part has moved, and a part is not computed."""
    offer = begin_prefill(prefill, PROMPTS[97])
    assert offer["remote_is_partial"] is True
    request = decode_request(PROMPTS[97], offer, max_tokens=12)
    decode.engine.add(request)
    prefill.step()
    prefill.step()
    until(lambda: num_moved(prefill, decode) >= 1, decode)
    assert prefill.served[offer["remote_request_id"]].finish_reason is None
    return offer, request


@pytest.mark.parametrize("connector", MODULES)
@pytest.mark.parametrize(
    ("source", "target"), [("one device", "dcp 3"), ("tp 4, dcp 2, prefill order", "one device")]
)
def test_the_tokens_are_those_of_one_engine(connector, source, target, tiny, expected):
    """Also behind a prefix hit of the target, which is not sent."""
    skip_without(connector)
    with (
        node(tiny, **SHAPES[source], **pipelined(connector)) as prefill,
        node(tiny, **SHAPES[target], **transfer("kv_consumer", connector)) as decode,
    ):
        for length in (1, 2, 8, 50, 97):
            offer = begin_prefill(prefill, PROMPTS[length])
            request = decode_request(PROMPTS[length], offer, max_tokens=12)
            decode.engine.add(request)
            assert finish(prefill, decode, request) == expected[length], f"{length} tokens"
        alone = hand_over(prefill, decode, LONG, max_tokens=4)  # an ordinary offer
        decode.engine.reset_prefix_cache()
        hand_over(prefill, decode, PROMPTS[97], max_tokens=1)
        before = num_moved(prefill, decode)
        request = decode_request(LONG, begin_prefill(prefill, LONG), max_tokens=4)
        decode.engine.add(request)
        assert finish(prefill, decode, request) == alone.tokens
        assert decode.served[request.request_id].num_cached_tokens == 96
        assert num_moved(prefill, decode) > before
        for side in (prefill, decode):
            side.drain()
            assert not side.engine.stats()["kv_transfer"]["num_failed"]


@pytest.mark.parametrize("connector", MODULES)
def test_chunks_move_while_later_ones_are_not_computed(connector, tiny, expected):
    skip_without(connector)
    with (
        node(tiny, **pipelined(connector)) as prefill,
        node(tiny, **transfer("kv_consumer", connector)) as decode,
    ):
        _, request = begin_both(prefill, decode)
        assert finish(prefill, decode, request) == expected[97]
        assert num_moved(prefill, decode) >= 2


def test_the_setting_is_off_by_default(tiny, expected):
    with (
        node(tiny, **CHUNKS, **transfer("kv_producer")) as prefill,
        node(tiny, **transfer("kv_consumer")) as decode,
    ):
        offer = begin_prefill(prefill, PROMPTS[97])
        assert offer["remote_is_partial"] is False
        request = decode_request(PROMPTS[97], offer, max_tokens=12)
        decode.engine.add(request)
        assert finish(prefill, decode, request) == expected[97]
        assert num_moved(prefill, decode) == 1


@pytest.mark.parametrize("connector", MODULES)
@pytest.mark.parametrize("side", ["source", "target"])
def test_an_abort_in_the_middle_frees_both_sides(side, connector, tiny, expected):
    skip_without(connector)
    with (
        node(tiny, **pipelined(connector)) as prefill,
        node(tiny, **transfer("kv_consumer", connector)) as decode,
    ):
        offer, request = begin_both(prefill, decode)
        if side == "source":
            prefill.engine.abort(offer["remote_request_id"])
        else:
            decode.engine.abort(request.request_id)
        assert finish(prefill, decode, request) == []
        reason = decode.served[request.request_id].finish_reason
        assert reason is (FinishReason.ERROR if side == "source" else FinishReason.ABORT)
        assert ("is computed" in decode.errors.get(request.request_id, "")) == (side == "source")
        until(lambda: not prefill.engine.num_offers, prefill, decode)
        prefill.drain()
        until(lambda: not decode.engine.stats()["kv_cache_usage"], decode)
        assert hand_over(prefill, decode, PROMPTS[50], max_tokens=12).tokens == expected[50]


def test_an_early_offer_that_nobody_took_ends_with_its_request(tiny):
    with node(tiny, **pipelined()) as prefill:
        offer = begin_prefill(prefill, PROMPTS[97])
        prefill.engine.abort(offer["remote_request_id"])
        for _ in range(3):
            prefill.step()
        assert prefill.engine.num_offers == 0 == prefill.engine.stats()["kv_cache_usage"]


def test_an_early_offer_outlives_a_lease_while_it_is_computed(tiny):
    settings = {"kv_lease_duration": 0.3, "kv_lease_extension": 0.3}
    with node(tiny, **pipelined(**settings)) as prefill:
        offer = begin_prefill(prefill, PROMPTS[97])
        time.sleep(1.0)
        assert prefill.engine.num_offers == 1
        prefill.run(offer["remote_request_id"])
        until(lambda: prefill.engine.num_offers == 0, prefill)
        assert prefill.engine.stats()["kv_transfer"]["num_expired"] == 1


@pytest.mark.parametrize(("policy", "says_so"), [("fail", True), ("recompute", False)])
@pytest.mark.parametrize("connector", MODULES)
def test_a_source_that_is_gone_in_the_middle(
    connector, policy, says_so, tiny, expected, monkeypatch
):
    """It closes, or nothing is heard of it any more."""
    skip_without(connector)
    monkeypatch.setattr(kv_peer, "_CALL_SECONDS", 1.0)
    settings = transfer("kv_consumer", connector, kv_load_failure_policy=policy)
    with node(tiny, **settings) as decode:
        with node(tiny, **pipelined(connector)) as prefill:
            _, request = begin_both(prefill, decode)
            if not says_so:
                prefill.engine._handoff._source._server.close()
        decode.run(request.request_id)
        wanted = [] if policy == "fail" else expected[97]
        assert decode.served[request.request_id].tokens == wanted
        until(lambda: not decode.engine.stats()["kv_cache_usage"], decode)


def test_reading_beyond_what_is_computed_would_be_noticed(tiny, expected, monkeypatch):
    """The twin of the tests above: a target that does not wait gets other tokens."""
    monkeypatch.setattr(kv_peer.SourcePeer, "_wait", lambda *others: 10**6)
    with node(tiny, **pipelined()) as prefill, node(tiny, **transfer("kv_consumer")) as decode:
        offer = begin_prefill(prefill, PROMPTS[97])
        request = decode_request(PROMPTS[97], offer, max_tokens=12)
        decode.engine.add(request)
        decode.run(request.request_id)
        assert decode.served[request.request_id].tokens != expected[97]
