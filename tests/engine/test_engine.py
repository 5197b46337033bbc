"""The engine as a whole: whatever runs beside a request, it yields what it yields alone."""

import random
from collections import defaultdict
from collections.abc import Iterator

import pytest

from dcpjax.cache.parts import KV
from dcpjax.config import EngineConfig
from dcpjax.engine.blueprint import decode_buckets, prefill_buckets
from dcpjax.engine.engine import Engine
from dcpjax.engine.request import FinishReason
from dcpjax.errors import ConfigError, ContextLengthError, MeshError, RequestError
from tests.engine.serving import Served, engine_of, finish, request_of, serve
from tests.engine.workload import assert_same, copies, workload
from tests.golden.tiny import random_tokens

MESH = {
    "tensor_parallel_size": 4,
    "decode_context_parallel_size": 2,
    "dcp_comm_backend": "a2a",
    "prefill_gather": "q",
}
PAGES = 40
MANY = tuple((token, 1.0) for token in range(20, 40))


@pytest.fixture(scope="module")
def engine(tiny) -> Iterator[Engine]:
    """Four sequences at once, in a pool that holds them all; nothing is cached between tests."""
    engine = engine_of(
        tiny, **MESH, max_num_seqs=4, num_pages=PAGES, enable_prefix_caching=False, seed=1
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def crowded(tiny) -> Iterator[Engine]:
    """As ``engine``, with pages for about two sequences, and a prefix cache."""
    engine = engine_of(tiny, **MESH, max_num_seqs=4, num_pages=9, seed=1)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(engine) -> dict[str, Served]:
    """Each request of the workload, by itself."""
    return {
        request.request_id: serve(engine, [request])[request.request_id]
        for request in workload(36, seed=0)
    }


@pytest.mark.parametrize("which", ["engine", "crowded"])
def test_a_batch_yields_what_each_request_yields_alone(which, alone, request):
    engine = request.getfixturevalue(which)
    served = serve(engine, workload(36, seed=0))
    for name, expected in alone.items():
        assert_same(served[name], expected)
    assert (engine.stats()["num_preemptions"] > 0) == (which == "crowded")
    assert engine.stats()["kv_cache_usage"] == 0


def test_the_workload_has_every_ending(alone):
    reasons = {served.finish_reason for served in alone.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert any(served.stop_token_id is not None for served in alone.values())
    assert any(
        served.finish_reason is FinishReason.STOP and served.stop_token_id is None
        for served in alone.values()
    )


@pytest.mark.parametrize("seed", range(6))
def test_aborts_at_any_moment_change_nothing_for_the_others(seed, crowded, alone):
    """Some before they start, some in their prompt, some while a token is in flight."""
    chance = random.Random(seed)
    requests = copies(workload(36, seed=0))
    chance.shuffle(requests)
    victims = {r.request_id: chance.randrange(60) for r in requests if chance.random() < 0.4}
    for request in requests:
        crowded.add(request)
    served: dict[str, Served] = defaultdict(Served)
    num_steps = 0
    while crowded.has_work:
        for name, step in victims.items():
            if step == num_steps:
                crowded.abort(name)
                crowded.abort(name)  # twice is once
        for output in crowded.step():
            served[output.request_id].add(output)
        crowded.check_integrity()
        num_steps += 1
    assert served.keys() == alone.keys()
    for name, found in served.items():
        if found.finish_reason is FinishReason.ABORT:
            assert name in victims
            assert found.tokens == alone[name].tokens[: len(found.tokens)]
        else:
            assert_same(found, alone[name])
    assert any(found.finish_reason is FinishReason.ABORT for found in served.values())
    assert crowded.stats()["compilations_after_warmup"] == 0
    assert crowded.stats()["kv_cache_usage"] == 0


def test_the_pool_is_what_the_placement_says(engine):
    """Every rank's share of the array has the layers and heads of its share of the placement."""
    placement, pool = engine.placements[KV], engine.runner.pools[KV]
    shares = {shard.data.shape[1:4] for shard in pool.addressable_shards}
    assert len(pool.addressable_shards) == placement.num_ranks
    assert shares == {(s.num_layers, s.num_heads, placement.page_size) for s in placement.shares}
    assert {s.ranks for s in placement.shares} == {engine.config.decode_context_parallel_size}


def test_aborting_nobody(engine):
    engine.abort("unknown")
    assert engine.step() == [] and not engine.has_work


# Look-ahead


def test_a_step_is_dispatched_before_the_last_one_is_read(engine):
    """The first call returns nothing; from then on each returns the token of the step before."""
    engine.add(request_of("a", [5, 6, 7], max_tokens=3))
    counts = []
    while engine.has_work:
        counts.append(sum(len(output.token_ids) for output in engine.step()))
    assert counts == [0, 1, 1, 1]


def test_look_ahead_is_a_naive_loop(engine):
    """One request per token, each computed from scratch."""
    prompt = random_tokens("naive", 21)
    together = serve(engine, [request_of("a", prompt, max_tokens=10)])["a"].tokens
    naive = []
    for index in range(10):
        naive += serve(engine, [request_of(str(index), prompt + naive, max_tokens=1)])[
            str(index)
        ].tokens
    assert together == naive


def test_a_token_computed_beyond_the_end_is_thrown_away(engine):
    first = serve(engine, [request_of("a", [3, 1, 4], max_tokens=5)])["a"].tokens
    stopped = serve(engine, [request_of("b", [3, 1, 4], max_tokens=5, stop_token_ids=first[2:3])])
    assert stopped["b"].tokens == first[: first.index(first[2]) + 1]
    assert stopped["b"].stop_token_id == first[2]


# What the parameters do


def test_seeds(engine):
    params = {"temperature": 1.5, "max_tokens": 20}
    served = serve(
        engine,
        [
            request_of("a", [1, 2], seed=1, **params),
            request_of("b", [1, 2], seed=1, **params),
            request_of("c", [1, 2], seed=2, **params),
            request_of("d", [1, 2], **params),
            request_of("e", [1, 2], **params),
        ],
    )
    tokens = {name: tuple(item.tokens) for name, item in served.items()}
    assert tokens["a"] == tokens["b"]
    assert len(set(tokens.values())) == 4


def test_log_probabilities(engine):
    served = serve(engine, [request_of("a", [9, 9, 2], max_tokens=6, logprobs=20)])["a"]
    assert [details.token_id for details in served.logprobs] == served.tokens
    for details in served.logprobs:
        assert details.rank == 1 and len(details.top) == 20
        assert details.top[0] == (details.token_id, details.logprob)
        values = [logprob for _, logprob in details.top]
        assert values == sorted(values, reverse=True) and values[0] <= 0


def test_min_tokens_bans_every_ending(engine):
    """More than a hundred endings beside a bias: the first eight tokens are of the few others."""
    params = {"max_tokens": 30, "min_tokens": 8, "logit_bias": ((130, 2.0), (3, 9.0))}
    endings = {"eos": range(60), "stop_token_ids": range(60, 120)}
    found = serve(engine, [request_of("a", [1], **endings, **params)])["a"]
    assert min(found.tokens[:8]) >= 120
    assert found.finish_reason is FinishReason.STOP or min(found.tokens) >= 120


def test_more_endings_than_can_be_banned(engine):
    endings = {"eos": range(70), "stop_token_ids": range(60, 120)}
    serve(engine, [request_of("a", [1], **endings, max_tokens=2)])
    with pytest.raises(RequestError, match="together") as error:
        engine.add(request_of("a", [1], **endings, max_tokens=9, min_tokens=8, logit_bias=MANY))
    assert error.value.param == "min_tokens"


def test_a_ban_and_a_strong_bias(engine):
    plain = serve(engine, [request_of("a", [8, 3], max_tokens=8)])["a"].tokens
    banned = tuple((token, -1e9) for token in set(plain))
    other = serve(engine, [request_of("b", [8, 3], max_tokens=8, logit_bias=banned)])["b"].tokens
    assert not set(other) & set(plain)
    forced = serve(engine, [request_of("c", [8, 3], max_tokens=8, logit_bias=((5, 1e9),))])
    assert forced["c"].tokens == [5] * 8


# Prefix cache and statistics


def test_a_prefix_is_computed_once(tiny):
    engine = engine_of(tiny, **MESH)
    prompt = random_tokens("prefix", 70)
    first = serve(engine, [request_of("a", prompt, max_tokens=8)])["a"]
    again = serve(engine, [request_of("b", prompt, max_tokens=8)])["b"]
    assert again.tokens == first.tokens
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 64)  # virtual pages of 16
    stats = engine.stats()
    assert (stats["prefix_cache_queries"], stats["prefix_cache_hits"]) == (140, 64)
    engine.reset_prefix_cache()
    cold = serve(engine, [request_of("c", prompt, max_tokens=8)])["c"]
    assert (cold.tokens, cold.num_cached_tokens) == (first.tokens, 0)
    engine.close()
    engine.close()  # idempotent


def test_statistics(engine):
    before = engine.stats()
    serve(engine, [request_of(name, [4, 2], max_tokens=3) for name in "abcdef"])
    after = engine.stats()
    assert after["prompt_tokens"] - before["prompt_tokens"] == 12
    assert after["generation_tokens"] - before["generation_tokens"] == 18
    assert after["mesh"] == {"tp": 2, "dcp": 2}
    assert after["kv_tokens_capacity"] == PAGES * 8 * 2
    assert after["audit"]["steps"] == len(after["compiled_shapes"]) == len(engine.runner.audits)
    assert (after["num_requests_running"], after["num_requests_waiting"]) == (0, 0)
    assert (after["num_pages"], after["block_size"]) == (PAGES, 8)


def test_closing_with_a_step_in_flight(tiny):
    engine = engine_of(tiny)
    engine.add(request_of("a", [1, 2, 3], max_tokens=4))
    engine.step()
    engine.close()
    assert engine.runner.pools[KV].is_deleted()


def test_draining_reads_what_is_in_flight(engine):
    engine.add(request_of("a", [1, 2, 3], max_tokens=4))
    assert engine.step() == []
    assert [len(output.token_ids) for output in engine.drain()] == [1]
    assert engine.drain() == []
    assert len(finish(engine)["a"].tokens) == 3


# What is refused


@pytest.mark.parametrize(
    "params, param",
    [
        ({"prompt": [131]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"stop_token_ids": (131,)}, "stop_token_ids"),
        ({"logit_bias": ((131, 1.0),)}, "logit_bias"),
        ({"prompt": []}, "prompt"),
    ],
)
def test_tokens_that_the_model_does_not_have(engine, params, param):
    with pytest.raises(RequestError) as error:
        engine.add(request_of("a", **{"prompt": [1], **params}))
    assert error.value.param == param
    assert not engine.has_work


def test_more_than_fits(engine):
    with pytest.raises(ContextLengthError, match="256 tokens"):
        engine.add(request_of("a", [1] * 256))
    with pytest.raises(ContextLengthError, match="256 tokens"):
        engine.add(request_of("a", [1] * 250, max_tokens=7))


def test_an_id_in_use(engine):
    engine.add(request_of("a", [1, 2], max_tokens=2))
    with pytest.raises(RequestError, match="unique"):
        engine.add(request_of("a", [1, 2]))
    finish(engine)


@pytest.mark.parametrize(
    "settings, error, rule",
    [
        ({"max_model_len": 513}, ConfigError, "max_model_len"),
        ({"tensor_parallel_size": 16}, MeshError, "number of devices"),
        ({"tensor_parallel_size": 3, "decode_context_parallel_size": 2}, MeshError, "multiple"),
        ({"cp_kv_cache_interleave_size": 3}, ConfigError, "divides block_size"),
        (
            {"max_num_batched_tokens": 7, "block_size": 8, "cp_kv_cache_interleave_size": 8},
            ConfigError,
            "max_num_batched_tokens.*cp_kv_cache_interleave_size",
        ),
        ({"no_such_setting": 1}, ConfigError, "unknown setting no_such_setting"),
    ],
)
def test_settings_that_cannot_be(tiny, settings, error, rule):
    with pytest.raises(error, match=rule):
        engine_of(tiny, **settings)


# Buckets


@pytest.mark.parametrize(
    "least, most, sizes",
    [
        (1, 1, (1,)),
        (1, 2, (1, 2)),
        (1, 3, (1, 2, 3)),
        (1, 8, (1, 2, 4, 8)),
        (1, 9, (1, 2, 4, 8, 9)),
        (2, 1, (2,)),
        (2, 16, (2, 4, 8, 16)),
    ],
)
def test_decode_buckets(least, most, sizes):
    assert decode_buckets(least, most) == sizes


@pytest.mark.parametrize("dcp", [1, 2, 3, 8])
@pytest.mark.parametrize("interleave", [1, 4, 16])
@pytest.mark.parametrize("most", [1, 7, 64, 100, 512])
@pytest.mark.parametrize("seqs", [1, 2, 16])
def test_prefill_buckets_split_evenly_over_ranks(dcp, interleave, most, seqs):
    stripe = dcp * interleave
    config = EngineConfig(
        "any",
        tensor_parallel_size=dcp,
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=interleave,
        max_num_batched_tokens=max(most, stripe),
        max_num_seqs=seqs,
    )
    for rows, width in prefill_buckets(config):
        assert width % stripe == 0 and 1 <= rows <= min(4, seqs)
        assert rows * width <= config.max_num_batched_tokens
