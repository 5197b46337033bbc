"""Every backend moves the planned bytes between real engines, and ends well when something ends."""

import importlib
import itertools
import subprocess
import sys
import time

import numpy as np
import pytest

from dcpjax.errors import PeerError, TransferError
from dcpjax.transfer import mooncake, nixl
from dcpjax.transfer.backend import InProcessBackend, InProcessFabric
from tests.transfer.engines import NUM_TOKENS, Elsewhere, Engine, Here, simulated

FINAL_SECONDS = 30
FAR = 1 << 20  # bytes; more than all regions of an engine
SEEDS = itertools.count()
LIBRARIES = {"nixl": nixl, "mooncake": mooncake}
BACKENDS = ["in-process, pulls", "in-process, pushes", "nixl", "mooncake"]
BETWEEN_PROCESSES = ["nixl", "mooncake"]
# NIXL copies within a host without the other process's help, except over TCP.
ENVIRONMENT = {"nixl": {"UCX_TLS": "tcp"}, "mooncake": {}}


class Pair:
    """Two engines; the one that starts transfers knows the other."""

    def __init__(self, backend, **options):
        if backend in LIBRARIES:
            skip_without(backend)
        self.backend, self.options = backend, options
        self.fabric = InProcessFabric()
        self.pulls = backend in ("in-process, pulls", "nixl")
        self.engines = []
        self.starter = self.start_engine("target" if self.pulls else "source")
        self.meet()

    def start_engine(self, side):
        seed = next(SEEDS)
        if self.backend in LIBRARIES:
            engine = Elsewhere(self.backend, side, seed, **self.options)
        else:
            backend = InProcessBackend(self.fabric, f"engine {seed}", pulls=self.pulls)
            engine = Here(Engine(backend, side, seed))
        engine.seed, engine.side = seed, side
        self.engines.append(engine)
        engine.call("register")
        return engine

    def meet(self):
        """Start another engine for the other side."""
        self.other = self.start_engine("source" if self.pulls else "target")
        self.hello = self.other.call("hello")
        self.peer = f"peer {self.other.seed}"
        self.starter.call("connect", self.peer, self.hello["agent"])

    @property
    def target(self):
        return self.starter if self.pulls else self.other

    def submit(self, first=0, stop=NUM_TOKENS, *, hello=None, shift=0):
        hello = hello or self.hello
        return self.starter.call("submit", self.peer, hello, first, stop, shift)

    def move(self, first=0, stop=NUM_TOKENS, **options):
        transfer = self.submit(first, stop, **options)
        state = self.starter.call("wait", transfer, FINAL_SECONDS)
        self.starter.call("release", transfer)
        return state

    def outcome(self, **options):
        """How a transfer ends that may be refused at once."""
        try:
            return self.move(**options)
        except TransferError:
            return "refused"

    def contents(self):
        return np.frombuffer(bytes.fromhex(self.target.call("contents")), np.uint8)

    def expected(self, *ranges):
        engine = simulated("target", self.target.seed, self.options.get("items_per_token", 1))
        for tokens in ranges:
            engine.data, _ = engine.expected(tokens)
        return engine.data

    def end(self):
        for engine in self.engines:
            engine.end()


def skip_without(backend):
    try:
        LIBRARIES[backend].load_library()
    except TransferError as error:
        pytest.skip(str(error))


