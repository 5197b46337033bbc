"""Which prompts are computed from expanded latents, and that the tokens are the same as without.

With a sparse model that is decided chunk by chunk: those that end within ``index_topk`` tokens are,
later ones are not, in one prompt as in those beside it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcpjax.config import EngineConfig
from dcpjax.engine.blueprint import Blueprint
from dcpjax.engine.engine import Engine
from dcpjax.engine.packing import all_shapes, smallest_fitting
from dcpjax.engine.plan import Segment, StepPlan, StepShapes
from dcpjax.engine.request import Request
from dcpjax.engine.step import StepShape
from dcpjax.errors import ConfigError, UnsupportedCombination
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.engine.drafting_glm import drafting_glm
from tests.engine.serving import Served, opening_engines, request_of, serve
from tests.engine.workload import assert_same
from tests.golden.tiny import CONFIGS, random_tokens, write_tiny_model
from tests.golden.tiny_glm import write_tiny_glm

TOP_K, CHUNK, LONGEST, VOCABULARY = 24, 16, 96, 61
FORCED = {"attention_config": {"sparse_mla_force_mqa": True}}
NOT_FORCED = {"attention_config": {"sparse_mla_force_mqa": False}}
SMALL: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": CHUNK,
    "max_model_len": LONGEST,
    "block_size": 4,
}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}


def ranks(dcp: int, **settings: Any) -> dict[str, Any]:
    return {"tensor_parallel_size": dcp, "decode_context_parallel_size": dcp, **settings}


# The setting


def test_the_setting_is_an_object() -> None:
    for asked in (FORCED, NOT_FORCED, {"attention_config": {}}):
        config = EngineConfig.from_settings("m", asked).attention_config
        assert config is not None
        assert config.sparse_mla_force_mqa == asked["attention_config"].get("sparse_mla_force_mqa")


@pytest.mark.parametrize(
    "settings, rule",
    [
        ({"backend": "FLASHMLA", "x": 1}, "unknown attention settings backend, x"),
        ({"sparse_mla_force_mqa": 1}, "sparse_mla_force_mqa is of type bool"),
        ({"sparse_mla_force_mqa": "yes"}, "sparse_mla_force_mqa is of type bool"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        EngineConfig.from_settings("m", {"attention_config": settings})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """``wide``: latents as fp8_ds_mla stores them. ``drafting`` shares the choice among drafts."""
    folder: Path = tmp_path_factory.mktemp("models")
    wide = write_tiny_glm(folder / "wide", "periodic", index_topk=TOP_K, kv_lora_rank=128)
    shares = {"index_topk": TOP_K, "index_share_for_mtp_iteration": True}
    return {
        "drafting": drafting_glm(folder / "drafting", **shares),
        "wide": open_checkpoint(str(wide)),
        "v3": open_checkpoint(str(write_tiny_glm(folder / "v3", "v3"))),
        "llama": open_checkpoint(str(write_tiny_model(folder / "gqa", next(iter(CONFIGS))))),
    }


def blueprint_of(checkpoint: Checkpoint, **settings: Any) -> Blueprint:
    config = EngineConfig.from_settings("m", SMALL | settings)
    return Blueprint(config, checkpoint.config, "cpu", "float32")


@pytest.mark.parametrize(
    "model, settings, contexts",
    [
        ("drafting", {}, (TOP_K, 0)),
        ("drafting", NOT_FORCED, (TOP_K, 0)),
        ("drafting", {"max_model_len": TOP_K + 1}, (TOP_K, 0)),
        ("drafting", {"max_model_len": TOP_K}, (TOP_K,)),
        ("drafting", {"max_model_len": TOP_K - 1}, (TOP_K - 1,)),
        ("drafting", FORCED, (0,)),
        ("drafting", {"step_form": "static"}, (0,)),
        ("v3", NOT_FORCED, (LONGEST,)),
        ("v3", FORCED, (0,)),
        ("llama", {}, (0,)),
    ],
)
def test_programs_are_two_only_where_a_prompt_decides(model, settings, contexts, models):
    shapes = blueprint_of(models[model], **settings).step_shapes
    assert shapes.expanded_contexts == contexts
    compiled = all_shapes(shapes, [8])
    assert [s for s in compiled if s.is_expanded and not s.prefill_rows] == []
    prompts = len(shapes.prefill) * len(contexts)
    assert len(compiled) == len(set(map(str, compiled))) == len(shapes.decode_rows) + prompts


def widths_of(checkpoint: Checkpoint, **settings: Any) -> dict[int, tuple[int, ...]]:
    shapes = blueprint_of(checkpoint, max_num_batched_tokens=512, **settings).step_shapes
    return {width: shapes.contexts_of(width) for _, width in shapes.prefill}


def test_narrow_chunks_of_a_dense_model_gain_nothing(models):
    """16 columns to keys of 10 and values of 14: from 16 · 24 / (32 − 24) = 48 queries on, less."""
    dense = models["v3"]
    width = blueprint_of(dense).step_shapes.least_expanded_width
    assert width == 49
    assert widths_of(dense) == {64: (LONGEST,), 512: (LONGEST,)}
    pcp = {"prefill_context_parallel_size": 2}  # a rank computes a quarter of a chunk at a time
    assert widths_of(dense, **pcp) == {64: (0,), 512: (LONGEST,)}
    assert widths_of(dense, **pcp, **NOT_FORCED) == {64: (LONGEST,), 512: (LONGEST,)}
    assert widths_of(models["drafting"], **pcp) == {64: (TOP_K, 0), 512: (TOP_K, 0)}
    short = dataclasses.replace(dense.config, kv_lora_rank=12)  # as many as are made of them
    assert widths_of(dataclasses.replace(dense, config=short)) == {64: (0,), 512: (0,)}


def test_glm_and_deepseek_gain_with_chunks_of_hundreds(models):
    """171 and 398 of the architecture page."""
    for sizes, least in (((512, 128, 128), 171), ((512, 192, 256), 399)):
        latent, nope, value = sizes
        config = dataclasses.replace(
            models["v3"].config, kv_lora_rank=latent, qk_nope_head_dim=nope, v_head_dim=value
        )
        shapes = blueprint_of(dataclasses.replace(models["v3"], config=config)).step_shapes
        assert shapes.least_expanded_width == least


@pytest.mark.parametrize("asked", [True, False])
def test_a_model_without_latents_refuses_the_setting(asked, models):
    settings = {"attention_config": {"sparse_mla_force_mqa": asked}}
    with pytest.raises(UnsupportedCombination, match="caches none") as error:
        _ = blueprint_of(models["llama"], **settings).sharding
    assert error.value.values == {
        "sparse_mla_force_mqa": asked,
        "architecture": "LlamaForCausalLM",
    }


@pytest.mark.parametrize("form", ["static", "unrolled"])
def test_the_static_form_never_expands(form, models):
    assert blueprint_of(models["v3"], step_form=form, **FORCED).sharding
    with pytest.raises(UnsupportedCombination, match="never expand") as error:
        _ = blueprint_of(models["v3"], step_form=form, **NOT_FORCED).sharding
    assert error.value.values == {"sparse_mla_force_mqa": False, "step_form": form}


# Which program a plan gets

SHAPES = all_shapes(
    StepShapes((1, 4), ((1, 8), (2, 8), (1, 64)), expanded_contexts=(TOP_K, 0)), [40]
)


def segment(name: str, start: int, stop: int) -> Segment:
    request: Request = request_of(name, [0] * stop)
    return Segment(request, start, stop - start, samples=True)


def fitting(*prompts: tuple[int, int], width: int = 8, decode: tuple[int, ...] = ()) -> StepShape:
    plan = StepPlan(
        decode=tuple(segment(f"decode {at}", at, at + 1) for at in decode),
        prefill=tuple(segment(f"prompt {start}", start, stop) for start, stop in prompts),
        prefill_width=width,
    )
    return smallest_fitting(SHAPES, plan, 4)


@pytest.mark.parametrize(
    "prompts, width, is_expanded",
    [
        ([(0, 1)], 8, True),
        ([(TOP_K - 8, TOP_K)], 8, True),
        ([(TOP_K - 7, TOP_K + 1)], 8, False),
        ([(0, TOP_K)], 64, True),
        ([(0, TOP_K + 1)], 64, False),
        ([(0, 8), (TOP_K, TOP_K + 2)], 8, False),
        ([(0, 8), (TOP_K - 2, TOP_K)], 8, True),
    ],
)
@pytest.mark.parametrize("decode", [(), (3, 130)])
def test_a_chunk_is_expanded_if_it_ends_within_what_is_chosen(prompts, width, is_expanded, decode):
    """Decode rows may be anywhere."""
    shape = fitting(*prompts, width=width, decode=decode)
    assert (shape.prefill_rows, shape.prefill_width) == (len(prompts), width)
    assert shape.is_expanded == is_expanded


def test_decode_steps_have_one_form():
    assert fitting(decode=(5, 6)) == StepShape(4, 0, 0, 40)


# Tokens


def requests() -> list[Request]:
    """Prompts around the chunk and around what is chosen, some with a common beginning."""
    shared = random_tokens("expanded", 20, VOCABULARY)
    prompts = [
        (shared if number % 3 == 2 else []) + random_tokens(f"e {number}", length, VOCABULARY)
        for number, length in enumerate((1, 15, 4, 16, 17, 13, 23, 24, 5, 25, 47))
    ]
    return [
        request_of(f"{number} of {len(prompt)}", prompt, max_tokens=(40, 1, 33)[number % 3])
        for number, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def open_engine(models) -> Iterator[Callable[..., Engine]]:
    with opening_engines() as open_one:
        yield lambda model, **settings: open_one(models[model], **SMALL | NOT_FORCED | settings)


ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "sparse, dcp 4, drafts, few pages": (
        "drafting",
        ranks(4, dcp_comm_backend="a2a", cp_kv_cache_interleave_size=2, num_pages=7, **MTP),
    ),
    "sparse, one device, drafts": ("drafting", {"num_pages": 200, **MTP}),
    "sparse, dcp 2, whole index": ("drafting", ranks(2, index_kv="replicated", num_pages=60)),
    "sparse, pcp 2": (
        "drafting",
        {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2, "num_pages": 60},
    ),
    "sparse, layers on 2 x 2": (
        "drafting",
        {
            "tensor_parallel_size": 2,
            "prefill_context_parallel_size": 2,
            "prefill_kv": "layer_split",
            "num_pages": 60,
            **MTP,
        },
    ),
    "dense, dcp 2": ("v3", ranks(2, num_pages=60)),
    "dense, pcp 2": ("v3", {"prefill_context_parallel_size": 2, "num_pages": 60}),
}
QUICK = ("sparse, dcp 4, drafts, few pages", "dense, dcp 2")


@dataclasses.dataclass(frozen=True)
class Absorbed:
    """What one device says, whose prompts meet latents as they are, and what became of drafts."""

    served: dict[str, Served]
    speculation: dict[str, Any] | None


@pytest.fixture(scope="module")
def absorbed(open_engine) -> Callable[[str], Absorbed]:
    @functools.cache
    def serve_once(model: str) -> Absorbed:
        engine = open_engine(model, num_pages=200, **FORCED, **(MTP if model != "v3" else {}))
        return Absorbed(serve(engine, requests()), engine.stats()["speculation"])

    return serve_once


def of_quick(name: str) -> Any:
    return pytest.param(name, marks=() if name in QUICK else pytest.mark.matrix)


@pytest.mark.parametrize("name", [of_quick(name) for name in ENGINES])
def test_tokens_are_those_of_the_absorbed_form(name, open_engine, absorbed):
    model, settings = ENGINES[name]
    engine = open_engine(model, **settings)
    served, expected = serve(engine, requests()), absorbed(model)
    for request, found in expected.served.items():
        assert_same(served[request], found)
    stats = engine.stats()
    assert (stats["num_preemptions"] > 0) == ("few pages" in name)
    if "drafts" in name:
        assert stats["acceptance_length"] > 1.5
    if name == "sparse, one device, drafts":  # in which each draft is verified, as in the other
        assert stats["speculation"] == expected.speculation
    assert any("latents expanded" in audit.step for audit in engine.runner.audits)


ROUNDED = [("wide", "fp8_ds_mla", 2), ("wide", "fp8", 1), ("wide", "bfloat16", 2), ("v3", "fp8", 1)]


@pytest.mark.parametrize(
    "model, kv_cache_dtype, dcp",
    [
        pytest.param(*case, marks=() if case[1] == "fp8_ds_mla" else pytest.mark.matrix)
        for case in ROUNDED
    ],
)
def test_rounded_caches_give_the_tokens_of_the_absorbed_form(
    model, kv_cache_dtype, dcp, open_engine
):
    """Both forms have each row from where the other has it: from pages, or from registers."""
    few = {"kv_cache_dtype": kv_cache_dtype, "num_pages": 60, **ranks(dcp)}
    expanded, absorbed = (
        serve(open_engine(model, **few, **more), requests()) for more in ({}, FORCED)
    )
    for request, expected in absorbed.items():
        assert_same(expanded[request], expected)


def test_prefixes_go_on_in_either_form(open_engine):
    """Pages that one form has filled are read by the other."""
    engines = [open_engine("drafting", num_pages=60, **more) for more in ({}, FORCED)]
    prompt = random_tokens("prefix", TOP_K - 3, VOCABULARY)
    tokens = []
    for engine in engines:
        params = {"max_tokens": 2 * CHUNK, "ignore_eos": True}
        first = serve(engine, [request_of("first", prompt, **params)])["first"]
        longer = prompt + first.tokens
        again = serve(engine, [request_of("again", longer, **params)])["again"]
        assert again.num_cached_tokens == (len(longer) - 1) // 4 * 4
        short = serve(engine, [request_of("short", prompt[:-2] + [5], **params)])["short"]
        assert 0 < short.num_cached_tokens < TOP_K
        tokens.append([first.tokens, again.tokens, short.tokens])
    assert tokens[0] == tokens[1]
    assert np.size(tokens[0]) == 3 * 2 * CHUNK
