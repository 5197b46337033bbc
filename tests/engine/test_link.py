"""Ends of links in one process: who is heard, who is told of a failure, and when nobody is."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from dcpjax.config import DistributedConfig, EngineConfig, SpeculativeConfig
from dcpjax.engine import joining
from dcpjax.engine.joining import facts_of, join
from dcpjax.engine.link import Link
from dcpjax.engine.link_messages import Close, Confirm, Hello, Refused, RowOf
from dcpjax.engine.link_reduction import LinkReduction, gather_bytes
from dcpjax.errors import ConfigError, EngineDeadError
from dcpjax.models.checkpoint import Checkpoint
from tests.engine.processes import PATIENCE, free_port

RANKS = 3
Links = list[Link]


@pytest.fixture
def config() -> DistributedConfig:
    return DistributedConfig(nnodes=RANKS, master_port=free_port())


@pytest.fixture
def links(config: DistributedConfig) -> Iterator[Links]:
    """A leader and its followers, which have found each other."""
    configs = [config_of(config, rank) for rank in range(RANKS)]
    ends = [Link(one) for one in configs]
    with ThreadPoolExecutor(RANKS) as executor:
        found = executor.map(join, ends, configs, [{"a": "1"}] * RANKS)
        assert len(set(found)) == 1
    yield ends
    for end in reversed(ends):
        end.close()


def config_of(config: DistributedConfig, rank: int) -> DistributedConfig:
    return DistributedConfig(config.nnodes, rank, config.master_addr, config.master_port)


def test_the_leader_tells_all_and_knows_who_answers(links: Links):
    leader, *followers = links
    leader.send(Confirm())
    assert all(end.receive(PATIENCE) == (0, Confirm()) for end in followers)
    for rank, end in enumerate(followers, start=1):
        end.send(RowOf(bytes([rank])))
    assert sorted(leader.receive(PATIENCE) for _ in followers) == [
        (1, RowOf(b"\1")),
        (2, RowOf(b"\2")),
    ]


def check_ended(end: Link, rank: int, reason: str) -> None:
    with pytest.raises(EngineDeadError, match=f"node rank {rank}") as caught:
        end.wait_for_failure(PATIENCE)
    assert reason in str(caught.value)


@pytest.mark.parametrize("failing", range(RANKS))
def test_all_hear_of_a_failure(links: Links, failing: int):
    heard: list[int] = []
    for rank, end in enumerate(links):
        end.on_failure(lambda rank=rank: heard.append(rank))
    links[failing].fail("as the test wants it")
    for end in links:
        check_ended(end, failing, "as the test wants it")
    assert sorted(heard) == list(range(RANKS))


@pytest.mark.parametrize("failing", [1, 2])
def test_the_leader_knows_of_a_failure_when_its_follower_goes_on(links: Links, failing: int):
    """So nobody relies any more on what the follower then gives up."""
    links[failing].fail("as the test wants it")
    with pytest.raises(EngineDeadError, match=f"node rank {failing}"):
        links[0].check()


def test_a_follower_does_not_wait_for_a_leader_that_is_gone(links: Links):
    links[0].close()
    check_ended(links[1], 0, "gone")
    links[1].fail("later")
    check_ended(links[1], 0, "gone")


@pytest.mark.parametrize("leaving", range(RANKS))
def test_all_others_hear_of_one_that_is_gone(links: Links, leaving: int):
    links[leaving].close()
    for end in links[:leaving] + links[leaving + 1 :]:
        check_ended(end, leaving, "gone")


def test_a_leader_that_said_so_may_leave(links: Links):
    leader, *followers = links
    leader.send(Close())
    leader.close()
    assert all(end.receive(PATIENCE) == (0, Close()) for end in followers)
    for end in followers:
        end.wait_for_failure(0.2)


@pytest.mark.parametrize(
    "found", [[b"", b"", b""], [b"1", b"", b"12345678"], [b"\0" * 9, b"2" * 100_000, b"\xff"]]
)
def test_bytes_of_all_processes(links: Links, found: list[bytes]):
    reductions = [LinkReduction(end, PATIENCE) for end in links]
    with ThreadPoolExecutor(RANKS) as executor:
        gathered = list(executor.map(gather_bytes, reductions, found))
    assert gathered == [found] * RANKS


def test_a_silent_link_times_out(links: Links):
    with pytest.raises(TimeoutError):
        links[0].receive(0.01)


def test_strangers_change_nothing(links: Links, config: DistributedConfig):
    leader, follower, _ = links
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://127.0.0.1:{config.master_port}")
        for frame in (b"GET / HTTP/1.1", b"\x81"):
            stranger.send(frame)
        late = Link(config_of(config, 1))
        with pytest.raises(ConfigError, match="all of this one are there"):
            join(late, config_of(config, 1), {"a": "1"})
        late.close()
    follower.send(RowOf(b"1"))
    assert leader.receive(PATIENCE) == (1, RowOf(b"1"))
    leader.check()


def test_a_port_that_is_taken_is_refused(links: Links, config: DistributedConfig):
    """As by a follower that was started with the leader's node rank."""
    with pytest.raises(ConfigError, match="a second one with node_rank 0") as caught:
        Link(config)
    assert caught.value.values["master_port"] == config.master_port
    assert caught.value.values["reason"] == "Address already in use"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("unknown", ["nohost.invalid", "256.1.1.1", "a" * 64 + ".invalid"])
