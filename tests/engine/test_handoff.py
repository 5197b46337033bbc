"""A prompt computed by one engine goes on in another, token for token as in one alone."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from dcpjax.config import KVTransferConfig
from dcpjax.engine import kv_local, kv_staging
from dcpjax.engine.handoff import new_engine_id
from dcpjax.engine.kv_backends import PROCESS_FABRIC
from dcpjax.engine.kv_target import KVTarget
from dcpjax.engine.request import FinishReason
from dcpjax.engine.scheduler import Scheduler
from dcpjax.errors import (
    ConfigError,
    ContextLengthError,
    MeshError,
    RequestError,
    UnsupportedCombination,
)
from tests.engine.pair import (
    BRIEF,
    MODULES,
    PATIENCE,
    Node,
    ask_prefill,
    decode_request,
    hand_over,
    node,
    skip_without,
    transfer,
)
from tests.engine.serving import engine_of, request_of, serve
from tests.golden.tiny import random_tokens

SHAPES = {
    "one device": {},
    "tp 2": {"tensor_parallel_size": 2},
    "dcp 3": {"tensor_parallel_size": 3, "decode_context_parallel_size": 3},
    "tp 4, dcp 2": {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
    "tp 4, dcp 2, prefill order": {
        "tensor_parallel_size": 4,
        "decode_context_parallel_size": 2,
        "prefill_gather": "q",
        "apply_prefill_dcp": True,
    },
}
PAGE_BYTES = 2 * 2 * 8 * 2 * 8 * 4  # layers, heads, tokens, keys and values, head size, float32
PROMPTS = {length: random_tokens(f"handoff {length}", length) for length in (1, 2, 7, 8, 9, 50, 97)}


@pytest.fixture(scope="module")
def expected(tiny) -> dict[int, list[int]]:
    engine = engine_of(tiny)
    requests = [request_of(str(n), prompt, max_tokens=12) for n, prompt in PROMPTS.items()]
    served = serve(engine, requests)
    engine.close()
    return {n: served[str(n)].tokens for n in PROMPTS}


@pytest.fixture(scope="module")
def prefill(tiny):
    settings = {**SHAPES["tp 2"], "num_pages": 200, "enable_prefix_caching": False}
    with node(tiny, **settings, **transfer("kv_producer")) as prefill:
        yield prefill


@pytest.fixture(scope="module")
def brief(tiny):
    """A source whose offers soon run out."""
    with node(tiny, **transfer("kv_producer", **BRIEF)) as prefill:
        yield prefill


@pytest.fixture(scope="module")
def decode(tiny):
    with node(tiny, num_pages=24, **SHAPES["dcp 3"], **transfer("kv_consumer")) as decode:
        yield decode


@pytest.mark.parametrize("connector", MODULES)
@pytest.mark.parametrize(
    ("source", "target", "source_page", "target_page"),
    [
        ("one device", "dcp 3", 8, 8),
        ("tp 2", "tp 4, dcp 2", 16, 8),
        ("tp 4, dcp 2, prefill order", "one device", 8, 16),
        ("tp 4, dcp 2, prefill order", "dcp 3", 8, 8),
    ],
)
def test_any_shape_goes_on_in_any_other(
    connector, source, target, source_page, target_page, tiny, expected
):
    skip_without(connector)
    producer = {**SHAPES[source], "block_size": source_page, **transfer("kv_producer", connector)}
    consumer = {**SHAPES[target], "block_size": target_page, **transfer("kv_consumer", connector)}
    with node(tiny, **producer) as prefill, node(tiny, **consumer) as decode:
        for length, prompt in PROMPTS.items():
            served = hand_over(prefill, decode, prompt, max_tokens=12)
            assert served.tokens == expected[length], f"{length} tokens"
            assert served.finish_reason is FinishReason.LENGTH
        again = hand_over(prefill, decode, PROMPTS[97], max_tokens=12)
        assert again.tokens == expected[97] and again.num_cached_tokens > 0
        sides = [side.engine.stats()["kv_transfer"] for side in (prefill, decode)]
        assert sum(side["num_transfers"] for side in sides) >= sum(n > 1 for n in PROMPTS)
        assert not any(side["num_failed"] for side in sides)
        prefill.drain()
        decode.drain()
        handed_over = prefill.engine.stats()["kv_transfer"]["num_handed_over"]
        assert handed_over >= sum(n > 1 for n in PROMPTS)


@pytest.mark.parametrize("connector", MODULES)
@pytest.mark.parametrize(("source", "target"), [("cpu", "auto"), ("auto", "cpu"), ("cpu", "cpu")])
def test_pages_pass_through_the_host(connector, source, target, tiny, expected):
    """As they do where the devices' memory cannot be read from outside."""
    skip_without(connector)
    producer = transfer("kv_producer", connector, kv_buffer_device=source)
    consumer = transfer("kv_consumer", connector, kv_buffer_device=target)
    shapes = SHAPES["tp 4, dcp 2, prefill order"], SHAPES["dcp 3"]
    with (
        node(tiny, step_form="static", **shapes[0], **producer) as prefill,
        node(tiny, step_form="static", **shapes[1], **consumer) as decode,
    ):
        for length, prompt in [*PROMPTS.items(), *PROMPTS.items()]:
            served = hand_over(prefill, decode, prompt, max_tokens=12)
            assert served.tokens == expected[length], f"{length} tokens"
        assert decode.engine.stats()["compilations_after_warmup"] == 0
        assert prefill.engine.stats()["compilations_after_warmup"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pools_that_a_step_may_copy_are_not_written_from_outside(tiny, dtype):
    """A static step on CPU copies a pool of bfloat16: what lands meanwhile would be lost."""
    settings = {"step_form": "static", "kv_cache_dtype": dtype, "num_pages": 8, "max_num_seqs": 1}
    with node(tiny, **settings, **transfer("kv_consumer")) as decode:
        assert decode.engine.blueprint.mirrors_pool
    with pytest.raises(UnsupportedCombination, match="leave the pool in place"):
        engine_of(tiny, **settings, **transfer("kv_consumer", kv_buffer_device="cuda"))


def test_pages_of_the_host_are_not_sent_while_they_are_computed(tiny):
    config = transfer("kv_producer", kv_buffer_device="cpu", pipelined_sends=True)
    with pytest.raises(UnsupportedCombination, match="kv_buffer_device='cpu'"):
        engine_of(tiny, **config)


@pytest.mark.parametrize(
    ("source", "target", "interleaves"),
    [("tp 2", "dcp 3", (8, 1)), ("tp 4, dcp 2", "dcp 3", (1, 2)), ("dcp 3", "dcp 3", (1, 1))],
)
def test_tokens_dealt_one_by_one_are_put_in_order(
    source, target, interleaves, tiny, expected, monkeypatch
):
    """Runs of a few tokens are staged as whole pages, in several rounds where they do not fit."""
    monkeypatch.setattr(kv_staging, "STAGING_BYTES", 3 * PAGE_BYTES)
    sides = [
        {**SHAPES[shape], "cp_kv_cache_interleave_size": interleave}
        for shape, interleave in zip((source, target), interleaves, strict=True)
    ]
    staged = []
    put_in_order = kv_local.put_in_order

    def count(bound, *others):
        staged.append(bool(bound.landings))
        put_in_order(bound, *others)

    monkeypatch.setattr(kv_local, "put_in_order", count)
    with (
        node(tiny, **sides[0], **transfer("kv_producer")) as prefill,
        node(tiny, **sides[1], **transfer("kv_consumer")) as decode,
    ):
        for length, prompt in PROMPTS.items():
            served = hand_over(prefill, decode, prompt, max_tokens=12)
            assert served.tokens == expected[length], f"{length} tokens"
        is_same = source == target
        assert any(staged) is not is_same and (is_same or len(staged) > len(PROMPTS))


def test_only_what_the_target_lacks_is_moved(prefill, decode, expected):
    """Its own prefix hits, and the last token, are not sent."""
    decode.engine.reset_prefix_cache()
    bytes_before = decode.engine.stats()["kv_transfer"]["num_bytes"]
    sent = []
    for _ in range(2):
        assert hand_over(prefill, decode, PROMPTS[97], max_tokens=12).tokens == expected[97]
        now = decode.engine.stats()["kv_transfer"]["num_bytes"]
        sent.append(now - bytes_before)
        bytes_before = now
    token_bytes = 2 * 2 * 2 * 8 * 4  # layers, heads, keys and values, head size, float32
    assert sent == [96 * token_bytes, (96 - 96 // 24 * 24) * token_bytes]


def test_several_requests_at_once_and_a_crowded_target(prefill, decode, expected):
    """More prompts than the target has pages for: they wait for each other and none is lost."""
    lengths = [97, 50, 97, 9, 97, 50, 97, 8]
    offers = [ask_prefill(prefill, PROMPTS[n]) for n in lengths]
    decode.engine.reset_prefix_cache()
    requests = [
        decode_request(PROMPTS[n], offer, max_tokens=12)
        for n, offer in zip(lengths, offers, strict=True)
    ]
    for request in requests:
        decode.engine.add(request)
    decode.run(*(request.request_id for request in requests))
    for n, request in zip(lengths, requests, strict=True):
        assert decode.served[request.request_id].tokens == expected[n]
    prefill.drain()
    decode.drain()


def test_an_abort_at_any_moment_frees_both_sides(prefill, decode, expected):
    for steps in range(6):
        request = decode_request(PROMPTS[50], ask_prefill(prefill, PROMPTS[50]), max_tokens=12)
        decode.engine.add(request)
        for _ in range(steps):
            decode.step()
        decode.engine.abort(request.request_id)
        decode.run(request.request_id)
        assert decode.served[request.request_id].finish_reason is FinishReason.ABORT
        prefill.drain()
        decode.drain()
    assert hand_over(prefill, decode, PROMPTS[50], max_tokens=12).tokens == expected[50]


def test_a_load_begins_when_no_earlier_step_writes_any_more(prefill, decode, monkeypatch):
    """A step in flight still writes for an aborted request, into pages that a load gets."""
    under_way: list = []
    beside: list[set[str]] = []
    dispatch, commit, start = decode.engine.runner.dispatch, Scheduler.commit, KVTarget.start

    def dispatching(plan):
        under_way.append(plan)
        return dispatch(plan)

    def committing(self, plan, *results):
        under_way[:] = [other for other in under_way if other is not plan]
        return commit(self, plan, *results)

    def starting(self, load):
        beside.append({s.request.request_id for plan in under_way for s in plan.segments})
        start(self, load)

    monkeypatch.setattr(decode.engine.runner, "dispatch", dispatching)
    monkeypatch.setattr(Scheduler, "commit", committing)
    monkeypatch.setattr(KVTarget, "start", starting)
    offer = ask_prefill(prefill, PROMPTS[50])
    decode.engine.add(request_of("ends", PROMPTS[97], max_tokens=50))
    for _ in range(6):
        decode.step()
    assert under_way, "it is not in flight"
    decode.engine.abort("ends")
    request = decode_request(PROMPTS[50], offer, max_tokens=2)
    decode.engine.add(request)
    decode.run(request.request_id)
    assert beside == [set()]
    prefill.drain()
    decode.drain()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_two_engines_do_not_wait_for_each_other_for_ever(policy, tiny, expected):
    """Each is full of what it holds for the other, which has no room to take it."""
    settings = {"num_pages": 8, "enable_prefix_caching": False}
    roles = transfer("kv_both", kv_load_failure_policy=policy, kv_wait_timeout=0.5)
    with node(tiny, **settings, **roles) as one, node(tiny, **settings, **roles) as two:
        offers = [ask_prefill(side, PROMPTS[50]) for side in (two, one)]
        requests = [decode_request(PROMPTS[50], offer, max_tokens=12) for offer in offers]
        for side, request in zip((one, two), requests, strict=True):
            side.engine.add(request)
        for _ in range(20):
            one.step(), two.step()
        assert all(side.engine.scheduler.remote.num_loading == 0 for side in (one, two))
        one.run(requests[0].request_id)
        two.run(requests[1].request_id)
        given_up = 0
        for side, request in zip((one, two), requests, strict=True):
            error = side.errors.get(request.request_id)
            assert error is None or (policy == "fail" and "room" in error)
            assert side.served[request.request_id].tokens == ([] if error else expected[50])
            given_up += side.engine.stats()["kv_transfer"]["num_failed"]
            side.drain()
        assert given_up >= 1, "nobody had to wait"


def test_an_offer_that_nobody_takes_expires(brief):
    expired = brief.engine.stats()["kv_transfer"]["num_expired"]
    ask_prefill(brief, PROMPTS[9])
    brief.drain()
    assert brief.engine.stats()["kv_transfer"]["num_expired"] == expired + 1


def test_a_waiting_request_keeps_its_offer_alive(brief, decode, expected):
    """Heartbeats extend the lease while the target has no room."""
    offer = ask_prefill(brief, PROMPTS[50])
    request = decode_request(PROMPTS[50], offer, max_tokens=12)
    decode.engine.add(request)
    until = time.monotonic() + 3  # the lease alone lasts half of it
    while time.monotonic() < until:
        brief.step()  # and the target does not step
    decode.run(request.request_id)
    assert decode.served[request.request_id].tokens == expected[50]
    brief.drain()


def test_an_expired_offer_is_never_read(brief, decode):
    offer = ask_prefill(brief, PROMPTS[97])
    brief.drain()
    decode.engine.reset_prefix_cache()
    request = decode_request(PROMPTS[97], offer, max_tokens=12)
    decode.engine.add(request)
    decode.run(request.request_id)
    assert decode.served[request.request_id].finish_reason is FinishReason.ERROR
    assert not decode.served[request.request_id].tokens
    assert "holds the pages" in decode.errors[request.request_id]
    decode.drain()


def test_what_cannot_be_loaded_may_be_recomputed(tiny, brief, expected):
    settings = transfer("kv_consumer", kv_load_failure_policy="recompute")
    with node(tiny, **settings) as decode:
        offer = ask_prefill(brief, PROMPTS[50])
        brief.drain()
        for broken in (
            offer,
            {**offer, "remote_engine_id": "another"},
            {**offer, "remote_port": 9},
            {**offer, "remote_block_ids": offer["remote_block_ids"][:-1]},
            {**offer, "remote_block_ids": [10**6] * len(offer["remote_block_ids"])},
            {**offer, "remote_num_tokens": 49},
            {**offer, "remote_prompt_digest": "00" * 16},
        ):
            decode.engine.reset_prefix_cache()
            request = decode_request(PROMPTS[50], broken, max_tokens=12)
            decode.engine.add(request)
            decode.run(request.request_id)
            assert decode.served[request.request_id].tokens == expected[50]
        assert decode.engine.stats()["kv_transfer"]["num_failed"] == 7
        decode.drain()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"remote_num_tokens": None}, "how many tokens"),
        ({"remote_block_ids": [[1], [2]]}, "one group of pages"),
        ({"remote_block_ids": [-1]}, "kv_transfer_params"),
        ({"remote_port": 0}, "kv_transfer_params"),
        ({"remote_host": None}, "says where the KV is"),
        ({"do_remote_decode": True}, "not both"),
        ({"do_remote_decode": True, "do_remote_prefill": False}, "kv_producer"),
    ],
)
def test_params_that_make_no_sense_are_refused_at_once(change, rule, prefill, decode):
    offer = ask_prefill(prefill, PROMPTS[50])
    with pytest.raises(RequestError, match=rule):
        decode.engine.add(decode_request(PROMPTS[50], {**offer, **change}))
    assert not decode.engine.has_work
    hand_over(prefill, decode, PROMPTS[50], max_tokens=2)


