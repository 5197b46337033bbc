"""The rules of the scheduler one by one; test_scheduler_simulation.py has them all at once."""

from collections.abc import Sequence

import pytest

from dcpjax.cache.prefix import PagePool, chain_hashes, root_hash
from dcpjax.engine import residency
from dcpjax.engine.remote_kv import RemoteKV
from dcpjax.engine.request import (
    NO_DRAFTS,
    Drafts,
    FinishReason,
    Request,
    SamplingParams,
    Status,
    TokenLogprobs,
)
from dcpjax.engine.residency import Residency
from dcpjax.engine.scheduler import Drain, Scheduler, StepPlan, StepShapes
from dcpjax.errors import ConfigError, ContextLengthError, RequestError

SHAPES = StepShapes(decode_rows=(1, 2, 4, 8, 16), prefill=((1, 64), (4, 64), (1, 512)))
WIDE = StepShapes(decode_rows=(4,), prefill=((4, 64),))  # prompts start together if they can
SIZE = 4
EOS = 0
PLAIN = 7  # a token that ends nothing


def scheduler_of(pool: PagePool | None = None, **changes) -> Scheduler:
    settings = {"max_num_seqs": 4, "max_model_len": 1024, "shapes": SHAPES, **changes}
    return Scheduler(pool or PagePool(512, SIZE), **settings)


def request_of(prompt: Sequence[int] | int, name: str = "a", **params) -> Request:
    """An int prompt is that many tokens which occur in no other prompt."""
    if isinstance(prompt, int):
        prompt = [1000 + ord(name[0]) * 10_000 + i for i in range(prompt)]
    params = SamplingParams(**{"max_tokens": 8, **params})
    return Request(name, tuple(prompt), params, eos_token_ids=frozenset({EOS}))


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert isinstance(plan, StepPlan)
    return plan


def step(scheduler: Scheduler, *tokens: int):
    """One step without look-ahead; ``tokens`` or PLAIN for each sampling segment."""
    plan = planned(scheduler)
    chosen = tokens or [PLAIN] * len(plan.sampling)
    return scheduler.commit(plan, [[token] for token in chosen])


def ids(requests) -> list[str]:
    return [request.request_id for request in requests]


# Shapes


@pytest.mark.parametrize(
    "remaining, shape",
    [
        ([], (0, 0)),
        ([1], (1, 64)),
        ([40], (1, 64)),
        ([64], (1, 64)),
        ([70], (1, 64)),  # 6 more tokens are not worth 448 of padding
        ([2000], (1, 512)),
        ([512], (1, 512)),
        ([30, 30, 30, 30], (4, 64)),
        ([10, 10, 10, 10], (4, 64)),
        ([10, 10], (1, 64)),
        ([40, 2000], (4, 64)),
        ([2000, 30, 30, 30], (1, 512)),
    ],
)
def test_prefill_shape_gives_most_tokens_for_its_cost(remaining, shape) -> None:
    assert SHAPES.best_prefill(remaining) == shape


@pytest.mark.parametrize(
    "changes",
    [
        {"decode_rows": ()},
        {"prefill": ()},
        {"prefill": ((0, 4),)},
        {"fixed_cost": -1},
        {"decode_widths": ()},
    ],
)
def test_impossible_shapes_are_refused(changes) -> None:
    with pytest.raises(ConfigError, match="decode rows, decode widths and prefill"):
        StepShapes(**{"decode_rows": (1,), "prefill": ((1, 4),), **changes})


def test_more_sequences_than_decode_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs=17"):
        scheduler_of(max_num_seqs=17)


# What is refused


@pytest.mark.parametrize(
    "num_prompt, max_tokens, param",
    [
        (15, 1, None),
        (15, None, None),
        (16, None, "prompt"),
        (17, 1, "prompt"),
        (15, 2, "max_tokens"),
        (1, 15, None),
        (1, 16, "max_tokens"),
    ],
)
@pytest.mark.parametrize("num_pages, max_model_len", [(100, 16), (4, 1024)])
def test_what_can_never_end_is_refused(
    num_prompt, max_tokens, param, num_pages, max_model_len
) -> None:
    scheduler = scheduler_of(PagePool(num_pages, SIZE), max_model_len=max_model_len)
    request = request_of(num_prompt, max_tokens=max_tokens)
    if param is None:
        scheduler.add(request)
        assert request.max_length == 16
        return
    with pytest.raises(ContextLengthError, match="maximum context length of 16 tokens") as error:
        scheduler.add(request)
    assert error.value.param == param
    assert error.value.values["prompt_tokens"] == num_prompt
    assert error.value.values["kv_pool_tokens"] == num_pages * SIZE
    assert not scheduler.has_work


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="at least 1 token") as error:
        scheduler_of().add(request_of(0))
    assert error.value.param == "prompt"


