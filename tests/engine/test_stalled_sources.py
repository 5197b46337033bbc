"""Sources that stand still, are named wrongly, or are not used any more."""

import threading
import time

import pytest

from dcpjax.engine import kv_peer
from dcpjax.transfer.backend import InProcessBackend, TransferState
from tests.engine.pair import (
    MODULES,
    PATIENCE,
    ask_prefill,
    hand_over,
    node,
    skip_without,
    transfer,
)
from tests.engine.test_handoff import PROMPTS, expected, prefill

__all__ = ["expected", "prefill"]  # fixtures


class StalledTransfer:
    """Moves, as far as anybody can tell, until the test says otherwise."""

    def __init__(self) -> None:
        self.state = TransferState.MOVING
        self.is_under_way = threading.Event()

    def poll(self) -> TransferState:
        self.is_under_way.set()
        return self.state

    def release(self) -> None:
        assert self.state is not TransferState.MOVING


@pytest.fixture
def stalled(monkeypatch) -> tuple[StalledTransfer, set[str]]:
    """A transfer, and the ids of the engines from which every transfer is this one."""
    stalled, engine_ids = StalledTransfer(), set[str]()
    submit = InProcessBackend.submit

    def submit_or_stall(self, bound, peer):
        is_stalled = peer.rpartition("/")[0] in engine_ids
        return stalled if is_stalled else submit(self, bound, peer)

    monkeypatch.setattr(InProcessBackend, "submit", submit_or_stall)
    return stalled, engine_ids


def test_pages_of_a_stalled_transfer_are_held_until_it_is_over(tiny, expected, stalled):
    """Though its request went on long ago."""
    transfers, engine_ids = stalled
    settings = transfer("kv_consumer", transfer_timeout=0.2, kv_load_failure_policy="recompute")
    with node(tiny, **transfer("kv_producer")) as prefill, node(tiny, **settings) as decode:
        engine_ids.add(ask_prefill(prefill, PROMPTS[1])["remote_engine_id"])
        assert hand_over(prefill, decode, PROMPTS[50], max_tokens=12).tokens == expected[50]
        decode.step()
        assert decode.engine.stats()["kv_cache_usage"] > 0 == decode.engine.scheduler.has_work
        assert decode.engine.stats()["kv_transfer"]["num_quarantined_pages"] == 7
        transfers.state = TransferState.DONE
        deadline = time.monotonic() + PATIENCE
        while decode.engine.stats()["kv_cache_usage"]:
            assert time.monotonic() < deadline, "pages are held for ever"
            decode.step()
        assert not decode.engine.stats()["kv_transfer"]["num_quarantined_pages"]


@pytest.mark.parametrize("connector", MODULES)
def test_an_engine_that_is_not_used_is_forgotten_and_met_anew(
    connector, tiny, expected, monkeypatch
):
    skip_without(connector)
    monkeypatch.setattr(kv_peer, "_IDLE_SECONDS", 0.5)
    with (
        node(tiny, **transfer("kv_producer", connector)) as prefill,
        node(tiny, **transfer("kv_consumer", connector)) as decode,
    ):
        for _ in range(2):
            decode.engine.reset_prefix_cache()
            assert hand_over(prefill, decode, PROMPTS[50], max_tokens=12).tokens == expected[50]
            engine_id = ask_prefill(prefill, PROMPTS[1])["remote_engine_id"]
            assert threads_for(engine_id)
            deadline = time.monotonic() + PATIENCE
            while threads_for(engine_id):
                assert time.monotonic() < deadline, "a source is never forgotten"
                time.sleep(0.05)
        assert not decode.engine.stats()["kv_transfer"]["num_failed"]


def threads_for(engine_id: str) -> list[str]:
    """Of a target, for one source."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(f"dcpjax-kv-{engine_id[:8]}")]
