"""Prompts on several ranks: whatever they keep of the cache, tokens are those of one device."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dcpjax.cache.parts import DRAFT_PARTS
from dcpjax.engine.engine import Engine
from dcpjax.engine.prompt_split import attention_work
from dcpjax.engine.request import FinishReason
from dcpjax.engine.step import StepResult, StepShape
from dcpjax.errors import ConfigError, MeshError, UnsupportedCombination
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.engine.drafting_glm import drafting_glm
from tests.engine.serving import engine_of, opening_engines, request_of, serve
from tests.engine.workload import assert_same, workload
from tests.golden.tiny import random_tokens, write_tiny_model
from tests.golden.tiny_glm import write_tiny_glm

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 160, "block_size": 4}
PCP, TP, DCP = (
    "prefill_context_parallel_size",
    "tensor_parallel_size",
    "decode_context_parallel_size",
)
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
matrix = pytest.mark.matrix
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa, all on 3": ("gqa", {PCP: 3}),
    "gqa, tokens on 4": ("gqa", {PCP: 4, DCP: 4, "cp_kv_cache_interleave_size": 2}),
    "gqa, layers on 2, tp 2": ("gqa", {PCP: 2, TP: 2, "prefill_kv": "layer_split"}),
    "glm, tokens on all of 2 x 2": ("glm", {PCP: 2, TP: 2, DCP: 4, **MTP}),
    "glm, layers on 2": ("glm", {PCP: 2, "prefill_kv": "layer_split", **MTP}),
    "gqa, tokens on 2 of 2 x 2": ("gqa", {PCP: 2, TP: 2, DCP: 2}),
    "gqa, all on 8": ("gqa", {PCP: 8}),
    "glm, all on 2": ("glm", {PCP: 2, **MTP}),
    "glm, pages on 3, whole index": (
        "glm",
        {PCP: 3, DCP: 3, "cp_kv_cache_interleave_size": 4, "index_kv": "replicated"},
    ),
    "glm, tokens on 6": ("glm", {PCP: 6, DCP: 6, **MTP}),
}
OTHER_COPIES = {"glm, layers on 2": (0.5, 1.2), "glm, tokens on 6": (0.2, 1.1)}
"""Measured over said, where the compiler lays out more than the copies in another way."""
FEW = list(ENGINES)[:5]
"""Those of ``make test``; all of them behind ``matrix``."""


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory) -> dict[str, Checkpoint]:
    return {"gqa": tiny, "glm": drafting_glm(tmp_path_factory.mktemp("models") / "glm")}


@pytest.fixture(scope="module")
def open_engine(models) -> Iterator[Callable[..., Engine]]:
    with opening_engines() as open_one:
        yield lambda model, **settings: open_one(models[model], **SMALL | settings)


@pytest.fixture(scope="module")
def plain(open_engine) -> dict[str, Engine]:
    return {model: open_engine(model, num_pages=160) for model in ("gqa", "glm")}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in FEW else matrix) for name in ENGINES],
)
def split(request, open_engine) -> Engine:
    """An engine whose pages hold about two of its sequences."""
    model, settings = ENGINES[request.param]
    ranks = settings.get(DCP, 1)
    engine = open_engine(model, **settings, num_pages=2 * -(-160 // (4 * ranks)))
    engine.model_name = model
    return engine


def vocabulary(engine: Engine) -> int:
    return 61 if engine.model_name == "glm" else 131


def test_a_batch_yields_what_one_device_yields(split, plain):
    """Sampled and greedy requests of all lengths beside each other, some preempted."""
    requests = [r for r in workload(24, seed=3) if max(r.prompt_token_ids) < vocabulary(split)]
    requests += [
        request_of(f"long {n}", random_tokens(f"long {n}", n, vocabulary(split)), max_tokens=30)
        for n in (70, 71, 96, 110)
    ]
    expected = serve(plain[split.model_name], [_copy(r) for r in requests])
    served = serve(split, [_copy(r) for r in requests])
    for name, one in expected.items():
        assert_same(served[name], one)
    assert split.stats()["kv_cache_usage"] == 0


def _copy(request):
    return type(request)(
        request.request_id, request.prompt_token_ids, request.params, request.eos_token_ids
    )


def test_prompts_of_every_length_also_from_the_prefix_cache(split, plain):
    """Shorter than the ranks, chunks of nothing; then nothing, a part and all of it cached."""
    ranks = split.config.prefill_context_parallel_size
    lengths = sorted({1, ranks - 1, ranks, 2 * ranks, 2 * ranks + 1, 23, 24, 25, 100})
    for number, length in itertools.product((1, 2), lengths):
        prompt = random_tokens("every", length, vocabulary(split))
        prompt += random_tokens(f"end {number}", 4 * (number - 1), vocabulary(split))
        name = f"{number} of {length}"
        params = {"max_tokens": 5, "ignore_eos": True}
        expected = serve(plain[split.model_name], [request_of(name, prompt, **params)])[name]
        found = serve(split, [request_of(name, prompt, **params)])[name]
        assert_same(found, expected)
        if number == 2:
            page = split.config.virtual_page_size
            assert found.num_cached_tokens >= (length - 1) // page * page


def test_the_work_is_even_and_the_pools_are_shares(split):
    config, stats = split.config, split.stats()
    ranks = config.prefill_context_parallel_size
    assert stats["decode_context_parallel_size"] == config.decode_context_parallel_size
    assert stats["pcp"]["ranks"] == ranks and stats["pcp"]["prefill_kv"] == config.residency
    assert 1 <= stats["pcp"]["balance"] < 2  # of prompts that are short for so many ranks
    for part in split.blueprint.parts:
        pool, is_draft = split.runner.pools[part.name], part.name in DRAFT_PARTS
        (share,) = {shard.data.shape for shard in pool.addressable_shards}
        assert len(pool.addressable_shards) == config.num_ranks
        layers = len(part.layers)
        is_cut = config.residency == "layer_split" and not is_draft
        assert share[1] == (-(-layers // ranks) if is_cut else layers)
        tokens = config.virtual_page_size if part.is_replicated else config.block_size
        assert share[3] == tokens
        assert share[0] == split.pool_shapes.num_pages + 1
    assert stats["kv_bytes_per_rank"] == split.pool_shapes.rank_bytes(config.head_groups)


def test_experts_are_split_over_all_ranks(split):
    """They are most of a model; all else is there once for each PCP rank."""
    config, model = split.config, split.runner._model
    by_name = dict(zip(model.names, model.parameters, strict=True))
    experts = [array for name, array in by_name.items() if name.endswith("mlp.gate_up")]
    split_ways = {
        array.shape[0] // array.sharding.shard_shape(array.shape)[0]
        for array in experts
        if array.ndim == 4
    }
    assert split_ways == ({config.num_ranks} if split.model_name == "glm" else set())


@pytest.mark.parametrize(
    "name", [name if name == FEW[1] else pytest.param(name, marks=matrix) for name in ENGINES]
)
def test_the_copies_are_as_large_as_they_say(name, open_engine):
    """Beyond what a step takes that reads the pool in place: two layers."""
    model, settings = ENGINES[name]
    if model == "glm":  # expanding latents takes memory of its own
        settings = settings | {"attention_config": {"sparse_mla_force_mqa": True}}
    copying = open_engine(model, **settings, num_pages=40)
    said = copying.stats()["pcp"]["copy_bytes"]
    if copying.config.residency == "replicated":
        assert said == 0
        return
    in_place = {k: v for k, v in settings.items() if k not in (DCP, "prefill_kv", "index_kv")}
    temporary = [
        engine.stats()["audit"]["temporary_bytes"]
        for engine in (copying, open_engine(model, **in_place, num_pages=40))
    ]
    least, most = OTHER_COPIES.get(name, (0.5, 1.1))
    assert least * said <= temporary[0] - temporary[1] <= most * said


def _differing(
    engine: Engine, change: Callable[[dict[str, np.ndarray]], None], times: int
) -> Callable:
    """What dispatches steps of which the first ``times`` that can have another input on the last
    device have it."""
    runner, changed = engine.runner, []

    def arguments(shape: StepShape, packed: np.ndarray) -> tuple:
        other = packed.copy()
        if len(changed) < times:
            change(shape.views(other))
        if (other != packed).any():
            changed.append(shape)
        devices = list(runner.mesh.devices.flat)
        whole = NamedSharding(runner.mesh, PartitionSpec())
        arrays = [jax.device_put(packed, device) for device in devices[:-1]]
        arrays.append(jax.device_put(other, devices[-1]))
        both = jax.make_array_from_single_device_arrays(packed.shape, whole, arrays)
        return runner._arguments(both)

    def dispatch(shape: StepShape, packed: np.ndarray) -> StepResult:
        result = StepResult(*runner._steps[shape](*arguments(shape, packed)))
        runner._pools = result.pools
        return result

    return dispatch


def _fewer_tokens(views: dict[str, np.ndarray]) -> None:
    lengths = views["prior_lengths"]
    chunks = lengths[len(lengths) - len(views["prefix_digests"]) :]  # a view: none in decode steps
    chunks[chunks > 20] -= 3


def _other_tokens(views: dict[str, np.ndarray]) -> None:
    views["prefix_digests"][views["prior_lengths"][-1] > 20] ^= 5


@pytest.mark.parametrize("times", [1, 2, 10**6])
@pytest.mark.parametrize("change", [_fewer_tokens, _other_tokens])
def test_what_ranks_disagree_about_is_computed_again(change, times, plain, open_engine):
    """A different number of tokens before a chunk, or as many others: never a wrong token.

    The second step of those that differ is in flight when the first is found out. Whoever starts
    over and meets the same again ends in an error, alone.
    """
    engine = open_engine("gqa", **ENGINES["gqa, layers on 2, tp 2"][1], num_pages=100)
    engine.reset_prefix_cache()
    before = engine.stats()["num_recomputations"]
    short, long = random_tokens("short", 17), random_tokens("disagree", 60)
    params = {"max_tokens": 8, "ignore_eos": True}
    expected = serve(plain["gqa"], [request_of("short", short, **params)])["short"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "_dispatch_forward", _differing(engine, change, times))
        served = serve(
            engine, [request_of("long", long, **params), request_of("short", short, **params)]
        )
    assert_same(served["short"], expected)
    undisturbed = serve(plain["gqa"], [request_of("long", long, **params)])["long"]
    if times > 2:
        assert served["long"].finish_reason is FinishReason.ERROR and not served["long"].tokens
    else:
        assert_same(served["long"], undisturbed)
    assert engine.stats()["num_recomputations"] == before + 1
    assert engine.stats()["kv_cache_usage"] == 0
    after = serve(engine, [request_of("long", long, **params)])["long"]  # also from the cache
    assert_same(after, undisturbed)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_attention_work_is_counted_pair_by_pair(ranks):
    """Of long prompts all ranks have the same."""
    for start, count in itertools.product((0, 5), (0, 1, 7, 2 * ranks, 2 * ranks + 1)):
        found = attention_work(start, count, ranks)
        assert found.sum() == sum(range(start + 1, start + count + 1))
    long = attention_work(1000, 16 * 2 * ranks, ranks)
    assert long.max() == long.min()
    assert isinstance(long, np.ndarray) and long.dtype == np.int64


@pytest.fixture(scope="module")
def long_models(tmp_path_factory) -> dict[str, Checkpoint]:
    """Of sequences that are longer than what the others were made for."""
    longest = {"max_position_embeddings": 8192}
    folder = tmp_path_factory.mktemp("long")
    gqa = open_checkpoint(str(write_tiny_model(folder / "gqa", "gqa", **longest)))
    return {"gqa": gqa, "glm": drafting_glm(folder / "glm", **longest)}


@matrix
@pytest.mark.parametrize("length", [1000, 5000])
@pytest.mark.parametrize("residency", ["replicated", "sharded", "layer_split"])
@pytest.mark.parametrize("model", ["gqa", "glm"])
def test_long_prompts(model, residency, length, long_models):
    settings = {"max_num_batched_tokens": 200, "max_model_len": 5200, "max_num_seqs": 1}
    vocabulary = 61 if model == "glm" else 131
    prompt = random_tokens("very long", length, vocabulary)
    request = {"max_tokens": 4, "ignore_eos": True}
    ranks = 2 if residency == "layer_split" else 4  # there are two layers
    size = {PCP: ranks, "prefill_kv": residency, DCP: 4 if residency == "sharded" else 1}
    both = [
        serve(
            engine_of(long_models[model], **settings, **more),
            [request_of("long", prompt, **request)],
        )
        for more in ({}, size)
    ]
    assert both[0]["long"].tokens == both[1]["long"].tokens


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Checkpoint:
    """Latents in tiles, as scales need them."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    return open_checkpoint(str(write_tiny_glm(folder, "periodic", kv_lora_rank=128)))