def test_an_id_in_use_is_refused_until_its_request_has_ended() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(3))
    with pytest.raises(RequestError, match="unique"):
        scheduler.add(request_of(3))
    step(scheduler)
    with pytest.raises(RequestError, match="unique"):
        scheduler.add(request_of(3))
    scheduler.abort("a")
    scheduler.add(request_of(3))


# Batches


def test_nothing_to_do() -> None:
    scheduler = scheduler_of()
    assert scheduler.schedule() is None and not scheduler.has_work


def test_a_long_prompt_is_computed_in_chunks_while_others_generate() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(3, "a", max_tokens=20))
    step(scheduler)
    scheduler.add(request_of(577, "b"))
    chunks = []
    for _ in range(4):
        plan = planned(scheduler)
        assert "a" in ids(s.request for s in plan.decode)
        chunks += [(s.start, s.num_tokens, s.samples) for s in plan.segments[1:]]
        scheduler.commit(plan, [[PLAIN]] * len(plan.sampling))
    # The last token is a decode row: a chunk of one token would be all padding.
    assert chunks == [(0, 512, False), (512, 64, False), (576, 1, True), (577, 1, True)]


def test_short_prompts_share_a_step_and_get_the_lowest_slots() -> None:
    scheduler = scheduler_of()
    for name in "abcde":
        scheduler.add(request_of(30, name))
    plan = planned(scheduler)
    assert (ids(plan.started), plan.prefill_width) == (["a", "b", "c", "d"], 64)
    assert [r.slot for r in plan.started] == [0, 1, 2, 3]
    scheduler.commit(plan, [[PLAIN], [EOS], [PLAIN], [PLAIN]])
    plan = planned(scheduler)  # "b" made room
    assert ids(plan.started) == ["e"] and plan.started[0].slot == 1
    assert ids(s.request for s in plan.decode) == ["a", "c", "d"]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    scheduler = scheduler_of(PagePool(10, SIZE))
    scheduler.add(request_of(12, "a"))
    step(scheduler)
    scheduler.add(request_of(30, "b"))
    scheduler.add(request_of(1, "c"))
    plan = planned(scheduler)
    assert plan.started == () and scheduler.stats().num_waiting == 2


@pytest.mark.parametrize("num_pages, starts", [(5, True), (4, False)])
def test_a_start_leaves_a_page_for_each_running_request(num_pages: int, starts: bool) -> None:
    scheduler = scheduler_of(PagePool(num_pages, SIZE))
    scheduler.add(request_of(4, "a"))  # 5 tokens: 2 pages
    step(scheduler)
    scheduler.add(request_of(4, "b"))
    assert bool(planned(scheduler).started) == starts


def test_waiting_changes_nothing_and_hashes_each_page_once(monkeypatch) -> None:
    hashed = 0

    def counted(parent, tokens, size):
        nonlocal hashed
        hashed += len(tokens) // size
        return chain_hashes(parent, tokens, size)

    monkeypatch.setattr(residency, "chain_hashes", counted)
    scheduler = scheduler_of(PagePool(12, SIZE))
    scheduler.add(request_of(16, "a", max_tokens=24))
    scheduler.add(request_of(30, "b"))
    for _ in range(24):
        step(scheduler)
    assert scheduler.stats().num_waiting == 1
    assert hashed == 30 // SIZE + 39 // SIZE  # the last token of "a" was never computed
    step(scheduler)
    assert hashed == 30 // SIZE + 39 // SIZE


# Look-ahead


def test_a_step_continues_tokens_that_only_the_device_knows() -> None:
    scheduler = scheduler_of()
    request = request_of(5)
    scheduler.add(request)
    first = planned(scheduler)
    second = planned(scheduler)
    assert [s.token_is_pending for s in first.segments] == [False]
    assert [(s.start, s.token_is_pending) for s in second.decode] == [(5, True)]
    assert request.num_pending == 2
    scheduler.commit(first, [[PLAIN]])
    assert (request.num_tokens, request.num_scheduled, request.num_pending) == (6, 6, 1)


