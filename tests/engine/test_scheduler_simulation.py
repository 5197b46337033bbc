"""The scheduler drives a fake device that checks every page it reads.

A cell of the fake pool holds a digest of the whole history of its token and of the token before,
as keys and values do in effect. A step follows the chain of digests through the pages that it is
given, so a foreign, overwritten or never written page breaks it, and the next token is a function
of the last digest. Whatever is scheduled, preempted, shared, drafted, rejected or aborted, each
request must yield what it yields alone.
"""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpjax.cache import prefix
from dcpjax.cache.prefix import PagePool
from dcpjax.config import SpeculativeConfig
from dcpjax.engine import residency, verification
from dcpjax.engine.drafting import Drafting
from dcpjax.engine.remote_kv import KVEvents, KVExport, KVLoad, RemoteKV
from dcpjax.engine.request import (
    Drafts,
    FinishReason,
    Request,
    SamplingParams,
    Status,
    TokenOutput,
)
from dcpjax.engine.residency import Residency
from dcpjax.engine.scheduler import Drain, Scheduler, Segment, StepPlan, StepShapes
from dcpjax.engine.verification import Verifier

VOCAB = 13
EOS = 0
SHAPES = StepShapes(
    decode_rows=(1, 2, 4), prefill=((1, 4), (3, 4), (1, 16)), fixed_cost=4, decode_widths=(1, 4)
)
VERIFIER = Verifier(SpeculativeConfig("ngram", 3), seed_words=lambda request: None)
MAX_MODEL_LEN = 64
GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH)
ELSEWHERE = RemoteKV("engine", "request", "localhost", 1, (), 0)


def root(salt: str) -> int:
    return sum(map(ord, salt))


def after(digest: int, token: int) -> int:
    return hash((digest, token))


def next_token(digest: int) -> int:
    return digest % VOCAB