@pytest.mark.parametrize(
    "residency, kv_cache_dtype",
    [
        pytest.param(*case, marks=() if case == ("sharded", "fp8_ds_mla") else matrix)
        for case in itertools.product(
            ("replicated", "sharded", "layer_split"), ("fp8_ds_mla", "fp8", "bfloat16")
        )
    ],
)
def test_rounded_caches_give_the_tokens_of_one_device(wide, residency, kv_cache_dtype):
    """Sparse attention reads all tokens from pages, so it sees the same wherever they lie."""
    size = {PCP: 2, "prefill_kv": residency, DCP: 2 if residency == "sharded" else 1}
    few = {"kv_cache_dtype": kv_cache_dtype, "num_pages": 40, "block_size": 8, "max_num_seqs": 2}
    whole = {"cp_kv_cache_interleave_size": 8}  # scaled keys are gathered as whole pages
    requests = {
        str(n): (random_tokens(f"rounded {n}", n, 61), {"max_tokens": 6, "ignore_eos": True})
        for n in (1, 3, 24, 61)
    }
    served = []
    for settings in ({}, size | whole):
        engine = engine_of(wide, **SMALL | few | settings)
        asked = [request_of(name, prompt, **more) for name, (prompt, more) in requests.items()]
        served.append(serve(engine, asked))
        engine.close()
    for name in requests:
        assert_same(served[1][name], served[0][name])


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({PCP: 2, TP: 2, DCP: 3}, MeshError, "is 1, prefill_context_parallel_size, or"),
    ({PCP: 4, TP: 2, DCP: 2}, MeshError, "is 1, prefill_context_parallel_size, or"),
    ({PCP: 8, TP: 2}, MeshError, "at most the number of devices"),
    ({PCP: 2, "prefill_kv": "sharded"}, UnsupportedCombination, "needs decode_context_parallel"),
    ({PCP: 2, DCP: 2, "prefill_kv": "replicated"}, UnsupportedCombination, "on one rank"),
    ({PCP: 2, DCP: 2, "prefill_kv": "layer_split"}, UnsupportedCombination, "on one rank"),
    ({PCP: 3, "prefill_kv": "layer_split"}, UnsupportedCombination, "num_layers=2"),
    ({PCP: 2, DCP: 2, "prefill_gather": "q"}, UnsupportedCombination, "prefill_gather='q'"),
    ({PCP: 2, DCP: 2, "prefill_gather": "none"}, UnsupportedCombination, "gathers the cache"),
    ({PCP: 2, "prefill_gather": "kv"}, UnsupportedCombination, "gathers the cache"),
    ({PCP: 2, DCP: 2, "dcp_comm_backend": "a2a"}, UnsupportedCombination, "a2a"),
    ({PCP: 2, "step_form": "static"}, UnsupportedCombination, "dynamic form"),
    ({PCP: 4, "max_num_batched_tokens": 7}, ConfigError, "max_num_batched_tokens=7"),
    ({PCP: 2, TP: 2, DCP: 4}, UnsupportedCombination, "one latent"),
    ({PCP: 2, "kv_transfer_config": {"kv_role": "kv_consumer"}}, UnsupportedCombination, "prompts"),
    ({"prefill_kv": "layer_split"}, UnsupportedCombination, "PCP ranks"),
    ({"prefill_gather": "kv"}, UnsupportedCombination, "PCP ranks"),
]


@pytest.mark.parametrize("settings, error, words", REFUSED)
def test_what_does_not_go_together_is_refused_at_start(settings, error, words, tiny):
    with pytest.raises(error) as caught:
        engine_of(tiny, **settings)
    assert words in str(caught.value)