def test_without_look_ahead_the_input_is_known() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(5))
    step(scheduler)
    assert not planned(scheduler).decode[0].token_is_pending


def steps_dispatched(max_tokens: int) -> int:
    scheduler = scheduler_of()
    scheduler.add(request_of(5, max_tokens=max_tokens))
    in_flight, count = None, 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        if in_flight is not None:
            scheduler.commit(in_flight, [[PLAIN]])
        in_flight, count = plan, count + (plan is not None)
    return count


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8])
def test_no_step_is_spent_behind_max_tokens(max_tokens: int, monkeypatch) -> None:
    assert steps_dispatched(max_tokens) == max_tokens
    monkeypatch.setattr(Request, "can_continue", property(lambda self: self.num_uncomputed > 0))
    assert steps_dispatched(max_tokens) > max_tokens  # the test can fail


def test_what_was_computed_for_an_ended_request_is_dropped() -> None:
    pool = PagePool(16, SIZE)
    scheduler = scheduler_of(pool)
    scheduler.add(request_of(7, "a"))
    first = planned(scheduler)
    overrun = planned(scheduler)  # computes position 7, which fills the second page
    [output] = scheduler.commit(first, [[EOS]])
    assert (output.token_ids, output.finish_reason) == ((EOS,), FinishReason.STOP)
    assert pool.num_available == 16 and pool.num_cached == 1
    assert scheduler.schedule() is None
    assert scheduler.commit(overrun, [[PLAIN]]) == []
    assert pool.num_cached == 1  # the page of the overrun is listed nowhere
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_the_order_of_calls_is_checked() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(5))
    first, second = planned(scheduler), planned(scheduler)
    with pytest.raises(AssertionError, match="third step"):
        scheduler.schedule()
    with pytest.raises(AssertionError, match="in order"):
        scheduler.commit(second, [[PLAIN]])
    scheduler.commit(first, [[PLAIN]])


# Results


@pytest.mark.parametrize(
    "params, tokens, reason, stop_token",
    [
        ({}, [PLAIN, EOS], FinishReason.STOP, None),
        ({"ignore_eos": True, "max_tokens": 3}, [EOS] * 3, FinishReason.LENGTH, None),
        ({"stop_token_ids": (3,)}, [PLAIN, 3], FinishReason.STOP, 3),
        ({"stop_token_ids": (EOS,)}, [EOS], FinishReason.STOP, None),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, [EOS], FinishReason.STOP, EOS),
        ({"min_tokens": 3}, [EOS, EOS, EOS], FinishReason.STOP, None),
        ({"min_tokens": 2, "stop_token_ids": (3,)}, [3, PLAIN, 3], FinishReason.STOP, 3),
        ({"max_tokens": 2}, [PLAIN, EOS], FinishReason.STOP, None),
        ({"max_tokens": 1}, [PLAIN], FinishReason.LENGTH, None),
    ],
)
def test_why_a_request_ends(params, tokens, reason, stop_token) -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(3, **params))
    outputs = [output for token in tokens for output in step(scheduler, token)]
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(tokens) - 1)
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == (reason, stop_token)
    assert not scheduler.has_work


def test_max_tokens_none_goes_to_the_context_length() -> None:
    scheduler = scheduler_of(max_model_len=6)
    scheduler.add(request_of(4, max_tokens=None))
    assert step(scheduler)[0].finish_reason is None
    assert step(scheduler)[0].finish_reason is FinishReason.LENGTH


# Drafts

DRAFTED = StepShapes(decode_rows=(4,), prefill=((4, 64),), decode_widths=(1, 4))