@pytest.mark.parametrize("change", [{"remote_num_tokens": 49}, {"remote_prompt_digest": "00" * 16}])
def test_kv_of_another_prompt_is_nobodys_fault_and_released_at_once(change, prefill, decode):
    """A template may have written another date: an error of the engine, which a router repeats."""
    offer = ask_prefill(prefill, PROMPTS[50])
    request = decode_request(PROMPTS[50], {**offer, **change})
    decode.engine.add(request)
    decode.run(request.request_id)
    assert decode.served[request.request_id].finish_reason is FinishReason.ERROR
    assert "read the same tokens (remote_num_tokens=" in decode.errors[request.request_id]
    wait_until_released(prefill, offer)
    decode.drain()


def test_the_offer_of_a_refused_request_is_released_at_once(prefill, decode):
    """The prefill engine was asked for one token, so it could not know."""
    offer = ask_prefill(prefill, PROMPTS[50])
    with pytest.raises(ContextLengthError):
        decode.engine.add(decode_request(PROMPTS[50], offer, max_tokens=10**6))
    wait_until_released(prefill, offer)


def wait_until_released(prefill: Node, offer: Mapping[str, Any]) -> None:
    """Much sooner than by the end of its lease."""
    deadline = time.monotonic() + KVTransferConfig("kv_producer").kv_lease_duration / 3
    while offer["remote_request_id"] in prefill.engine.scheduler.remote:
        assert time.monotonic() < deadline, "an offer is held though nobody wants it"
        prefill.step()


