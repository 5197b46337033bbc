"""A router that asks the decode engine while the prompt is computed."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcpjax.server.router_peers import Role
from tests.server.stand_in_engine import (
    Exchange,
    StandIn,
    answer,
    prefilled,
    refusal,
    reset,
    stand_in,
)
from tests.server.test_live import wait_until
from tests.server.test_router import Live, live_router, num_calls, text_of


def offered_early(exchange: Exchange) -> None:
    """The first event of a stream."""
    assert exchange.body["kv_transfer_params"]["early_offer"] is True
    assert exchange.body["stream"] is True
    exchange.begin_stream()
    params = {"do_remote_prefill": True, "remote_engine_id": exchange.engine.name}
    exchange.event({"choices": [], "kv_transfer_params": params})


def computed(exchange: Exchange) -> None:
    offered_early(exchange)
    exchange.event({"choices": [{"text": "x", "finish_reason": "length"}]})
    exchange.end_stream()


def broken_after_the_offer(exchange: Exchange) -> None:
    offered_early(exchange)
    exchange.reset()


def endless(exchange: Exchange) -> None:
    offered_early(exchange)
    exchange.wait_until_left()


@pytest.fixture
def prefill() -> Iterator[StandIn]:
    with stand_in("p") as engine:
        engine.usual = computed
        yield engine


@pytest.fixture
def decode() -> Iterator[StandIn]:
    with stand_in("d") as engine:
        yield engine


@pytest.fixture
def router(prefill: StandIn, decode: StandIn) -> Iterator[Live]:
    with live_router([prefill], [decode], pipelined_prefill=True) as live:
        yield live


@pytest.mark.parametrize("stream", [False, True])
def test_decode_is_asked_before_the_prompt_is_computed(
    stream: bool, router: Live, prefill: StandIn, decode: StandIn
) -> None:
    prefill.scripts.append(endless)  # until the answer of the decode engine is complete
    response = router.complete(stream=stream)
    assert (response.status_code, text_of(response)) == (200, "Hello!")
    assert decode.calls[0]["kv_transfer_params"]["remote_engine_id"] == "p"
    assert decode.calls[0].get("stream", False) is stream
    assert prefill.left.acquire(timeout=30), "a prompt that nobody needs any more is given up"
    assert num_calls(prefill, decode) == [1, 1]


def test_the_leg_of_a_prefill_engine_ends_with_its_prompt(
    router: Live, prefill: StandIn, decode: StandIn
) -> None:
    """It is no load of that engine any more while the answer is generated."""
    is_over = threading.Event()

    def held(exchange: Exchange) -> None:
        assert is_over.wait(30)
        answer(exchange)

    decode.scripts.append(held)
    with ThreadPoolExecutor(1) as clients:
        response = clients.submit(router.complete)
        wait_until(lambda: num_calls(decode) == [1])
        wait_until(lambda: not router.peers.of(Role.PREFILL)[0].num_open)
        is_over.set()
        assert text_of(response.result()) == "Hello!"


def test_who_offers_late_is_understood(router: Live, prefill: StandIn, decode: StandIn) -> None:
    """An engine without the setting answers when it has computed the prompt."""
    prefill.scripts.append(prefilled)
    assert text_of(router.complete()) == "Hello!"
    assert decode.calls[0]["kv_transfer_params"]["remote_engine_id"] == "p"


def test_a_refusal_is_passed_on(router: Live, prefill: StandIn, decode: StandIn) -> None:
    prefill.scripts.append(refusal(400))
    assert router.complete().status_code == 400
    assert num_calls(decode) == [0]


def test_decode_computes_what_no_prefill_engine_begins(
    router: Live, prefill: StandIn, decode: StandIn
) -> None:
    prefill.scripts.append(reset)
    assert text_of(router.complete()) == "Hello!"
    assert "kv_transfer_params" not in decode.calls[0]
    assert router.count("fallbacks_total") == 1


def test_what_breaks_off_is_asked_again_in_the_plain_way(
    router: Live, prefill: StandIn, decode: StandIn
) -> None:
    """The decode engine misses the rest and says so."""
    prefill.scripts += [broken_after_the_offer, prefilled]
    decode.scripts.append(refusal(500))
    assert text_of(router.complete()) == "Hello!"
    assert prefill.calls[1]["stream"] is False
    assert "early_offer" not in prefill.calls[1]["kv_transfer_params"]
    assert router.count("repeated_prefills_total") == 1