@dataclass
class FakeDevice:
    """Executes plans in order. ``cells`` maps (page, offset) to the digests (before, after)."""

    num_pages: int
    page_size: int
    cells: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    sampled: dict[int, int] = field(default_factory=dict)  # slot -> latest token
    void: set[str] = field(default_factory=set)  # requests whose ranks have different prefixes
    shapes_seen: set[tuple[int, int]] = field(default_factory=set)

    def run(self, plan: StepPlan) -> list[list[int]]:
        self.check_shape(plan)
        self.void -= {request.request_id for request in plan.started}
        digests = [self.read(segment) for segment in plan.segments]
        inputs = [self.inputs(segment) for segment in plan.segments]
        sampled: list[list[int]] = []
        for segment, digest, values in zip(plan.segments, digests, inputs, strict=True):
            chosen: list[int] = []
            is_void = segment.request.request_id in self.void
            for position, token in enumerate(values, start=segment.start):
                before, digest = digest, after(digest, token)
                cell = self.cell(segment.request, position)
                self.cells[cell] = (-1, -1) if is_void else (before, digest)
                chosen.append(next_token(digest))
            if segment.samples:
                self.sampled[segment.request.slot] = chosen[-1]
                sampled.append(chosen[segment.num_tokens - 1 :])
        return VERIFIER.accept(plan.sampling, sampled, {})

    def cell(self, request: Request, position: int) -> tuple[int, int]:
        assert position // self.page_size < len(request.page_ids), "a token has no page"
        assert position < request.max_length - 1, "the last token is never computed"
        page = request.page_ids[position // self.page_size]
        assert 0 <= page < self.num_pages
        return page, position % self.page_size

    def read(self, segment: Segment) -> int:
        digest = root(segment.request.cache_salt)
        for position in range(segment.start):
            before, now = self.cells.get(self.cell(segment.request, position), (None, None))
            if segment.request.request_id in self.void:
                continue
            assert before == digest, f"the page of position {position} holds something else"
            digest = now
        return digest

    def inputs(self, segment: Segment) -> list[int]:
        if segment.token_is_pending:
            return [self.sampled[segment.request.slot]]
        tokens = segment.request.tokens(segment.start, segment.stop)
        assert len(tokens) == segment.num_tokens >= 1, "an unknown token is an input"
        return [*tokens, *segment.drafts.token_ids]

    def check_shape(self, plan: StepPlan) -> None:
        assert plan.segments and len(plan.decode) <= max(SHAPES.decode_rows)
        assert all(segment.num_tokens == 1 and segment.samples for segment in plan.decode)
        assert all(segment.num_computed <= max(SHAPES.decode_widths) for segment in plan.decode)
        assert not any(segment.drafts.count for segment in plan.prefill)
        if plan.prefill:
            rows = [rows for rows, width in SHAPES.prefill if width == plan.prefill_width]
            assert len(plan.prefill) <= max(rows)
            assert max(segment.num_tokens for segment in plan.prefill) <= plan.prefill_width
            self.shapes_seen.add((len(plan.prefill), plan.prefill_width))
        slots = [segment.request.slot for segment in plan.segments]
        assert len(set(slots)) == len(slots) and None not in slots
        self.check_pages_are_disjoint(plan)

    def check_pages_are_disjoint(self, plan: StepPlan) -> None:
        users: dict[int, set[int]] = defaultdict(set)
        for row, segment in enumerate(plan.segments):
            for page in segment.request.page_ids:
                users[page].add(row)
        for segment in plan.segments:
            stop = segment.start + segment.num_computed
            first, last = segment.start // self.page_size, (stop - 1) // self.page_size
            for page in segment.request.page_ids[first : last + 1]:
                assert len(users[page]) == 1, f"page {page} is written by one and used by another"


def alone(request: Request, max_length: int) -> tuple[list[int], FinishReason]:
    """What the request yields with nobody else: the rules of ending, stated once more."""
    params, digest, outputs = request.params, root(request.cache_salt), []
    for token in request.prompt_token_ids:
        digest = after(digest, token)
    limit = max_length - len(request.prompt_token_ids)
    limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
    while True:
        outputs.append(next_token(digest))
        digest = after(digest, outputs[-1])
        may_stop = len(outputs) >= params.min_tokens
        is_eos = outputs[-1] == EOS and not params.ignore_eos
        if may_stop and (is_eos or outputs[-1] in params.stop_token_ids):
            return outputs, FinishReason.STOP
        if len(outputs) == limit:
            return outputs, FinishReason.LENGTH


class Guesser:
    """Proposes what comes next, each token of which is right with probability ``skill``."""

    def __init__(self, rng: random.Random, skill: float) -> None:
        self.rng, self.skill = rng, skill

    def propose(self, request: Request, at_most: int) -> Drafts:
        assert not request.params.has_penalties and at_most >= 1
        digest = root(request.cache_salt)
        for token in request.token_ids:
            digest = after(digest, token)
        tokens: list[int] = []
        for _ in range(self.rng.randint(0, at_most)):
            is_right = self.rng.random() < self.skill
            tokens.append(next_token(digest) if is_right else self.rng.randrange(VOCAB))
            digest = after(digest, tokens[-1])
        return Drafts(len(tokens), tuple(tokens))


@dataclass(frozen=True)
class World:
    """One run: everything that chance and the test decide."""

    seed: int
    num_pages: int = 10
    page_size: int = 4
    max_num_seqs: int = 4
    num_requests: int = 14
    abort_rate: float = 0.05
    look_ahead: bool = True
    caching: bool = True
    load_rate: float = 0.0  # requests whose prompt was computed by another engine
    failure_rate: float = 0.0  # of loads
    recomputes: bool = False  # what cannot be loaded; else the request fails
    export_rate: float = 0.0
    disagree_rate: float = 0.0  # prompt chunks before which ranks have different tokens
    skill: float | None = None  # of who drafts, if anybody: then there is no look-ahead
    check: bool = True  # integrity after each call; off to see what the device itself notices

    @property
    def max_length(self) -> int:
        return min(MAX_MODEL_LEN, self.num_pages * self.page_size)


class Simulation:
    """The engine's loop, with random arrivals and aborts at any moment."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = random.Random(world.seed)
        self.pool = PagePool(world.num_pages, world.page_size)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=world.max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            shapes=SHAPES,
            enable_prefix_caching=world.caching,
            drafter=None if world.skill is None else Guesser(self.rng, world.skill),
        )
        self.device = FakeDevice(world.num_pages, world.page_size)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[TokenOutput]] = defaultdict(list)
        self.num_drains = self.num_steps = self.num_disagreements = 0
        self.loads: list[KVLoad] = []
        self.num_landed = 0
        self.unsettled: list[KVLoad] = []
        self.started: set[str] = set()  # loads
        self.exports: dict[str, KVExport] = {}

    def run(self) -> "Simulation":
        in_flight: tuple[StepPlan, list[list[int]]] | None = None
        while self.may_arrive() or self.scheduler.has_work:
            self.num_steps += 1
            assert self.num_steps < 400 * self.world.num_requests, "livelock"
            self.arrive_and_abort()
            plan = self.scheduler.schedule()
            if isinstance(plan, Drain):
                assert in_flight is not None
                self.num_drains += 1
                in_flight = self.commit(in_flight)
                continue
            dispatched = None if plan is None else self.dispatch(plan)
            self.serve(self.scheduler.remote.take_events())
            others = self.loads or self.exports or self.unsettled
            assert dispatched or in_flight or others or not self.alive(), "they wait for nothing"
            self.arrive_and_abort()
            in_flight = self.commit(in_flight)
            if self.world.look_ahead and self.world.skill is None:
                in_flight = dispatched
            else:
                self.commit(dispatched)
            self.other_engines()
            self.collect(self.scheduler.take_ended())
        self.serve(self.scheduler.remote.take_events())
        while self.loads or self.exports or self.unsettled:
            self.other_engines()
        self.pool.check_integrity(is_idle=True)
        self.check_outputs()
        return self

    def may_arrive(self) -> bool:
        return len(self.requests) < self.world.num_requests

    def alive(self) -> list[Request]:
        return [r for r in self.requests.values() if r.status is not Status.FINISHED]

    def arrive_and_abort(self) -> None:
        if self.may_arrive() and self.rng.random() < 0.4:
            request = self.new_request()
            self.requests[request.request_id] = request
            self.scheduler.add(request)
        if self.requests and self.rng.random() < self.world.abort_rate:
            self.scheduler.abort(self.rng.choice(list(self.requests)))  # ended ones too
        self.check()

    def serve(self, events: KVEvents) -> None:
        self.loads += events.loads
        for export in events.exports:
            request = self.requests[export.request_id]
            assert request.exports_kv and export.num_tokens == len(request.prompt_token_ids)
            assert self.outputs[export.request_id][-1].finish_reason in GOOD_ENDS
            self.exports[export.request_id] = export
        for request_id in events.unwanted:
            assert self.requests[request_id].status is Status.FINISHED
            assert request_id not in self.started, "a load was begun and is called unwanted"
        self.started |= {load.request_id for load in events.loads}

    def other_engines(self) -> None:
        """What happens outside: a load ends, or an export is not needed any more."""
        if self.loads and self.rng.random() < 0.4:
            load = self.loads.pop(self.rng.randrange(len(self.loads)))
            if fails := self.rng.random() < self.world.failure_rate:
                error = None if self.world.recomputes else "the other engine is gone"
                self.move(load, garbage=True)
                is_settled = self.rng.random() < 0.5
                self.scheduler.remote.fail_load(load, error=error, is_settled=is_settled)
                if not is_settled:
                    self.unsettled.append(load)
            else:
                self.move(load)
                self.scheduler.remote.land(load)
            self.num_landed += not fails
            self.check()
        if self.unsettled and self.rng.random() < 0.3:
            load = self.unsettled.pop()
            self.move(load, garbage=True)
            self.scheduler.remote.settle_load(load)
            self.check()
        if self.exports and self.rng.random() < 0.3:
            export = self.exports.pop(self.rng.choice(list(self.exports)))
            self.check_export(export)
            assert self.scheduler.remote.end_export(export.request_id)
            assert not self.scheduler.remote.end_export(export.request_id)
            self.check()

    def move(self, load: KVLoad, *, garbage: bool = False) -> None:
        """Write into the pages of the load as the other engine's transfer does."""
        request = self.requests[load.request_id]
        digest = root(request.cache_salt)
        for position, token in enumerate(request.prompt_token_ids[: load.stop_token]):
            before, digest = digest, after(digest, token)
            if position >= load.first_token:
                page = load.page_ids[position // self.world.page_size]
                cell = page, position % self.world.page_size
                self.device.cells[cell] = (-1, -1) if garbage else (before, digest)

    def check_export(self, export: KVExport) -> None:
        request = self.requests[export.request_id]
        digest = root(request.cache_salt)
        for position, token in enumerate(request.prompt_token_ids):
            digest = after(digest, token)
            page, offset = divmod(position, self.world.page_size)
            cell = self.device.cells[export.page_ids[page], offset]
            assert cell[1] == digest, "an export was overwritten"

    def dispatch(self, plan: StepPlan) -> tuple[StepPlan, list[list[int]]]:
        for segment in plan.prefill:
            if segment.start and self.rng.random() < self.world.disagree_rate:
                self.device.void.add(segment.request.request_id)
                self.num_disagreements += 1
        return plan, self.device.run(plan)

    def commit(self, step: tuple[StepPlan, list[list[int]]] | None) -> None:
        if step is not None:
            for segment in step[0].segments:
                if segment.request.request_id in self.device.void:
                    agreed = self.rng.randint(0, segment.start)
                    self.scheduler.recompute(segment.request.request_id, agreed, "they differ")
                    self.check()
            self.collect(self.scheduler.commit(*step))
            self.check()

    def check(self) -> None:
        if self.world.check:
            self.scheduler.check_integrity()

    def collect(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            earlier = self.outputs[output.request_id]
            assert not earlier or earlier[-1].finish_reason is None, "an output after the last one"
            assert not earlier or output.num_cached_tokens == 0, "cached tokens are reported once"
            earlier.append(output)

    def new_request(self) -> Request:
        rng, longest = self.rng, self.world.max_length
        prompt = self.new_prompt()[: longest - 1]
        room = longest - len(prompt)
        max_tokens = rng.choice((None, rng.randint(1, room)))
        return Request(
            request_id=str(len(self.requests)),
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(
                max_tokens=max_tokens,
                min_tokens=rng.randint(0, min(3, room if max_tokens is None else max_tokens)),
                ignore_eos=rng.random() < 0.5,
                presence_penalty=rng.choice((0, 0, 0, 1)),  # the device has none
                stop_token_ids=rng.choice(((), (), (3,))),
            ),
            eos_token_ids=frozenset({EOS}),
            cache_salt=rng.choice(("", "", "s")),
            remote_kv=ELSEWHERE if rng.random() < self.world.load_rate else None,
            exports_kv=rng.random() < self.world.export_rate,
        )

    def new_prompt(self) -> list[int]:
        """Often the beginning of an earlier sequence, or all of it."""
        rng = self.rng
        if self.requests and rng.random() < 0.4:
            tokens = rng.choice(list(self.requests.values())).token_ids
            return tokens[: rng.randint(1, len(tokens))]
        shared = [rng.choice((1, 2))] * rng.randrange(self.world.max_length // 2)
        return shared + rng.choices(range(VOCAB), k=rng.randrange(1, 6))

    def check_outputs(self) -> None:
        for request_id, request in self.requests.items():
            tokens = [token for output in self.outputs[request_id] for token in output.token_ids]
            reason = self.outputs[request_id][-1].finish_reason
            expected, expected_reason = alone(request, self.world.max_length)
            if reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert tokens == expected[: len(tokens)]
            else:
                assert (tokens, reason) == (expected, expected_reason)
            assert tokens == request.output_token_ids


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        World,
        seed=st.integers(0, 2**32),
        num_pages=st.sampled_from((1, 2, 3, 5, 8, 13, 40)),
        page_size=st.sampled_from((2, 3, 4, 8)),
        max_num_seqs=st.integers(1, 4),
        abort_rate=st.sampled_from((0, 0.05, 0.3)),
        look_ahead=st.booleans(),
        caching=st.booleans(),
        load_rate=st.sampled_from((0, 0.5, 1.0)),
        failure_rate=st.sampled_from((0, 0.3)),
        recomputes=st.booleans(),
        export_rate=st.sampled_from((0, 0, 0.5)),
        skill=st.sampled_from((None, 0, 0.5, 0.9, 1.0)),
        disagree_rate=st.sampled_from((0, 0, 0.1, 0.5)),
    )
)
def test_every_request_yields_what_it_yields_alone(world: World) -> None:
    Simulation(world).run()


def test_the_simulation_reaches_what_it_is_meant_to_test() -> None:
    exchange = {"load_rate": 0.3, "failure_rate": 0.2, "export_rate": 0.2}
    runs = [Simulation(World(seed, **exchange)).run() for seed in range(30)]
    stats = [run.scheduler.stats() for run in runs]
    assert sum(s.num_preemptions for s in stats) > 10
    assert sum(s.num_prefix_hits for s in stats) > 100
    assert sum(run.num_drains for run in runs) > 5
    assert sum(run.num_landed for run in runs) > 30
    reasons = {run.outputs[i][-1].finish_reason for run in runs for i in run.requests}
    assert reasons == set(FinishReason)
    rows_and_widths = set().union(*(run.device.shapes_seen for run in runs))
    assert {(1, 4), (3, 4), (1, 16)} <= rows_and_widths


def test_the_simulation_recomputes_what_ranks_disagree_about() -> None:
    runs = [Simulation(World(seed, disagree_rate=0.2, abort_rate=0)).run() for seed in range(20)]
    outputs = [run.outputs[i][-1] for run in runs for i in run.requests]
    again = sum(run.scheduler.stats().num_recomputations for run in runs)
    failed = sum(output.finish_reason is FinishReason.ERROR for output in outputs)
    assert 20 < again and 0 < failed < again / 2
    assert all(output.error in (None, "they differ") for output in outputs)


def test_the_simulation_accepts_and_rejects_drafts() -> None:
    runs = [Simulation(World(seed, skill=0.6, load_rate=0.2)).run() for seed in range(20)]
    counts = [run.scheduler.drafting.counts for run in runs]
    assert sum(c.num_accepted for c in counts) > 300
    assert sum(c.num_drafts - c.num_accepted for c in counts) > 300
    assert sum(run.scheduler.stats().num_preemptions for run in runs) > 5
    assert sum(run.scheduler.stats().num_prefix_hits for run in runs) > 100
    lengths = {
        len(o.token_ids) for run in runs for outputs in run.outputs.values() for o in outputs
    }
    assert lengths >= {0, 1, 2, 3, 4}


def test_drafts_save_steps_and_cost_no_preemption() -> None:
    """Right drafts only take pages that nobody needs."""
    worlds = [World(seed, abort_rate=0, look_ahead=False) for seed in range(20)]
    plain = [Simulation(world).run() for world in worlds]
    drafted = [Simulation(dataclasses.replace(world, skill=1.0)).run() for world in worlds]
    num_steps = [sum(run.num_steps for run in runs) for runs in (plain, drafted)]
    assert num_steps[1] < 0.7 * num_steps[0]


def test_an_aborted_request_frees_everything_in_any_state() -> None:
    run = Simulation(World(seed=1, abort_rate=1.0)).run()
    assert {run.outputs[i][-1].finish_reason for i in run.requests} >= {FinishReason.ABORT}


Mutation = Callable[[pytest.MonkeyPatch], None]


def forget_the_limit_of_a_hit(patch: pytest.MonkeyPatch) -> None:
    original = PagePool.find_prefix
    patch.setattr(
        PagePool, "find_prefix", lambda self, hashes, num_tokens: original(
            self, hashes, num_tokens=num_tokens + 1
        )
    )  # fmt: skip


def list_pages_before_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    original = Residency.admit

    def admit(self, admissions):
        original(self, admissions)
        for admission in admissions:
            self.register(admission.request, 0, admission.request.num_tokens)

    patch.setattr(Residency, "admit", admit)


def leave_shared_pages_evictable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagePool, "share", lambda self, pages: None)


def forget_the_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(residency, "root_hash", lambda salt: prefix.root_hash(""))


def hash_each_page_by_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        residency, "chain_hashes", lambda parent, tokens, size: [
            prefix.chain_hashes(b"", tokens[i : i + size], size)[0]
            for i in range(0, len(tokens) - size + 1, size)
        ]
    )  # fmt: skip