def test_an_offer_is_taken_as_it_was_made(prefill, decode):
    """What a client says of a held request is compared with what the source knows of it."""
    other = random_tokens("another prompt", 50)
    offers = [ask_prefill(prefill, prompt) for prompt in (PROMPTS[50], other)]
    without_digest = {**offers[1], "remote_prompt_digest": None}
    lies = [
        {**offers[0], "remote_block_ids": offers[1]["remote_block_ids"]},
        {**offers[0], "remote_block_ids": offers[0]["remote_block_ids"][::-1]},
        without_digest,  # another prompt of as many tokens
    ]
    for lie in lies:
        decode.engine.reset_prefix_cache()
        request = decode_request(PROMPTS[50], lie, max_tokens=2)
        decode.engine.add(request)
        decode.run(request.request_id)
        assert "in which it was offered" in decode.errors[request.request_id]
    decode.drain()


def test_an_engine_without_transfers_refuses_them(tiny):
    engine = engine_of(tiny)
    with pytest.raises(RequestError, match="kv-transfer-config"):
        engine.add(decode_request(PROMPTS[9], {"do_remote_decode": True}))
    engine.add(decode_request(PROMPTS[9], {"do_remote_decode": False}, max_tokens=1))
    engine.close()


def test_other_weights_are_refused_before_a_byte_moves(tiny, bare, decode):
    settings = {**transfer("kv_producer"), "load_format": "dummy"}
    with node(bare, **settings) as other:
        request = decode_request(PROMPTS[50], ask_prefill(other, PROMPTS[50]))
        before = decode.engine.stats()["kv_transfer"]["num_bytes"]
        decode.engine.reset_prefix_cache()
        decode.engine.add(request)
        decode.run(request.request_id)
        assert "same weights (theirs=" in decode.errors[request.request_id]
        assert decode.engine.stats()["kv_transfer"]["num_bytes"] == before
        decode.drain()


