"""A transfer with an engine of several processes is the transfer, cut by who has the memory."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpjax.errors import PeerError, TransferError
from dcpjax.layout import KVPlacement
from dcpjax.transfer import agents
from dcpjax.transfer.agents import JointTransfer, split_by_agent
from dcpjax.transfer.backend import (
    FinalTransfer,
    InProcessBackend,
    InProcessFabric,
    TransferState,
)
from dcpjax.transfer.bind import bind
from dcpjax.transfer.blocks import BoundTransfer
from dcpjax.transfer.engine_info import EngineInfo
from dcpjax.transfer.memory import SequenceMemory
from dcpjax.transfer.parts import join
from dcpjax.transfer.plan import plan_transfer
from tests.transfer.simulated import BASE, SimulatedEngine, move, placement_pairs, token_ranges
from tests.transfer.test_handshake import engine, part

MOVING, DONE, FAILED = TransferState.MOVING, TransferState.DONE, TransferState.FAILED


def spread(memory: SequenceMemory, agent_of: Sequence[int]) -> SequenceMemory:
    """The memory with each rank's region at this agent."""
    ranks = zip(memory.ranks, agent_of, strict=True)
    placed = tuple(dataclasses.replace(rank, agent=agent) for rank, agent in ranks)
    return dataclasses.replace(memory, ranks=placed)


def engines(source: KVPlacement, target: KVPlacement, tokens: range, seed: int):
    rng = np.random.default_rng(seed)
    sides = [SimulatedEngine.build(place, tokens.stop, rng) for place in (source, target)]
    sides[0].fill(tokens.stop)
    return sides


def bound_between(source: SimulatedEngine, target: SimulatedEngine, tokens: range) -> BoundTransfer:
    plan = plan_transfer(
        source.memory.placement,
        target.memory.placement,
        num_tokens=tokens.stop,
        first_token=tokens.start,
    )
    return bind(plan, source.memory, target.memory)


# How a transfer is cut


