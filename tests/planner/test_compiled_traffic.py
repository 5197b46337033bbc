"""Collectives: predicted kind, ranks, count and bytes are those of compiled programs.

Programs are those that an engine with the settings of the deployment compiles, without weights:
decode alone, or the most decode rows and a chunk of a prompt beside them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import pytest

from dcpjax.config import EngineConfig
from dcpjax.engine.blueprint import Blueprint
from dcpjax.engine.collectives import collectives_of
from dcpjax.engine.hlo_text import ArrayType
from dcpjax.engine.step import StepShape
from dcpjax.mesh import decode_mesh, pcp_mesh
from dcpjax.models.checkpoint import open_checkpoint
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.memory import page_bytes
from dcpjax.planner.models import find_model
from dcpjax.planner.traffic import Collective, StepTokens, draft_traffic, step_traffic
from scripts.prefill.outline import Outline
from tests.golden.tiny import write_tiny_model
from tests.golden.tiny_glm import write_tiny_glm

SPARSE = {"num_hidden_layers": 3}
"""Of "periodic": three layers, of which the first two choose and the last two have experts."""
DRAFTING = {**SPARSE, "num_nextn_predict_layers": 1}


@dataclass(frozen=True)
class Case:
    """A model of the tests in a deployment."""

    model: str
    deployment: Deployment
    changed: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        deployment = self.deployment
        words = [self.model, deployment.label(), deployment.exchange, deployment.prefill_gather]
        words += [deployment.prefill_kv, deployment.index_kv, deployment.cache_dtype]
        return " ".join(words) + "".join(f" {name}={value}" for name, value in self.changed)


def case(model: str, changed: dict[str, Any] | None = None, **deployment: Any) -> Case:
    settings = {"page_size": 8, "cache_dtype": "float32", **deployment}
    return Case(model, Deployment(**settings), tuple((changed or {}).items()))


def rare(*args: Any, **settings: Any) -> Any:
    """A case whose parts the others have too: for the long run of tests."""
    return pytest.param(case(*args, **settings), marks=pytest.mark.matrix)


def outline_of(one: Case, folder: Any) -> tuple[Outline, Any]:
    """The programs of the engine, and the model's shape as the planner reads it."""
    is_latent = one.model in ("periodic", "v3")
    write = write_tiny_glm if is_latent else write_tiny_model
    path = str(write(folder, one.model, **dict(one.changed)))
    deployment, shape = one.deployment, find_model(path)
    settings = {
        **deployment.engine_settings(shape),
        "kv_cache_dtype": deployment.cache_dtype,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
    }
    if deployment.draft_tokens:
        drafts = deployment.draft_tokens
        settings["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
    config = EngineConfig.from_settings(path, settings)
    checkpoint = open_checkpoint(path, weights=False)
    blueprint = Blueprint(config, checkpoint.config, "cpu", "float32")
    devices = jax.devices()[: deployment.num_devices]
    mesh = decode_mesh(devices, deployment.dcp)
    if deployment.pcp > 1:
        mesh = pcp_mesh(devices, deployment.pcp, deployment.weight_dcp)
    return Outline(blueprint, mesh, num_pages=11), shape


def shape_of(outline: Outline, *, with_prompts: bool) -> StepShape:
    """The largest step of decode alone, or the widest with a prompt."""
    shapes = [shape for shape in outline.shapes if bool(shape.prefill_rows) == with_prompts]
    is_split = outline.config.residency == "layer_split"
    return replace(max(shapes, key=lambda shape: shape.num_tokens), checks_prefixes=is_split)


def tokens_of(outline: Outline, shape: StepShape) -> StepTokens:
    context = shape.table_width * outline.config.virtual_page_size
    blocks = (shape.decode_rows, shape.decode_width, shape.prefill_rows, shape.prefill_width)
    return StepTokens(*blocks, context, is_expanded=shape.is_expanded)


def compiled_collectives(text: str) -> Counter:
    """(kind, ranks, bytes) of each collective in a compiled program.

    The bytes are counted as :class:`Collective` counts them: of the result, times the ranks where
    it is a share. Sums of which the compiler has made one message are several again.
    """
    found: Counter = Counter()
    for one in collectives_of(text):
        sizes = [ArrayType(*shape).num_bytes for shape in one.shapes]
        if one.kind == "reduce-scatter":
            sizes = [size * one.num_ranks for size in sizes]
        for size in sizes if one.kind == "all-reduce" else [sum(sizes)]:
            found[one.kind, one.num_ranks, size] += one.repeats
    return found


def predicted(collectives: Iterable[Collective]) -> Counter:
    found: Counter = Counter()
    for item in collectives:
        found[item.kind, item.ranks, item.num_bytes] += item.count
    return found


def check_step(one: Case, folder: Any, *, with_prompts: bool) -> None:
    outline, model = outline_of(one, folder)
    shape = shape_of(outline, with_prompts=with_prompts)
    step = tokens_of(outline, shape)
    wanted = predicted(step_traffic(model, one.deployment, step, dtype="float32").collectives)
    assert compiled_collectives(outline.lower(shape).compile().as_text()) == wanted
    assert bool(wanted) == (one.deployment.num_devices > 1)


DECODE = [
    case("gqa", tp=4, dcp=4),
    case("gqa", tp=4, dcp=4, exchange="a2a"),
    case("gqa", tp=4),
    case("gqa", tp=4, dcp=2),
    case("gqa", tp=3, dcp=3),
    case("qwen3", tp=4, dcp=2),
    case("mqa", tp=2),
    case("gqa"),
    case("v3", tp=4, dcp=4),
    rare("v3", tp=4, dcp=2, exchange="a2a"),
    case("periodic", SPARSE, tp=4, dcp=4),
    case("periodic", SPARSE, tp=4, dcp=2, index_kv="replicated"),
    case("periodic", SPARSE, tp=8, dcp=2, exchange="a2a", cache_dtype="bfloat16"),
    case("periodic", {**SPARSE, "index_topk": 64}, tp=4, dcp=4),  # a choice of all there are
    rare("gqa", pcp=2, dcp=2, prefill_kv="sharded"),
    case("periodic", SPARSE, pcp=2, tp=2, dcp=4, prefill_kv="sharded"),
    case("periodic", SPARSE, pcp=2, tp=2, prefill_kv="layer_split"),
]
PROMPTS = [
    case("gqa", tp=4, dcp=2),
    case("gqa", tp=4, dcp=2, prefill_gather="q"),
    rare("gqa", tp=2, dcp=2, prefill_gather="q", exchange="a2a"),
    rare("v3", tp=4, dcp=2),
    case("periodic", SPARSE, tp=2, dcp=2),
    case("periodic", SPARSE, tp=4, dcp=2, index_kv="replicated", exchange="a2a"),
    case("gqa", pcp=4, cache_dtype="bfloat16"),
    case("gqa", pcp=4, dcp=4, prefill_kv="sharded", cache_dtype="bfloat16"),
    case("gqa", pcp=2, prefill_kv="layer_split", cache_dtype="bfloat16"),
    rare("gqa", pcp=2, tp=2, dcp=2, prefill_kv="sharded"),
    case("v3", pcp=2, tp=2),
    rare("periodic", SPARSE, pcp=4, dcp=4, prefill_kv="sharded"),
    case("periodic", SPARSE, pcp=2, tp=2, dcp=4, prefill_kv="sharded"),
    case("periodic", SPARSE, pcp=2, dcp=2, prefill_kv="sharded", index_kv="replicated"),
    rare("periodic", SPARSE, pcp=2, prefill_kv="layer_split", cache_dtype="bfloat16"),
    case("periodic", SPARSE, pcp=2, tp=2, prefill_kv="layer_split"),
    case("periodic", DRAFTING, tp=2, dcp=2, draft_tokens=2),
    case("periodic", DRAFTING, pcp=2, draft_tokens=1),
]
DRAFTS = [
    (case("periodic", DRAFTING, tp=4, dcp=4, draft_tokens=1), False),
    (case("periodic", DRAFTING, tp=2, dcp=2, draft_tokens=3), True),
    (case("periodic", DRAFTING, pcp=2, draft_tokens=2), True),
    (case("v3", {"num_nextn_predict_layers": 1}, tp=4, dcp=2, draft_tokens=2), True),
]


@pytest.mark.parametrize("one", DECODE, ids=str)
def test_collectives_of_decode(one: Case, tmp_path):
    check_step(one, tmp_path, with_prompts=False)


@pytest.mark.parametrize("one", PROMPTS, ids=str)
def test_collectives_of_prompts_beside_decode(one: Case, tmp_path):
    check_step(one, tmp_path, with_prompts=True)


@pytest.mark.parametrize("one", [*DECODE, *PROMPTS], ids=str)
def test_pages_are_those_of_the_engine(one: Case, tmp_path):
    """In bytes, all parts of a rank's page together: whoever keeps which tokens, heads, layers."""
    outline, model = outline_of(one, tmp_path)
    groups = outline.config.head_groups
    sizes = [pool.page_bytes(groups) for pool in outline.pools.by_part.values()]
    assert page_bytes(model, one.deployment) == sum(sizes)


@pytest.mark.parametrize("one, with_prompts", DRAFTS, ids=str)
def test_collectives_of_drafts(one: Case, with_prompts: bool, tmp_path):
    outline, model = outline_of(one, tmp_path)
    shape = shape_of(outline, with_prompts=with_prompts)
    step = tokens_of(outline, shape)
    wanted = predicted(draft_traffic(model, one.deployment, step, dtype="float32").collectives)
    assert compiled_collectives(outline.lower_drafts(shape).compile().as_text()) == wanted


def test_the_reader_of_programs_tells_sizes_apart():
    text = """ENTRY %main (x: f32[2]) -> f32[2] {
  %a = f32[4,2]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
  b = (f32[2,3]{1,0}, f32[2,3]{1,0}) all-to-all(%x, %y), replica_groups={{0,1}}
  %c = bf16[5]{0} reduce-scatter(%x), replica_groups=[1,4]<=[4]
  %d = (f32[2]{0}, s32[3]{0}) all-reduce(%x, %y), replica_groups={{0,1}}, to_apply=%add
"""
    assert compiled_collectives(text) == {
        ("all-reduce", 2, 32): 1,
        ("all-to-all", 2, 48): 1,
        ("reduce-scatter", 4, 40): 1,
        ("all-reduce", 2, 8): 1,
        ("all-reduce", 2, 12): 1,
    }
