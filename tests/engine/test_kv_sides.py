"""Sources and targets without engines: what one that hangs costs, and what ends when."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dcpjax.config import KVTransferConfig
from dcpjax.engine import kv_peer, kv_writers
from dcpjax.engine.kv_local import LocalKV
from dcpjax.engine.kv_source import KVSource
from dcpjax.engine.kv_target import KVTarget, LoadEnd
from dcpjax.engine.remote_kv import KVExport, KVLoad, RemoteKV
from dcpjax.errors import EngineDeadError, PeerError, TransferError
from dcpjax.layout import KVPlacement
from dcpjax.transfer.backend import InProcessBackend, InProcessFabric, TransferHandle, TransferState
from dcpjax.transfer.engine_info import EngineInfo
from dcpjax.transfer.frames import pack_page_ids
from dcpjax.transfer.handshake import hello
from dcpjax.transfer.memory import RankMemory
from dcpjax.transfer.messages import Abort, Aborted, Claim, Heartbeat, Landed, Push
from dcpjax.transfer.part_info import PartInfo

PAGES, LAYERS, HEADS, PAGE, TOKEN = 8, 2, 2, 4, 16
PATIENCE = 20.0


class Hanging:
    """A transfer that moves until it is let go."""

    def __init__(self) -> None:
        self.state = TransferState.MOVING

    def poll(self) -> TransferState:
        return self.state

    def release(self) -> None:
        assert self.state is not TransferState.MOVING


class Backend(InProcessBackend):
    """Transfers with the engines or agents in ``stopped`` hang."""

    def __init__(self, fabric: InProcessFabric, engine_id: str, *, pulls: bool) -> None:
        super().__init__(fabric, engine_id, pulls=pulls)
        self.stopped: set[str] = set()
        self.hanging: list[Hanging] = []

    def submit(self, bound, peer: str) -> TransferHandle:
        if not self.stopped & {peer, peer.rpartition("/")[0]}:
            return super().submit(bound, peer)
        self.hanging.append(Hanging())
        return self.hanging[-1]

    def disconnect(self, peer: str) -> None:
        if any(handle.state is TransferState.MOVING for handle in self.hanging):
            raise TransferError("a peer is forgotten when nothing moves any more", peer=peer)
        super().disconnect(peer)

    def close(self) -> None:
        super().close()
        for handle in self.hanging:
            handle.state = TransferState.FAILED


def cache_part(name: str, memory: np.ndarray, layers: tuple[int, ...]) -> PartInfo:
    """Of one rank, whose pages are ``memory``."""
    _, num_layers, num_heads, page_size, _ = memory.shape
    shape = {"layers": num_layers, "kv_heads": num_heads, "page_size": page_size}
    return placed_part(name, [memory], layers, KVPlacement.tensor_parallel(1, **shape))


def placed_part(
    name: str, ranks: Sequence[np.ndarray], layers: tuple[int, ...], placement: KVPlacement
) -> PartInfo:
    """Of ranks with these pages, each at an agent of its own."""
    _, num_layers, num_heads, page_size, token_bytes = ranks[0].shape
    regions = [
        RankMemory.dense(
            memory.ctypes.data,
            num_pages=PAGES,
            num_layers=num_layers,
            num_heads=num_heads,
            page_size=page_size,
            token_bytes=token_bytes,
        )
        for memory in ranks
    ]
    return PartInfo(
        name=name,
        layers=layers,
        cache_format="bytes",
        cache_dtype="uint8",
        placement=placement,
        regions=tuple(replace(region, agent=rank) for rank, region in enumerate(regions)),
        token_bytes=token_bytes,
    )


class Side:
    """The memory of one engine: of its model's layers, and perhaps of a draft layer."""

    def __init__(
        self,
        fabric: InProcessFabric,
        name: str,
        *,
        pulls: bool,
        timeout: float = 0.2,
        has_drafts: bool = False,
    ) -> None:
        self.memory = np.zeros((PAGES, LAYERS, HEADS, PAGE, TOKEN), np.uint8)
        self.drafts = np.zeros((PAGES, 1, 1, PAGE, TOKEN), np.uint8)
        parts = (
            cache_part("kv", self.memory, tuple(range(LAYERS))),
            cache_part("draft_kv", self.drafts, (LAYERS,)),
        )[: 1 + has_drafts]
        self.backend = Backend(fabric, name, pulls=pulls)
        self.backend.register([region for part in parts for region in part.regions])
        info = described(name, parts, [self.backend])
        self.local = LocalKV(info, self.backend, timeout=timeout)