@given(data=st.data(), of_source=st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_union_of_the_parts_is_the_transfer(data: st.DataObject, of_source: bool):
    """Whoever has which rank; joined cache parts are cut as one transfer."""
    places = data.draw(placement_pairs())
    tokens = data.draw(token_ranges(*places))
    sides = engines(*places, tokens, data.draw(st.integers(0, 2**16)))
    for side in sides:
        count = side.memory.placement.num_ranks
        agent_of = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        side.memory = spread(side.memory, agent_of)
    single = bound_between(*sides, tokens)
    whole = data.draw(st.sampled_from([single, join([single, single])]))
    parts = split_by_agent(whole, of_source=of_source)
    assert sum(one.num_bytes for one in parts.values()) == whole.num_bytes
    found = [path for one in parts.values() for path in one.paths]
    assert len(found) == len(whole.paths) and {*map(id, found)} == {*map(id, whole.paths)}
    for agent, one in parts.items():
        assert one.paths, "nobody is asked for nothing"
        ranks = one.source_ranks if of_source else one.target_ranks
        used = {path.source_rank if of_source else path.target_rank for path in one.paths}
        assert {ranks[rank].agent for rank in used} == {agent}


@pytest.mark.parametrize("lost", [None, 0, 1, 2])
def test_all_parts_bring_all_bytes_and_each_is_needed(lost: int | None):
    layers = {"layers": 7, "kv_heads": 1, "page_size": 4}
    tokens = range(3, 41)
    source, target = engines(
        KVPlacement.layer_split(6, **layers),
        KVPlacement.decode(2, 2, interleave=4, **layers),
        tokens,
        seed=1,
    )
    source.memory = spread(source.memory, [0, 0, 1, 1, 2, 2])
    expected, _ = target.expected(tokens)
    parts = split_by_agent(bound_between(source, target, tokens), of_source=True)
    assert sorted(parts) == [0, 1, 2]
    for agent, one in parts.items():
        if agent != lost:
            move(one, source, target)
    assert np.array_equal(target.data, expected) == (lost is None)


def test_a_transfer_of_nothing_has_no_parts():
    layers = {"layers": 2, "kv_heads": 1, "page_size": 4}
    place = KVPlacement.tensor_parallel(1, **layers)
    sides = engines(place, place, range(5, 5), seed=2)
    assert split_by_agent(bound_between(*sides, range(5, 5)), of_source=True) == {}


# What becomes of the whole


@dataclasses.dataclass
class Handle:
    """A transfer whose state a test sets."""

    state: TransferState = MOVING
    is_released: bool = False

    def poll(self) -> TransferState:
        return self.state

    def release(self) -> None:
        assert self.state is not MOVING
        self.is_released = True


@pytest.mark.parametrize(
    ("states", "whole"),
    [
        ((), DONE),
        ((DONE,), DONE),
        ((DONE, DONE), DONE),
        ((DONE, MOVING), MOVING),
        ((FAILED, MOVING), MOVING),  # it may still write into pages of this engine
        ((MOVING, FAILED, DONE), MOVING),
        ((DONE, FAILED), FAILED),
        ((FAILED, DONE, DONE), FAILED),
    ],
)
def test_a_transfer_is_over_when_all_its_parts_are(
    states: tuple[TransferState, ...], whole: TransferState
):
    handles = [Handle(state) for state in states]
    joint = JointTransfer(handles)
    assert joint.poll() is whole
    if whole is MOVING:
        with pytest.raises(TransferError, match="nothing moves any more"):
            joint.release()
    else:
        joint.release()
    assert all(handle.is_released == (whole is not MOVING) for handle in handles)


class Peer:
    """An engine in this process whose ranks are with several agents, and one that reads of it."""

    def __init__(self, num_agents: int, ranks_of_agent: int = 1) -> None:
        shape = {"layers": 4, "kv_heads": 1, "page_size": 4}
        self.tokens = range(30)
        self.source, self.target = engines(
            KVPlacement.layer_split(num_agents * ranks_of_agent, **shape),
            KVPlacement.decode(2, 2, interleave=4, **shape),
            self.tokens,
            seed=3,
        )
        self.expected, _ = self.target.expected(self.tokens)
        num_ranks = num_agents * ranks_of_agent
        self.source.memory = spread(
            located(self.source), [rank // ranks_of_agent for rank in range(num_ranks)]
        )
        self.target.memory = located(self.target)
        fabric = InProcessFabric()
        self.backends = [InProcessBackend(fabric, f"process {n}") for n in range(num_agents)]
        for number, backend in enumerate(self.backends):
            ranks = self.source.memory.ranks
            backend.register([rank for rank in ranks if rank.agent == number])
        self.reader = InProcessBackend(fabric, "reader")
        self.reader.register(self.target.memory.ranks)
        placement = self.source.memory.placement
        self.info: EngineInfo = engine(
            placement,
            agents=tuple(backend.agent for backend in self.backends),
            parts=(part(placement, regions=self.source.memory.ranks, token_bytes=4),),
        )

    def bound(self) -> BoundTransfer:
        return bound_between(self.source, self.target, self.tokens)


def located(side: SimulatedEngine) -> SequenceMemory:
    """With the addresses of the bytes in this process."""
    start = side.data.ctypes.data - BASE
    ranks = tuple(
        dataclasses.replace(rank, address=rank.address + start) for rank in side.memory.ranks
    )
    return dataclasses.replace(side.memory, ranks=ranks)


@pytest.mark.parametrize(("num_agents", "ranks_of_agent"), [(1, 4), (2, 1), (2, 2), (4, 1)])
def test_bytes_of_all_agents_arrive(num_agents: int, ranks_of_agent: int):
    peer = Peer(num_agents, ranks_of_agent)
    agents.connect(peer.reader, peer.info)
    agents.connect(peer.reader, peer.info)
    handle = agents.submit(peer.reader, peer.bound(), peer.info)
    assert handle.poll() is DONE
    handle.release()
    assert np.array_equal(peer.target.data, peer.expected)
    for _ in range(2):
        agents.disconnect(peer.reader, peer.info)
    with pytest.raises(PeerError, match="connected first"):
        agents.submit(peer.reader, peer.bound(), peer.info)


def test_one_agent_that_is_gone_fails_the_whole():
    peer = Peer(3)
    agents.connect(peer.reader, peer.info)
    peer.backends[1].close()
    handle = agents.submit(peer.reader, peer.bound(), peer.info)
    assert handle.poll() is FAILED
    assert not np.array_equal(peer.target.data, peer.expected)


def test_what_has_begun_goes_on_when_a_later_part_is_refused(caplog: pytest.LogCaptureFixture):
    """So it is not over before that has ended; if nothing has begun, the transfer is refused."""
    peer = Peer(3)
    agents.connect(peer.reader, peer.info)
    first, submit = Handle(), peer.reader.submit

    def submitting(bound: BoundTransfer, name: str) -> Handle | FinalTransfer:
        return first if name == peer.info.agent_name(0) else submit(bound, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer.reader, "submit", submitting)
        peer.reader.disconnect(peer.info.agent_name(1))
        handle = agents.submit(peer.reader, peer.bound(), peer.info)
    assert "connected first" in caplog.text
    assert handle.poll() is MOVING
    first.state = DONE
    assert handle.poll() is FAILED
    peer.reader.disconnect(peer.info.agent_name(0))
    with pytest.raises(PeerError, match="connected first"):
        agents.submit(peer.reader, peer.bound(), peer.info)