def test_an_engine_that_cannot_start_leaves_nothing_behind(tiny, prefill):
    """Neither threads nor memory that a backend still knows."""
    port = ask_prefill(prefill, PROMPTS[1])["remote_port"]
    before = set(threading.enumerate()), dict(PROCESS_FABRIC.members)
    with pytest.raises(ConfigError, match=f"port={port}"):
        engine_of(tiny, **transfer("kv_both", kv_port=port))
    assert (set(threading.enumerate()), PROCESS_FABRIC.members) == before


def test_a_restarted_engine_is_another_one_whatever_its_name():
    first, second = new_engine_id("prefill 0"), new_engine_id("prefill 0")
    assert first != second and first.startswith("prefill 0")
    assert len({new_engine_id(None), new_engine_id(None)}) == 2


def test_neuron_rules_hold_for_its_connector(tiny):
    settings = {**SHAPES["dcp 3"], **transfer("kv_producer", "NeuronNixlConnector")}
    with pytest.raises(MeshError, match="dcp is at most tp // kv_heads"):
        engine_of(tiny, **settings)


def test_one_prefill_engine_serves_two_shapes_at_once(tiny, prefill, decode, expected):
    with node(tiny, **SHAPES["tp 4, dcp 2"], **transfer("kv_consumer")) as other:
        nodes: list[Node] = [decode, other, decode, other]
        decode.engine.reset_prefix_cache()
        requests = [
            decode_request(PROMPTS[97], ask_prefill(prefill, PROMPTS[97]), max_tokens=12)
            for _ in nodes
        ]
        for target, request in zip(nodes, requests, strict=True):
            target.engine.add(request)
        deadline = time.monotonic() + PATIENCE
        while any(
            not t.served[r.request_id].finish_reason for t, r in zip(nodes, requests, strict=True)
        ):
            assert time.monotonic() < deadline
            decode.step()
            other.step()
        for target, request in zip(nodes, requests, strict=True):
            assert target.served[request.request_id].tokens == expected[97]
        prefill.drain()