class TwoProcesses:
    """The memory of an engine whose layers are on two ranks, each in a process of its own."""

    def __init__(self, fabric: InProcessFabric, name: str) -> None:
        shape = {"layers": LAYERS, "kv_heads": HEADS, "page_size": PAGE}
        self.memory = [
            np.full((PAGES, LAYERS // 2, HEADS, PAGE, TOKEN), 7, np.uint8) for _ in range(2)
        ]
        placement = KVPlacement.layer_split(2, **shape)
        kv = placed_part("kv", self.memory, tuple(range(LAYERS)), placement)
        self.backends = [Backend(fabric, f"{name} {rank}", pulls=True) for rank in range(2)]
        for backend, region in zip(self.backends, kv.regions, strict=True):
            backend.register([region])
        self.local = LocalKV(described(name, (kv,), self.backends), self.backends[0], timeout=0.2)


def described(
    name: str, parts: tuple[PartInfo, ...], backends: Sequence[InProcessBackend]
) -> EngineInfo:
    """An engine with an agent per rank."""
    return EngineInfo(
        engine_id=name,
        factors={},
        parts=parts,
        tp_size=len(backends),
        dcp_size=1,
        interleave=PAGE,
        backend=backends[0].name,
        agents=tuple(backend.agent for backend in backends),
        kv_lease_duration=30.0,
        kv_lease_extension=20.0,
        heartbeat_interval=0.1,
    )


@contextlib.contextmanager
def source(
    side: Side | TwoProcesses, check_alive: Callable[[], None] = lambda: None, **settings: Any
) -> Iterator[tuple[KVSource, list[str]]]:
    ended: list[str] = []
    config = KVTransferConfig(kv_role="kv_producer", **settings)
    source = KVSource(side.local, config, ended.append, check_alive)
    try:
        yield source, ended
    finally:
        source.close()


@contextlib.contextmanager
def target(side: Side) -> Iterator[tuple[KVTarget, list[LoadEnd]]]:
    ends: list[LoadEnd] = []
    config = KVTransferConfig(kv_role="kv_consumer", heartbeat_interval=0.1)
    target = KVTarget(side.local, config, ends.append, lambda request_id: None)
    try:
        yield target, ends
    finally:
        target.close()
        side.local.close()


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def offer(source: KVSource, name: str) -> RemoteKV:
    params = source.export(KVExport(name, (3, 1), 2 * PAGE, "digest"))
    return RemoteKV(
        params["remote_engine_id"],
        name,
        params["remote_host"],
        params["remote_port"],
        (3, 1),
        2 * PAGE,
        "digest",
    )


def load(remote: RemoteKV, name: str, pages=(0, 2)) -> KVLoad:
    return KVLoad(name, remote, pages, 0, 2 * PAGE - 1)


def push(target: Side, source: Side, name: str) -> Push:
    return Push(
        engine_id=source.local.info.engine_id,
        request_id=name,
        target_engine_id=target.local.info.engine_id,
        first_token=0,
        num_tokens=2 * PAGE,
        page_ids=pack_page_ids((0, 2)),
    )


def greet(source_part: KVSource, source: Side, target: Side) -> None:
    greeting = hello(target.local.info, engine_id=source.local.info.engine_id)
    source_part.hello(greeting).result(PATIENCE)


def test_a_source_that_hangs_costs_its_own_loads_only():
    """All of them end soon, its pages are settled when its transfers are, and others go on."""
    fabric = InProcessFabric()
    sides = [Side(fabric, name, pulls=True) for name in ("slow", "good", "target")]
    sides[2].backend.stopped.add("slow")
    with source(sides[0]) as (slow, _), source(sides[1]) as (good, _):
        with target(sides[2]) as (loads, ends):
            for number in range(8):
                loads.start(load(offer(slow, f"slow {number}"), f"slow {number}"))
            loads.start(load(offer(good, "good"), "good", (4, 5)))
            until(lambda: len({end.load.request_id for end in ends}) == 9)
            failed = {end.load.request_id for end in ends if end.reason is not None}
            assert failed == {f"slow {number}" for number in range(8)}
            unsettled = {end.load.request_id for end in ends if not end.is_settled}
            assert 1 <= len(unsettled) <= 2 == len(sides[2].backend.hanging)
            for handle in sides[2].backend.hanging:
                handle.state = TransferState.FAILED
            until(lambda: sum(end.is_settled for end in ends) == 9)
            sides[2].backend.stopped.clear()
            until(lambda: not any("settle" in t.name for t in threading.enumerate()))
            loads.start(load(offer(slow, "later"), "later"))
            until(lambda: ends[-1].load.request_id == "later")
            assert ends[-1].reason is None


@pytest.mark.parametrize("pulls", [True, False])
@pytest.mark.parametrize("has_drafts", [True, False])
def test_a_load_brings_every_part_that_the_target_has(pulls, has_drafts):
    fabric = InProcessFabric()
    sides = [
        Side(fabric, "source", pulls=pulls, has_drafts=True),
        Side(fabric, "target", pulls=pulls, has_drafts=has_drafts),
    ]
    sides[0].memory[:], sides[0].drafts[:] = 7, 9
    with source(sides[0]) as (exports, _), target(sides[1]) as (loads, ends):
        loads.start(load(offer(exports, "a"), "a"))
        until(lambda: ends)
        assert ends[0].reason is None
        mover = sides[1 if pulls else 0].local
        assert mover.stats.num_transfers == 1, "the parts are moved as one"
        num_bytes = (2 * PAGE - 1) * TOKEN
        parts = {"kv": LAYERS * HEADS * num_bytes, "draft_kv": num_bytes}
        assert mover.last_transfer is not None
        assert mover.last_transfer["parts"] == dict(list(parts.items())[: 1 + has_drafts])
    for memory, value, is_there in ((sides[1].memory, 7, True), (sides[1].drafts, 9, has_drafts)):
        expected = np.zeros_like(memory)
        if is_there:
            expected[[0, 2]] = value
            expected[2, :, :, -1] = 0  # the last token is computed
        np.testing.assert_array_equal(memory, expected)


@pytest.mark.parametrize("pulls", [True, False])
def test_a_target_with_drafts_takes_nothing_from_a_source_without(pulls):
    fabric = InProcessFabric()
    sides = [
        Side(fabric, name, pulls=pulls, has_drafts=name == "target")
        for name in ("source", "target")
    ]
    sides[0].memory[:] = 7
    with source(sides[0]) as (exports, _), target(sides[1]) as (loads, ends):
        loads.start(load(offer(exports, "a"), "a"))
        until(lambda: ends)
        assert ends[0].is_settled and ends[0].reason is not None
        assert "consumer='draft_kv, kv', producer='kv'" in ends[0].reason
    assert not sides[1].memory.any()


def check_arrived(target: Side) -> None:
    expected = np.zeros_like(target.memory)
    expected[[0, 2]] = 7
    expected[2, :, :, -1] = 0  # the last token is computed
    np.testing.assert_array_equal(target.memory, expected)


def test_a_load_reads_from_every_process_of_its_source():
    fabric = InProcessFabric()
    producer, consumer = TwoProcesses(fabric, "source"), Side(fabric, "target", pulls=True)
    with source(producer) as (exports, ended), target(consumer) as (loads, ends):
        loads.start(load(offer(exports, "a"), "a"))
        until(lambda: ends)
        assert ends[0].reason is None and ended == ["a"]
        check_arrived(consumer)
        assert consumer.local.last_transfer is not None
        assert consumer.local.last_transfer["bytes"] == [[HEADS * (2 * PAGE - 1) * TOKEN]] * 2


@pytest.mark.parametrize("hanging", [0, 1])
@pytest.mark.parametrize("state", [TransferState.DONE, TransferState.FAILED])
def test_a_process_that_hangs_keeps_the_pages_of_a_load(hanging: int, state: TransferState):
    """Whatever the other one has brought, the load has failed."""
    fabric = InProcessFabric()
    producer, consumer = TwoProcesses(fabric, "source"), Side(fabric, "target", pulls=True)
    consumer.backend.stopped.add(f"source/{hanging}")
    with source(producer) as (exports, ended), target(consumer) as (loads, ends):
        loads.start(load(offer(exports, "a"), "a"))
        until(lambda: ends)
        assert ends[0].reason is not None and not ends[0].is_settled
        time.sleep(5 * consumer.local.timeout)
        assert len(ends) == 1
        consumer.backend.hanging[0].state = state
        until(lambda: len(ends) == 2)
        assert ends[1].is_settled and not exports._local.stats.num_handed_over


@pytest.mark.parametrize("gone", [0, 1])
def test_a_process_that_is_gone_fails_the_load(gone: int):
    fabric = InProcessFabric()
    producer, consumer = TwoProcesses(fabric, "source"), Side(fabric, "target", pulls=True)
    with source(producer) as (exports, ended), target(consumer) as (loads, ends):
        remote = offer(exports, "a")
        loads.start(load(remote, "a"))
        until(lambda: ends)  # both are known
        remote = offer(exports, "b")
        producer.backends[gone].close()
        loads.start(load(remote, "b"))
        until(lambda: len(ends) == 2)
        assert ends[1].reason is not None and ends[1].is_settled
        until(lambda: "b" in ended)  # given up
        assert exports._local.stats.num_handed_over == 1


@pytest.mark.parametrize("is_dead", [True, False])
def test_nothing_is_confirmed_by_an_engine_that_has_ended(is_dead: bool):
    """Its other process may have let go of its memory while it was read."""
    fabric = InProcessFabric()
    producer, consumer = TwoProcesses(fabric, "source"), Side(fabric, "target", pulls=True)

    def check_alive() -> None:
        if is_dead:
            raise EngineDeadError("the engine ended because of its process with node rank 1")

    with source(producer, check_alive) as (exports, ended), target(consumer) as (loads, ends):
        loads.start(load(offer(exports, "a"), "a"))
        until(lambda: ends)
        check_arrived(consumer)
        if is_dead:
            assert ends[0].reason is not None and "node rank 1" in ends[0].reason
        else:
            assert ends[0].reason is None
        assert exports._local.stats.num_handed_over == (not is_dead)


def test_a_target_closes_while_a_transfer_hangs():
    fabric = InProcessFabric()
    sides = [Side(fabric, name, pulls=True, timeout=60.0) for name in ("source", "target")]
    sides[1].backend.stopped.add("source")
    with source(sides[0]) as (exports, _):
        with target(sides[1]) as (loads, _):
            loads.start(load(offer(exports, "a"), "a"))
            until(lambda: sides[1].backend.hanging)
            started = time.monotonic()
        assert time.monotonic() - started < PATIENCE / 2


def test_nothing_is_read_for_an_expired_offer():
    fabric = InProcessFabric()
    sides = [Side(fabric, name, pulls=True) for name in ("source", "target")]
    sides[0].memory[:] = 7
    with source(sides[0]) as (exports, _), target(sides[1]) as (loads, ends):
        remote = offer(exports, "a")
        assert exports.abort(abort(sides[1], "a")) == Aborted()
        loads.start(load(remote, "a"))
        until(lambda: ends)
        assert "holds the pages" in ends[0].reason and not sides[1].memory.any()


def test_a_wrong_address_spoils_no_other_request():
    fabric = InProcessFabric()
    sides = [Side(fabric, name, pulls=True) for name in ("source", "target")]
    with source(sides[0]) as (exports, _), target(sides[1]) as (loads, ends):
        remote = offer(exports, "a")
        loads.expect("b", RemoteKV("source", "a", "127.0.0.1", 9, (3, 1), 2 * PAGE))
        loads.start(load(remote, "a"))
        until(lambda: ends)
        assert ends[0].reason is None


def test_a_source_that_is_not_asked_any_more_is_left(monkeypatch):
    """Prefill engines that restart do not add up to threads and sockets."""
    monkeypatch.setattr(kv_peer, "_IDLE_SECONDS", 0.3)
    fabric = InProcessFabric()
    sides = [Side(fabric, name, pulls=True) for name in ("source", "target")]
    with source(sides[0]) as (exports, _), target(sides[1]) as (loads, ends):
        for name in ("a", "b"):
            loads.expect(name, remote := offer(exports, name))
            time.sleep(0.6)
            assert any(t.name == "dcpjax-kv-heartbeat" for t in threading.enumerate())
            assert loads._sources, "it is expected to send something"
            loads.start(load(remote, name))
            until(lambda name=name: [end.load.request_id for end in ends][-1:] == [name])
            assert ends[-1].reason is None
            until(lambda: not loads._sources)
            until(
                lambda: (
                    not any(t.name.startswith("dcpjax-kv-source") for t in threading.enumerate())
                )
            )


def test_a_target_that_hangs_holds_up_no_other():
    fabric = InProcessFabric()
    sides = [Side(fabric, name, pulls=False) for name in ("source", "slow", "good")]
    sides[0].memory[:] = 7
    sides[0].backend.stopped.add("slow")
    with source(sides[0]) as (exports, _):
        greet(exports, sides[0], sides[1])
        for number in range(6):
            offer(exports, str(number))
            exports.push(push(sides[1], sides[0], str(number)))
        offer(exports, "good")
        greet(exports, sides[0], sides[2])
        exports.push(push(sides[2], sides[0], "good")).result(PATIENCE)
        assert (sides[2].memory[[0, 2]] == 7).all()
        for handle in sides[0].backend.hanging:
            handle.state = TransferState.FAILED
        sides[0].backend.stopped.clear()


def test_a_target_that_asks_no_more_is_forgotten(monkeypatch):
    """Decode engines that restart do not add up to threads."""
    monkeypatch.setattr(kv_writers, "_FORGET_SECONDS", 0.2)
    fabric = InProcessFabric()
    sides = [Side(fabric, name, pulls=False) for name in ("source", "target")]
    with source(sides[0], kv_lease_duration=1.0) as (exports, _):
        for name in ("a", "b"):
            greet(exports, sides[0], sides[1])
            offer(exports, name)
            exports.push(push(sides[1], sides[0], name)).result(PATIENCE)
            until(lambda: not exports._writers._targets)
            until(lambda: not any("kv-push-target" in t.name for t in threading.enumerate()))
        with pytest.raises(PeerError, match="Hello first"):
            exports.push(push(sides[1], sides[0], "b"))


@pytest.mark.parametrize("end", ["answers", "is gone"])
def test_pages_that_a_silent_source_may_write_are_kept_until_it(end, monkeypatch, caplog):
    """However long that takes: a late write would land in pages of somebody else."""
    monkeypatch.setattr(kv_peer, "_CALL_SECONDS", 0.1)
    fabric = InProcessFabric()
    sides = [Side(fabric, name, pulls=False, timeout=0.1) for name in ("source", "target")]
    sides[0].backend.stopped.add("target")
    with source(sides[0]) as (exports, _), target(sides[1]) as (loads, ends):
        remote = offer(exports, "a")
        loads.start(load(remote, "a"))
        until(lambda: ends)
        assert ends[0].reason is not None and not ends[0].is_settled
        until(lambda: "stay out of use" in caplog.text)
        time.sleep(20 * sides[1].local.timeout)  # many silences
        assert len(ends) == 1
        if end == "answers":
            sides[0].backend.hanging[0].state = TransferState.FAILED
        else:
            exports._server.close()
        until(lambda: len(ends) == 2)
        assert ends[1].is_settled


def abort(target: Side, name: str) -> Abort:
    target_id = target.local.info.engine_id
    return Abort(engine_id="source", request_id=name, target_engine_id=target_id)


def test_an_abort_waits_for_what_writes_into_its_target():
    """And for nothing else, and ends nothing that another target wants by now."""
    fabric = InProcessFabric()
    sides = [Side(fabric, name, pulls=False) for name in ("source", "slow", "good")]
    sides[0].backend.stopped.add("slow")
    with source(sides[0]) as (exports, ended):
        offer(exports, "a")
        for side in sides[1:]:
            greet(exports, sides[0], side)
        exports.push(push(sides[1], sides[0], "a"))
        until(lambda: sides[0].backend.hanging)
        exports.push(push(sides[2], sides[0], "a")).result(PATIENCE)
        answer = exports.abort(abort(sides[1], "a"))
        time.sleep(0.1)
        assert not isinstance(answer, Aborted) and not answer.done() and not ended
        sides[0].backend.hanging[0].state = TransferState.FAILED
        assert answer.result(PATIENCE) == Aborted()
        assert not ended, "the other target still has it"
        assert exports.abort(abort(sides[2], "a")) == Aborted()
        until(lambda: ended == ["a"])
        landed = Landed(engine_id="source", request_id="a", target_ranks=(0,), num_target_ranks=1)
        assert not exports.landed(landed).ok


@pytest.mark.parametrize("says", ["Heartbeat", "Claim"])
def test_a_late_abort_takes_nothing_from_another_target(says):
    """A router asks another engine with the same offer when it gets no answer of the first."""
    side = Side(InProcessFabric(), "source", pulls=True)
    first, second = (Side(InProcessFabric(), name, pulls=True) for name in ("first", "second"))
    with source(side) as (exports, ended):
        offer(exports, "a")
        exports.heartbeat(
            Heartbeat(engine_id="source", target_engine_id="first", request_ids=("a",))
        )
        if says == "Heartbeat":
            exports.heartbeat(
                Heartbeat(engine_id="source", target_engine_id="second", request_ids=("a",))
            )
        else:
            exports.claim(
                Claim(
                    engine_id="source",
                    target_engine_id="second",
                    request_id="a",
                    prompt_digest="digest",
                    page_ids=pack_page_ids((3, 1)),
                )
            )
        for _ in range(2):  # messages may come twice
            assert exports.abort(abort(first, "a")) == Aborted()
        assert exports.num_leases == 1 and not ended
        assert exports.abort(abort(second, "a")) == Aborted()
        assert exports.num_leases == 0 and ended == ["a"]


def test_a_source_closes_while_a_target_hangs(monkeypatch):
    """And says that the write has failed only when it is over."""
    monkeypatch.setattr(kv_writers, "_CLOSE_SECONDS", 0.3)
    fabric = InProcessFabric()
    sides = [Side(fabric, name, pulls=False) for name in ("source", "slow")]
    sides[0].backend.stopped.add("slow")
    with source(sides[0]) as (exports, _):
        offer(exports, "a")
        greet(exports, sides[0], sides[1])
        answer = exports.push(push(sides[1], sides[0], "a"))
        until(lambda: sides[0].backend.hanging)
        state_at_end = []
        answer.add_done_callback(lambda _: state_at_end.append(sides[0].backend.hanging[0].state))
        sides[0].local.stop_waiting()  # as an engine does that is a target too
        time.sleep(0.05)
        assert not answer.done()
    assert state_at_end == [TransferState.FAILED]
    with pytest.raises(TransferError, match="transfer of a prompt's KV failed"):
        answer.result()