class Scripted:
    """Proposes the same tokens always, as many of them as are wanted."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens
        self.wanted: list[int] = []

    def propose(self, request: Request, at_most: int) -> Drafts:
        self.wanted.append(at_most)
        return Drafts(len(self.tokens[:at_most]), self.tokens[:at_most])


def drafting(*tokens: int, pool: PagePool | None = None, **changes) -> Scheduler:
    return scheduler_of(pool, shapes=DRAFTED, drafter=Scripted(*tokens), **changes)


def test_accepted_drafts_are_computed_and_the_token_behind_them_is_not() -> None:
    scheduler, request = drafting(8, 9, 10), request_of(5, max_tokens=20)
    scheduler.add(request)
    step(scheduler)
    plan = planned(scheduler)
    [segment] = plan.decode
    assert (segment.start, segment.num_tokens, segment.stop, segment.num_computed) == (5, 1, 6, 4)
    assert segment.drafts == Drafts(3, (8, 9, 10)) and len(request.page_ids) == 3
    assert (request.num_scheduled, request.drafts.count) == (6, 0)
    [output] = scheduler.commit(plan, [[8, 9, PLAIN]])
    assert output.token_ids == (8, 9, PLAIN)
    assert (request.num_tokens, request.num_scheduled, request.num_uncomputed) == (9, 8, 1)
    [segment] = planned(scheduler).decode
    assert (segment.start, segment.request.tokens(8, 9)) == (8, [PLAIN])
    counts = scheduler.drafting.counts
    assert (counts.num_verifications, counts.num_drafts, counts.num_accepted) == (1, 3, 2)


def test_rejected_drafts_leave_nothing_behind() -> None:
    scheduler, request = drafting(8, 9, 10), request_of(5, max_tokens=20)
    scheduler.add(request)
    step(scheduler)
    scheduler.commit(planned(scheduler), [[PLAIN]])
    assert (request.num_tokens, request.num_scheduled) == (7, 6)
    assert planned(scheduler).decode[0].start == 6


def test_accepted_drafts_end_at_the_first_token_that_ends() -> None:
    scheduler, request = drafting(8, EOS, 9), request_of(5, logprobs=0)
    scheduler.add(request)
    details = [TokenLogprobs(token, -1.0, 1, ()) for token in (8, EOS, 9, 9)]
    step(scheduler)
    [output] = scheduler.commit(planned(scheduler), [[8, EOS, 9, 9]], [details])
    assert (output.token_ids, output.finish_reason) == ((8, EOS), FinishReason.STOP)
    assert output.logprobs == tuple(details[:2])
    assert scheduler.stats().num_generation_tokens == 3
    scheduler.check_integrity()


@pytest.mark.parametrize("max_tokens, wanted", [(1, []), (2, []), (3, [1]), (4, [2]), (9, [3])])
def test_drafts_fit_into_the_sequence_with_one_token_behind_them(max_tokens, wanted) -> None:
    scheduler = drafting(8, 9, 10)
    scheduler.add(request_of(5, max_tokens=max_tokens))
    step(scheduler)
    scheduler.schedule()
    assert scheduler.drafting._drafter.wanted == wanted


def test_a_request_with_penalties_has_no_drafts() -> None:
    scheduler = drafting(8)
    scheduler.add(request_of(5, presence_penalty=0.1))
    step(scheduler)
    assert planned(scheduler).decode[0].drafts == NO_DRAFTS
    assert scheduler.drafting.counts.mean_length == 1


@pytest.mark.parametrize("num_pages, num_drafts", [(6, 3), (5, 0)])
def test_nobody_loses_pages_for_drafts(num_pages: int, num_drafts: int) -> None:
    """Two sequences of 7 tokens have 2 pages each; with drafts each of them wants a third one."""
    scheduler = drafting(8, 9, 10, pool=PagePool(num_pages, SIZE))
    for name in "ab":
        scheduler.add(request_of(6, name))
    step(scheduler)
    plan = planned(scheduler)
    assert [segment.drafts.count for segment in plan.decode] == [num_drafts] * 2
    assert scheduler.stats().num_preemptions == 0


def test_pages_of_accepted_drafts_are_found_by_others() -> None:
    scheduler = drafting(8, 9, 10)
    scheduler.add(request_of([1, 2, 3], "a", max_tokens=20))
    step(scheduler)
    scheduler.commit(planned(scheduler), [[8, 9, 10, 11]])  # 1 2 3 7 | 8 9 10, and 11 to compute
    step(scheduler)
    scheduler.add(request_of([1, 2, 3, PLAIN, 8, 9, 10, 11, 5], "b"))
    [started] = planned(scheduler).started
    assert started.num_cached == 8


def test_drafts_and_look_ahead_exclude_each_other() -> None:
    scheduler = drafting(8)
    scheduler.add(request_of(5))
    planned(scheduler)
    with pytest.raises(AssertionError, match="follow from the commit"):
        scheduler.schedule()


def test_more_tokens_than_drafts_and_one_are_refused() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(5))
    with pytest.raises(AssertionError, match="more drafts are accepted"):
        scheduler.commit(planned(scheduler), [[PLAIN, PLAIN]])


def test_every_sampling_segment_has_a_result() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(5))
    with pytest.raises(ValueError, match="shorter"):
        scheduler.commit(planned(scheduler), [])


# Aborts


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_an_abort_ends_a_request_once(num_steps: int) -> None:
    pool = PagePool(16, SIZE)
    scheduler = scheduler_of(pool)
    request = request_of(5)
    scheduler.add(request)
    for _ in range(num_steps):
        step(scheduler)
    for name in ("a", "a", "unknown"):
        scheduler.abort(name)
    assert scheduler.has_work and request.status is Status.FINISHED
    [output] = scheduler.take_ended()
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.ABORT)
    assert scheduler.take_ended() == [] and not scheduler.has_work
    assert pool.num_available == 16
    scheduler.check_integrity()


def test_pages_and_slot_of_an_aborted_request_serve_the_next_step() -> None:
    scheduler = scheduler_of(PagePool(2, SIZE), max_num_seqs=1)
    scheduler.add(request_of(3, "a", max_tokens=5))
    in_flight = planned(scheduler)
    scheduler.abort("a")
    scheduler.add(request_of(6, "b", max_tokens=2))
    plan = planned(scheduler)
    assert ids(plan.started) == ["b"] and plan.started[0].slot == 0
    [output] = scheduler.commit(in_flight, [[PLAIN]])
    assert output.finish_reason is FinishReason.ABORT and output.token_ids == ()


# Preemption


def crowded() -> tuple[Scheduler, PagePool, list[Request]]:
    """Three sequences of 7 known tokens that hold 2 of 8 pages each."""
    pool = PagePool(8, SIZE)
    scheduler = scheduler_of(pool, shapes=WIDE)
    requests = [request_of(6, name, max_tokens=20) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    step(scheduler)
    assert [request.num_tokens for request in requests] == [7, 7, 7] and pool.num_available == 2
    return scheduler, pool, requests


def test_a_shortage_of_pages_preempts_the_latest() -> None:
    scheduler, _, (a, b, c) = crowded()
    step(scheduler)  # position 6: still within the second page
    step(scheduler)  # position 7
    step(scheduler, PLAIN, PLAIN)  # position 8: three pages are needed, two are there
    assert (a.status, b.status, c.status) == (Status.RUNNING, Status.RUNNING, Status.WAITING)
    assert (c.num_preemptions, c.slot, c.page_ids, c.num_scheduled) == (1, None, [], 0)
    assert len(c.output_token_ids) == 3  # known outputs stay, they are recomputed
    scheduler.add(request_of(1, "d"))
    scheduler.abort("b")
    plan = planned(scheduler)
    assert ids(plan.started)[0] == "c"  # in front of who came later
    scheduler.check_integrity()


def test_preemption_waits_for_the_step_in_flight() -> None:
    scheduler, pool, requests = crowded()
    step(scheduler)
    in_flight = planned(scheduler)
    before = [(r.status, list(r.page_ids), r.num_scheduled, r.num_pending) for r in requests]
    available = pool.num_available
    assert scheduler.schedule() is Drain.DRAIN
    assert scheduler.schedule() is Drain.DRAIN
    after = [(r.status, list(r.page_ids), r.num_scheduled, r.num_pending) for r in requests]
    assert (before, available) == (after, pool.num_available)
    scheduler.commit(in_flight, [[PLAIN]] * 3)
    assert isinstance(scheduler.schedule(), StepPlan)
    assert scheduler.stats().num_preemptions == 1


def test_the_oldest_is_never_preempted_and_everybody_ends() -> None:
    scheduler, _, requests = crowded()
    for _ in range(200):
        if not scheduler.has_work:
            break
        oldest = next(r for r in requests if r.status is not Status.FINISHED)
        num_tokens = oldest.num_tokens
        step(scheduler)
        assert oldest.num_tokens == num_tokens + 1 or oldest.status is Status.FINISHED
    assert [len(request.output_token_ids) for request in requests] == [20, 20, 20]
    assert requests[0].num_preemptions == 0 < requests[2].num_preemptions


# What ranks disagree about


def test_what_is_void_waits_for_the_step_in_flight_and_starts_over() -> None:
    scheduler = scheduler_of()
    prompt = list(range(100, 112))
    scheduler.add(request_of(prompt, "a", max_tokens=9))
    step(scheduler)
    [a] = scheduler._lineup.running.values()
    plan, pages = planned(scheduler), list(a.page_ids)
    in_flight = planned(scheduler)
    scheduler.recompute("a", num_agreed=SIZE + 1, error="they differ")
    scheduler.recompute("a", num_agreed=0, error="the same step again")
    assert scheduler.commit(plan, [[PLAIN]]) == [] and a.status is Status.VOID
    assert scheduler.schedule() is Drain.DRAIN
    assert scheduler.commit(in_flight, [[PLAIN]]) == []
    plan = planned(scheduler)
    assert plan.started == (a,) and (a.num_cached, a.num_pending) == (SIZE, 1)
    assert a.page_ids[0] == pages[0] and scheduler.stats().num_recomputations == 1
    scheduler.recompute("a", num_agreed=0, error="they differ")
    [output] = scheduler.commit(plan, [[PLAIN]])
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "they differ")
    scheduler.recompute("a", num_agreed=0, error="nobody of this name")
    scheduler.check_integrity()


# Prefix cache


def test_a_hit_is_reported_once_and_counted() -> None:
    scheduler = scheduler_of()
    prompt = list(range(100, 117))
    scheduler.add(request_of(prompt, "a", max_tokens=1))
    step(scheduler)
    scheduler.add(request_of([*prompt[:13], 5, 5], "b", max_tokens=2))
    plan = planned(scheduler)
    assert [(s.start, s.num_tokens) for s in plan.prefill] == [(12, 3)]
    [first] = scheduler.commit(plan, [[PLAIN]])
    [second] = step(scheduler)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (12, 0)
    stats = scheduler.stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (32, 12)
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (32, 3)
    assert (stats.num_running, stats.num_waiting, stats.page_usage) == (0, 0, 0)


@pytest.mark.parametrize("caching, salt", [(False, ""), (True, "other")])
def test_no_hit_without_the_cache_or_with_another_salt(caching: bool, salt: str) -> None:
    scheduler = scheduler_of(enable_prefix_caching=caching)
    for name in ("", salt):
        request = request_of(list(range(100, 117)), "a", max_tokens=1)
        request.cache_salt = name
        scheduler.add(request)
        [output] = step(scheduler)
        assert output.num_cached_tokens == 0
    assert scheduler.stats().num_prefix_hits == 0


def test_generated_tokens_serve_the_next_turn() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(list(range(100, 106)), "a", max_tokens=7))
    for _ in range(7):
        step(scheduler)
    # 12 of the 13 tokens were computed: the last one ended the request before it was an input.
    scheduler.add(request_of([*range(100, 106), *[PLAIN] * 7, 5], "b"))
    [output] = step(scheduler)
    assert output.num_cached_tokens == 12


@pytest.mark.parametrize("is_mutant", [False, True])
def test_a_start_does_not_evict_what_the_next_one_found(is_mutant: bool, monkeypatch) -> None:
    original = Residency.admit

    def one_by_one(self, admissions):
        for admission in admissions:
            original(self, [admission])

    if is_mutant:
        monkeypatch.setattr(Residency, "admit", one_by_one)
    pool = PagePool(6, SIZE)
    for tokens in ([1] * 4, [2] * 20):  # the first is used least recently, nothing is free
        hashes = chain_hashes(root_hash(""), tokens, SIZE)
        pages = pool.allocate(len(hashes))
        pool.register(hashes, pages)
        pool.release(pages)
    scheduler = scheduler_of(pool, shapes=WIDE)
    newcomer, sharer = request_of(7, "a", max_tokens=1), request_of([1] * 7, "b", max_tokens=1)
    scheduler.add(newcomer)
    scheduler.add(sharer)
    assert ids(planned(scheduler).started) == ["a", "b"]
    assert sharer.num_cached == 4
    assert bool(set(newcomer.page_ids) & set(sharer.page_ids)) == is_mutant


# The integrity check


@pytest.mark.parametrize(
    "damage",
    [
        lambda scheduler, request: setattr(request, "slot", None),
        lambda scheduler, request: request.page_ids.pop(),
        lambda scheduler, request: scheduler._lineup._free_slots.append(request.slot),
        lambda scheduler, request: scheduler._lineup.running.clear(),
    ],
)
def test_the_integrity_check_can_fail(damage) -> None:
    scheduler = scheduler_of()
    request = request_of(5)
    scheduler.add(request)
    step(scheduler)
    scheduler.check_integrity()
    damage(scheduler, request)
    with pytest.raises(AssertionError):
        scheduler.check_integrity()


# Loads from other engines


def loading_request(name: str) -> Request:
    request = request_of(9, name)
    request.remote_kv = RemoteKV("engine", name, "localhost", 1, (0, 1, 2), 9)
    return request


def test_requests_whose_loads_fail_go_back_to_their_places() -> None:
    scheduler = scheduler_of(shapes=WIDE)
    for name in "abcd":
        scheduler.add(loading_request(name))
    assert scheduler.schedule() is None
    loads = {load.request_id: load for load in scheduler.remote.take_events().loads}
    assert list(loads) == list("abcd")
    for name in "bdac":  # the order in which the other engine's connections break
        scheduler.remote.fail_load(loads[name], error=None)
    assert ids(planned(scheduler).started) == list("abcd")


def test_a_load_takes_a_slot_and_pages_and_no_row() -> None:
    scheduler = scheduler_of(shapes=WIDE)
    scheduler.add(loading_request("a"))
    scheduler.add(request_of(9, "b"))
    plan = planned(scheduler)
    assert ids(plan.started) == ["b"] and scheduler.remote.num_loading == 1
    [load] = scheduler.remote.take_events().loads
    assert (load.first_token, load.stop_token) == (0, 8)
    scheduler.commit(plan, [[PLAIN]])
    scheduler.remote.land(load)
    plan = planned(scheduler)
    assert {(s.request.request_id, s.start) for s in plan.decode} == {("a", 8), ("b", 9)}
    assert ids(plan.started) == ["a"], "what is kept per slot begins anew"


# Prompts that are offered early


def early_request(num_tokens: int, name: str, **params) -> Request:
    request = request_of(num_tokens, name, **params)
    request.exports_kv = request.exports_early = True
    return request


def test_an_early_export_tells_its_pages_first_and_then_how_far_it_is() -> None:
    scheduler = scheduler_of(
        PagePool(100, SIZE), shapes=StepShapes(decode_rows=(16,), prefill=((1, 8),))
    )
    request = early_request(18, "a", max_tokens=1)
    scheduler.add(request)
    plan = planned(scheduler)
    events = scheduler.remote.take_events()
    assert [export.page_ids for export in events.early_exports] == [tuple(request.page_ids)[:5]]
    assert events.progress == {"a": 0}
    scheduler.commit(plan, [])
    assert scheduler.remote.take_events().progress == {"a": 8}
    step(scheduler)
    step(scheduler)
    events = scheduler.remote.take_events()
    assert (events.progress, events.exports, events.withdrawn) == ({"a": 18}, [], [])
    assert request.status is Status.FINISHED
    scheduler.check_integrity()
    assert scheduler.remote.end_export("a")
    scheduler.check_integrity()


@pytest.mark.parametrize("end", ["abort", "preemption"])
def test_an_early_export_that_loses_its_request_is_withdrawn(end) -> None:
    scheduler = scheduler_of(PagePool(100, SIZE))
    request = early_request(6, "a", max_tokens=8)
    scheduler.add(request)
    step(scheduler)
    scheduler.remote.take_events()
    if end == "abort":
        scheduler.abort("a")
    else:
        scheduler.remote.withdraw(request)
        scheduler._lineup.requeue(request)
    events = scheduler.remote.take_events()
    assert events.withdrawn == ["a"]
    scheduler.check_integrity()  # who may still read from the pages holds them
    assert scheduler.remote.end_export("a")
    scheduler.check_integrity()
    while scheduler.has_work:
        step(scheduler) if end == "preemption" else scheduler.take_ended()
    assert scheduler.remote.take_events().exports == [], "it was told that nothing will come"
