"""Models with a latent cache and chosen tokens: their steps and drafts as programs for Neuron."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dcpjax.config import EngineConfig
from dcpjax.engine.draft_step import make_draft_step
from dcpjax.mesh import decode_mesh
from neuron import step_calls
from neuron.cpu import CpuProgram
from neuron.lint import lint
from neuron.program import Program
from neuron.programs import Deployment, build_programs, find_calls
from neuron.targets import find_target
from tests.models.tiny_glm import GLM, write_config
from tests.neuron.models import CONFIGS
from tests.neuron.test_cpu import bits, random_inputs

TRN2 = find_target("trn2")
PUBLISHED = Path(__file__).resolve().parents[1] / "assets" / "glm-5.2" / "config.json"
SHORT = CONFIGS / "glm-5.2-three-layers.json"
MTP = {"method": "mtp", "num_speculative_tokens": 2}
TINY: dict[str, Any] = {
    "tensor_parallel_size": 4,
    "decode_context_parallel_size": 4,
    "block_size": 4,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "num_pages": 12,
    "step_form": "static",
}


def deployment(model: Path, **settings: Any) -> Deployment:
    return Deployment(EngineConfig.from_settings(str(model), settings), TRN2)


def errors(program: Program) -> list[str]:
    return [str(found) for found in lint(program, TRN2) if found.rule.severity == "error"]


@pytest.fixture
def tiny(tmp_path) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return write_config(tmp_path, GLM | {"num_hidden_layers": 2} | heads)


def test_the_short_config_has_layers_of_every_kind_of_the_published_one():
    short, published = json.loads(SHORT.read_text()), json.loads(PUBLISHED.read_text())
    depth = ("num_hidden_layers", "first_k_dense_replace", "indexer_types", "mlp_layer_types")
    kinds = set(zip(short["indexer_types"], short["mlp_layer_types"], strict=True))
    assert kinds == set(zip(published["indexer_types"], published["mlp_layer_types"], strict=True))
    assert {**published, **{name: short[name] for name in depth}} == short


def test_glm_5_breaks_no_rule():
    settings = {"tensor_parallel_size": 4, "decode_context_parallel_size": 4, "block_size": 32}
    settings |= {"dtype": "bfloat16", "max_model_len": 8192, "speculative_config": MTP}
    programs = build_programs(deployment(SHORT, **settings), all_buckets=False)
    assert [one.kind for one in programs][:4] == ["decode", "segment", "prefill", "draft"]
    for program in programs:
        assert not errors(program), program.name
        assert len(program.inputs) < 128


@pytest.mark.parametrize(
    "settings",
    [
        {"index_kv": "replicated", "step_form": "unrolled"},
        {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 4},
        {"tensor_parallel_size": 1, "decode_context_parallel_size": 1},
    ],
    ids=["whole-keys", "two-groups", "one-rank"],
)
def test_every_sharding_breaks_no_rule(tiny, settings):
    tiny_settings = TINY | {"speculative_config": MTP} | settings
    for program in build_programs(deployment(tiny, **tiny_settings), all_buckets=False):
        assert not errors(program), program.name


def test_pools_are_named_as_they_are(tiny):
    one = deployment(tiny, **TINY, index_kv="replicated")
    program = find_calls(one, all_buckets=False)[0].lower()
    widths = {spec.name: spec.shape[-1] for spec in program.inputs if spec.name.startswith("pool")}
    latent, keys = GLM["kv_lora_rank"] + GLM["qk_rope_head_dim"], GLM["index_head_dim"]
    assert widths == {
        "pool_latent": latent,
        "pool_draft_latent": latent,
        "pool_indexer": keys,
        "pool_draft_indexer": keys,
    }


def test_a_position_that_nothing_bounds_is_found(tiny, monkeypatch):
    """Drafts behind counts that come from sums: a gather that is only clamped breaks a rule."""

    def unbounded(*arguments, **settings):
        monkeypatch.setattr("dcpjax.engine.draft_step._last_tokens", lambda _, counts: counts)
        return make_draft_step(*arguments, **settings)

    monkeypatch.setattr(step_calls, "make_draft_step", unbounded)
    programs = build_programs(deployment(tiny, **TINY, speculative_config=MTP), all_buckets=False)
    (draft,) = (one for one in programs if one.kind == "draft")
    assert any("gather-index" in one for one in errors(draft))


@pytest.mark.parametrize("kind", ["decode", "draft"])
def test_bytes_compute_what_jit_computes(tiny, kind):
    one = deployment(tiny, **TINY, speculative_config=MTP)
    (call,) = (call for call in find_calls(one, all_buckets=False) if call.kind == kind)
    mesh = decode_mesh(jax.devices()[:4], 4)
    inputs = random_inputs(call, mesh, np.random.default_rng(0))
    arguments = jax.tree.unflatten(jax.tree.structure(call.arguments), inputs)
    expected = jax.tree.leaves(jax.jit(call.function)(*arguments))
    outputs = [(output.shape, output.sharding.spec) for output in expected]
    run = CpuProgram(call.lower().to_bytes(), mesh, outputs)
    for found, wanted in zip(run(*inputs), expected, strict=True):
        assert bits(found) == bits(wanted)