def test_an_address_that_is_unknown_is_refused(config: DistributedConfig, rank: int, unknown: str):
    with pytest.raises(ConfigError, match="master_addr is an IP address or the name") as caught:
        Link(config_of(dataclasses.replace(config, master_addr=unknown), rank))
    assert caught.value.values["master_addr"] == unknown


def test_a_leader_listens_at_an_address_of_its_own(config: DistributedConfig):
    elsewhere = "192.0.2.1"  # an example that no host has
    with pytest.raises(ConfigError, match="of the host of the process with node_rank 0"):
        Link(dataclasses.replace(config, master_addr=elsewhere))


# How they find each other


def test_progress_says_what_is_waited_for(config: DistributedConfig):
    ends = [(Link(one), one) for one in (config_of(config, rank) for rank in range(RANKS))]
    heard: list[tuple[str, int, int]] = []
    with ThreadPoolExecutor(RANKS) as executor:
        leading = executor.submit(join, *ends[0], {}, lambda *event: heard.append(event))
        others = [executor.submit(join, *end, {}) for end in ends[1:]]
        assert {other.result(PATIENCE) for other in others} == {leading.result(PATIENCE)}
    what = f"wait for 3 processes at 127.0.0.1:{config.master_port}, up to 600 s"
    assert heard == [(what, came, RANKS) for came in (1, 2, 3)]
    for end, _ in reversed(ends):
        end.close()


def test_those_that_come_hear_that_others_do_not(
    config: DistributedConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(joining, "JOIN_SECONDS", 1.0)
    leader, follower = Link(config), Link(config_of(config, 2))
    follower.send(Hello(2, {}))
    with pytest.raises(ConfigError, match="all 3 processes of an engine come within 1 s") as caught:
        join(leader, config, {})
    address = f"127.0.0.1:{config.master_port}"
    assert caught.value.values == {"address": address, "came": "[0, 2]"}
    _, told = follower.receive_from(PATIENCE)
    assert told == Refused(caught.value.rule, caught.value.values)
    leader.close()
    follower.close()


def test_a_follower_without_a_leader_does_not_wait_for_ever(
    config: DistributedConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(joining, "JOIN_SECONDS", 0.1)
    config = config_of(config, 1)
    follower, heard = Link(config), []
    with pytest.raises(ConfigError, match="node rank 0 answers within 0 s") as caught:
        join(follower, config, {}, lambda *event: heard.append(event))
    address = f"127.0.0.1:{config.master_port}"
    assert caught.value.values == {"address": address, "nnodes": RANKS}
    assert heard == [(f"wait for 3 processes at {address}, up to 0 s", 1, RANKS)]
    follower.close()


def test_settings_that_differ_are_shown_as_users_write_them(tiny: Checkpoint):
    ngram = SpeculativeConfig("ngram", 3)
    facts = [
        facts_of(EngineConfig("m", seed=seed, speculative_config=speculation), tiny)
        for seed, speculation in ((0, ngram), (1, None))
    ]
    config = DistributedConfig(nnodes=2, master_port=free_port())
    leader, follower = (Link(config_of(config, rank)) for rank in range(2))
    follower.send(Hello(1, facts[1]))
    with pytest.raises(ConfigError) as caught:
        join(leader, config, facts[0])
    assert str(caught.value).endswith(
        "code and JAX; seed is 0 on node 0, 1 on node 1; speculative_config is "
        '{"method": "ngram", "num_speculative_tokens": 3} on node 0, not set on node 1'
    )
    leader.close()
    follower.close()


def test_names_are_what_followers_say(config: DistributedConfig):
    leader, follower = Link(config), Link(config_of(config, 2))
    follower.send(Hello(2, {}))
    identity, message = leader.receive_from(PATIENCE)
    assert message == Hello(2, {})
    leader.name(identity, 2)
    follower.send(Confirm())
    assert leader.receive(PATIENCE) == (2, Confirm())
    leader.close()
    follower.close()