@pytest.fixture
def make_pair():
    pairs = []

    def make(backend, **options):
        pairs.append(Pair(backend, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.end()


@pytest.fixture(scope="module", params=BACKENDS)
def pair(request):
    """One pair per backend, for tests that leave it as it was."""
    pair = Pair(request.param)
    yield pair
    pair.end()


def test_exactly_the_wanted_bytes_arrive(pair):
    ranges = [range(5, 6), range(9, 40), range(NUM_TOKENS)]
    for number, tokens in enumerate(ranges, 1):
        assert pair.move(tokens.start, tokens.stop) == "done"
        assert np.array_equal(pair.contents(), pair.expected(*ranges[:number]))


def test_a_transfer_of_nothing_is_done(pair):
    before = pair.contents()
    assert pair.move(0, 0) == pair.move(7, 7) == "done"
    assert np.array_equal(pair.contents(), before)


def test_transfers_side_by_side(pair):
    transfers = [pair.submit(start, start + 10) for start in range(0, NUM_TOKENS, 10)]
    states = {pair.starter.call("wait", transfer, FINAL_SECONDS) for transfer in transfers}
    assert states == {"done"}
    assert np.array_equal(pair.contents(), pair.expected(range(NUM_TOKENS)))
    for transfer in transfers:
        pair.starter.call("release", transfer)


def test_a_released_transfer_keeps_its_state(pair):
    transfer = pair.submit()
    pair.starter.call("wait", transfer, FINAL_SECONDS)
    pair.starter.call("release", transfer)
    pair.starter.call("release", transfer)
    assert pair.starter.call("wait", transfer, 0) == "done"


def test_an_unknown_peer_is_refused(pair):
    with pytest.raises(PeerError, match="connected first.*'nobody'"):
        pair.starter.call("submit", "nobody", pair.hello, 0, NUM_TOKENS)
    pair.starter.call("disconnect", "nobody")


def damaged(agent: bytes):
    yield b""
    yield b"\xff\x00 garbage"
    yield agent[:-1]
    yield agent + b"\x00"
    yield bytes(len(agent))
    if len(agent) > 64:  # NIXL's; any bit of it counts
        for place in range(0, len(agent), 37):
            yield agent[:place] + bytes([agent[place] ^ 0x10]) + agent[place + 1 :]


def test_garbage_is_no_agent(pair):
    agent = bytes.fromhex(pair.hello["agent"])
    # A session is text and any port is one: Mooncake finds out when it writes.
    for number, garbage in enumerate(damaged(agent)):
        if pair.backend == "mooncake" and garbage == agent[:-1]:
            continue
        with pytest.raises(PeerError):
            pair.starter.call("connect", f"garbage {number}", garbage.hex())
    assert pair.move() == "done"


def test_an_engine_id_belongs_to_one_process(pair):
    pair.starter.call("connect", pair.peer, pair.hello["agent"])
    with pytest.raises(PeerError, match="one process"):
        pair.starter.call("connect", pair.peer, "00")
    assert pair.move() == "done"


def test_only_registered_memory_moves(pair):
    before = pair.contents()
    with pytest.raises(TransferError, match="only registered memory moves"):
        pair.submit(shift=FAR)
    assert np.array_equal(pair.contents(), before)


def test_only_registered_memory_of_the_peer_moves(pair):
    before = pair.contents()
    hello = {**pair.hello, "ranks": [[rank[0] + FAR, *rank[1:]] for rank in pair.hello["ranks"]]}
    assert pair.outcome(stop=1, hello=hello) in ("failed", "refused")
    assert np.array_equal(pair.contents(), before)
    assert pair.move() == "done"


def test_memory_is_registered_once(pair):
    with pytest.raises(TransferError, match="registered once"):
        pair.starter.call("register")
    assert pair.move() == "done"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forgotten_peer_can_be_met_again(make_pair, backend):
    pair = make_pair(backend)
    pair.move()
    pair.starter.call("disconnect", pair.peer)
    pair.starter.call("disconnect", pair.peer)
    with pytest.raises(PeerError):
        pair.submit()
    pair.starter.call("connect", pair.peer, pair.hello["agent"])
    assert pair.move() == "done"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closed_backend_does_nothing(make_pair, backend):
    pair = make_pair(backend)
    pair.move()
    for name, *arguments in (["close"], ["close"], ["disconnect", pair.peer]):
        pair.starter.call(name, *arguments)
    for name, *arguments in (["register"], ["hello"], ["connect", "another", "00"]):
        with pytest.raises(TransferError):
            pair.starter.call(name, *arguments)
    with pytest.raises(TransferError):
        pair.submit()


@pytest.mark.parametrize("moved_before", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_peer_fails_its_transfers_and_no_others(make_pair, backend, moved_before):
    """Also: an engine that restarts with a new id is served."""
    pair = make_pair(backend)
    if moved_before:
        assert pair.move() == "done"
    pair.other.kill()
    assert {pair.outcome(), pair.outcome()} <= {"failed", "refused"}
    pair.starter.call("disconnect", pair.peer)
    pair.meet()
    assert pair.move() == "done"
    assert np.array_equal(pair.contents(), pair.expected(range(NUM_TOKENS)))


@pytest.mark.parametrize("backend", BETWEEN_PROCESSES)
def test_the_peer_outlives_a_killed_starter(make_pair, backend):
    pair = make_pair(backend)
    pair.move()
    pair.submit()
    pair.starter.kill()
    pair.starter = pair.start_engine(pair.starter.side)
    pair.starter.call("connect", pair.peer, pair.hello["agent"])
    assert pair.move() == "done"
    assert np.array_equal(pair.contents(), pair.expected(range(NUM_TOKENS)))


@pytest.mark.parametrize("backend", BETWEEN_PROCESSES)
def test_a_transfer_ends_with_its_peer(make_pair, backend):
    pair = make_pair(backend, **ENVIRONMENT[backend])
    pair.move()
    pair.other.stop()
    transfer = pair.submit()
    assert pair.starter.call("wait", transfer, 0.2) == "moving"
    pair.other.kill()
    assert pair.starter.call("wait", transfer, FINAL_SECONDS) == "failed"
    pair.starter.call("release", transfer)


@pytest.mark.parametrize("backend", BETWEEN_PROCESSES)
def test_a_moving_transfer_is_not_let_go(make_pair, backend):
    pair = make_pair(backend, **ENVIRONMENT[backend])
    pair.move()
    pair.other.stop()
    transfer = pair.submit()
    for name, argument in (("release", transfer), ("disconnect", pair.peer)):
        with pytest.raises(TransferError, match="when nothing moves any more"):
            pair.starter.call(name, argument)
    pair.other.go_on()
    assert pair.starter.call("wait", transfer, FINAL_SECONDS) == "done"
    pair.starter.call("release", transfer)
    pair.starter.call("disconnect", pair.peer)
    assert np.array_equal(pair.contents(), pair.expected(range(NUM_TOKENS)))


def test_nothing_lands_after_close(make_pair):
    """A peer that stood still goes on and answers the read; nobody is there to take it."""
    pair = make_pair("nixl", items_per_token=1000, **ENVIRONMENT["nixl"])
    pair.move(0, 1)
    pair.other.stop()
    transfer = pair.submit()
    assert pair.starter.call("wait", transfer, 0.2) == "moving"
    pair.starter.call("close")
    assert pair.starter.call("wait", transfer, 0) == "failed"
    before = pair.contents()
    pair.other.go_on()
    time.sleep(0.5)  # it may as well be ended by UCX, see the module
    assert np.array_equal(pair.contents(), before)
    pair.other.kill()


@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_missing_library_says_how_to_install_it(backend, monkeypatch):
    def import_nothing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", import_nothing)
    with pytest.raises(TransferError, match="pip install"):
        LIBRARIES[backend].load_library()


def test_a_plugin_that_does_not_exist_is_named():
    skip_without("nixl")
    with pytest.raises(TransferError, match="PIGEON"):
        nixl.NixlBackend(plugins=["PIGEON"])


def test_a_page_in_the_wrong_place_is_noticed():
    """The comparison above can fail."""
    fabric = InProcessFabric()
    source, target = (
        Engine(InProcessBackend(fabric, side), side, seed)
        for seed, side in enumerate(("source", "target"))
    )
    for engine in (source, target):
        engine.register()
    hello = source.hello()
    hello["page_ids"][:2] = hello["page_ids"][1::-1]
    target.connect("source", hello["agent"])
    assert target.wait(target.submit("source", hello, 0, NUM_TOKENS), 0) == "done"
    expected, _ = simulated("target", 1).expected(range(NUM_TOKENS))
    assert not np.array_equal(target.data, expected)


IDLE_AGENT = """
import time
from dcpjax.transfer.nixl import NixlBackend
backend = NixlBackend()
before = time.process_time()
time.sleep(1.0)
print(time.process_time() - before)
backend.close()
"""


def test_an_agent_that_nobody_talks_to_takes_no_processor_time():
    """In a process of its own, where nobody else takes any."""
    try:
        nixl.load_library()
    except TransferError as error:
        pytest.skip(str(error))
    run = subprocess.run(
        [sys.executable, "-c", IDLE_AGENT], stdout=subprocess.PIPE, text=True, check=True
    )
    assert float(run.stdout) < 0.5  # a thread that never rests takes 1