def keep_tokens_behind_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "_ending", lambda self: (None, None))


def keep_the_pages_of_ended_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagePool, "release", lambda self, pages: None)


def accept_one_more(patch: pytest.MonkeyPatch) -> None:
    original = verification.num_accepted
    patch.setattr(
        verification, "num_accepted", lambda drafts, sampled, num_drafts: np.minimum(
            original(drafts, sampled, num_drafts) + 1, num_drafts
        )
    )  # fmt: skip


def compare_with_the_choice_behind(patch: pytest.MonkeyPatch) -> None:
    original = verification.num_accepted
    patch.setattr(
        verification, "num_accepted", lambda drafts, sampled, num_drafts: original(
            drafts, np.roll(sampled, -1, axis=1), num_drafts
        )
    )  # fmt: skip


def count_a_rejected_draft_as_computed(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._note_accepted

    def note_accepted(self, segment, num_accepted):
        original(self, segment, min(num_accepted + 1, segment.drafts.count))

    patch.setattr(Scheduler, "_note_accepted", note_accepted)


def draft_behind_the_longest_sequence(patch: pytest.MonkeyPatch) -> None:
    original = Drafting._drafts_of

    def drafts_of(self, request):
        request.max_length += 8
        drafts = original(self, request)
        request.max_length -= 8
        return drafts

    patch.setattr(Drafting, "_drafts_of", drafts_of)


def use_what_ranks_disagree_about(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "recompute", lambda self, *_: None)


@pytest.mark.parametrize(
    "mutate",
    [
        use_what_ranks_disagree_about,
        accept_one_more,
        compare_with_the_choice_behind,
        count_a_rejected_draft_as_computed,
        draft_behind_the_longest_sequence,
        forget_the_limit_of_a_hit,
        list_pages_before_they_are_computed,
        leave_shared_pages_evictable,
        forget_the_salt,
        hash_each_page_by_itself,
        keep_tokens_behind_the_end,
        keep_the_pages_of_ended_requests,
    ],
)
def test_the_simulation_notices_a_broken_rule(
    mutate: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    skills = (None, 0.7)
    worlds = [
        World(seed, abort_rate=0.2, check=False, skill=skills[seed % 2], disagree_rate=0.1)
        for seed in range(100)
    ]
    for world in worlds[:3]:
        Simulation(world).run()
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        for world in worlds:
            Simulation(world).run()
