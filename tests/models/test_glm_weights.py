"""Checkpoint tensors as parameters of a model with a latent cache.

The law: what the arranged weights compute, rotated by halves, is what the published ones compute
with the rotation that their config names.
"""

import weakref
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from dcpjax.mesh import HeadLayout
from dcpjax.models.checkpoint import open_checkpoint
from dcpjax.models.glm_weights import glm_source
from dcpjax.models.sharding import Sharding
from tests.models.tiny_glm import GLM, V3, V32, write_model

HEADS, NOPE, ROPE, VALUE, RANK = 3, 5, 6, 9, 12
MESHES = [(1, 1), (2, 1), (1, 3), (2, 2), (1, 8)]
TURNED = V3 | {"rope_interleave": False}
RNG = np.random.default_rng(7)
ATTENTION = "model.layers.2.self_attn."


@pytest.fixture(params=[GLM, V32, V3, TURNED], ids=["glm", "v32", "v3", "v3 halves"])
def checkpoint(request, tmp_path):
    write_model(tmp_path, request.param)
    return open_checkpoint(str(tmp_path))


@pytest.fixture
def glm(tmp_path):
    write_model(tmp_path, GLM)
    return open_checkpoint(str(tmp_path))


def parameter(checkpoint, *path, mesh=(1, 1), dtype=np.float32):
    layout = Sharding(HeadLayout(HEADS, 1, *mesh))
    return glm_source(path, checkpoint.config, layout).read(checkpoint, dtype)


def rotated(x, position, is_interleaved):
    """[..., D]: each pair of columns turned by its own angle."""
    half = x.shape[-1] // 2
    pairs = (x[..., 0::2], x[..., 1::2]) if is_interleaved else (x[..., :half], x[..., half:])
    angle = position * 0.3 ** np.arange(half)
    first = pairs[0] * np.cos(angle) - pairs[1] * np.sin(angle)
    second = pairs[1] * np.cos(angle) + pairs[0] * np.sin(angle)
    return np.concatenate([first, second], axis=-1)


def published_attention(checkpoint, latent_q, hidden):
    """Scores [H] of a query at position 5 with a key at 2, and the key's values [H, v]."""
    read, turned = checkpoint.read, checkpoint.config.is_rope_interleaved
    q = (read(f"{ATTENTION}q_b_proj.weight") @ latent_q).reshape(HEADS, NOPE + ROPE)
    latent = read(f"{ATTENTION}kv_a_proj_with_mqa.weight") @ hidden
    expanded = (read(f"{ATTENTION}kv_b_proj.weight") @ latent[:RANK]).reshape(HEADS, -1)
    scores = (q[:, :NOPE] * expanded[:, :NOPE]).sum(-1)
    scores += rotated(q[:, NOPE:], 5, turned) @ rotated(latent[RANK:], 2, turned)
    return scores, expanded[:, NOPE:]


def arranged_attention(checkpoint, latent_q, hidden, mesh):
    """The same from the parameters, by placed head, with the products absorbed."""
    part = {
        name: parameter(checkpoint, "layers", 2, "attention", name, mesh=mesh)
        for name in ("q_b", "kv_a", "k_b", "v_b")
    }
    q = np.einsum("l,lhd->hd", latent_q, part["q_b"])
    latent = hidden @ part["kv_a"]
    absorbed = np.einsum("hd,hdr->hr", q[:, :NOPE], part["k_b"])
    scores = absorbed @ latent[:RANK]
    scores += rotated(q[:, NOPE:], 5, False) @ rotated(latent[RANK:], 2, False)
    return scores, np.einsum("r,hrv->hv", latent[:RANK], part["v_b"])


@pytest.mark.parametrize("mesh", MESHES)
def test_scores_and_values_are_those_of_the_published_weights(checkpoint, mesh):
    latent_q, hidden = RNG.standard_normal(14), RNG.standard_normal(20)
    scores, values = published_attention(checkpoint, latent_q, hidden)
    placed_scores, placed_values = arranged_attention(checkpoint, latent_q, hidden, mesh)
    source = HeadLayout(HEADS, 1, *mesh).q_head_source
    real = source >= 0
    assert sorted(source[real]) == list(range(HEADS))
    np.testing.assert_allclose(placed_scores[real], scores[source[real]], rtol=1e-5)
    np.testing.assert_allclose(placed_values[real], values[source[real]], rtol=1e-5)
    assert not placed_scores[~real].any() and not placed_values[~real].any()


def test_the_other_rotation_would_be_seen(glm):
    """The twin: weights that are read as half-split give other scores."""
    latent_q, hidden = RNG.standard_normal(14), RNG.standard_normal(20)
    wrong = replace(glm, config=replace(glm.config, is_rope_interleaved=False))
    scores, values = published_attention(glm, latent_q, hidden)
    wrong_scores, same_values = arranged_attention(wrong, latent_q, hidden, (1, 1))
    np.testing.assert_allclose(same_values, values, rtol=1e-5)
    assert not np.allclose(wrong_scores, scores, rtol=1e-2)


@pytest.mark.parametrize("mesh", MESHES)
def test_output_rows_meet_their_heads(glm, mesh):
    heads = RNG.standard_normal((HEADS, VALUE)).astype(np.float32)
    source = HeadLayout(HEADS, 1, *mesh).q_head_source
    placed = np.where(source[:, None] >= 0, heads[source], 100)  # zeros meet what is no head
    out = np.einsum("hv,hve->e", placed, parameter(glm, "layers", 0, "attention", "o", mesh=mesh))
    expected = glm.read("model.layers.0.self_attn.o_proj.weight") @ heads.reshape(-1)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "values, path, layer",
    [
        (GLM, ("layers", 3), 3),
        (GLM, ("draft", "layer"), 4),
        (V32, ("layers", 2), 2),
    ],
    ids=["glm", "glm draft", "v32"],
)
def test_index_scores_are_those_of_the_published_weights(tmp_path, values, path, layer):
    write_model(tmp_path, values)
    checkpoint = open_checkpoint(str(tmp_path))
    prefix, width = f"model.layers.{layer}.self_attn.indexer.", 8
    turned = checkpoint.config.indexer.is_rope_interleaved
    assert turned == (values is GLM)
    latent_q, hidden = RNG.standard_normal(14), RNG.standard_normal(20)

    def scores(q, k, weight, bias, is_interleaved):
        k = (k - k.mean()) / k.std() * weight + bias
        both = (
            np.concatenate([rotated(x[..., :ROPE], at, is_interleaved), x[..., ROPE:]], -1)
            for x, at in ((q, 5), (k, 2))
        )
        return np.inner(*both)

    read = checkpoint.read
    published = scores(
        (read(f"{prefix}wq_b.weight") @ latent_q).reshape(2, width),
        read(f"{prefix}wk.weight") @ hidden,
        read(f"{prefix}k_norm.weight"),
        read(f"{prefix}k_norm.bias"),
        turned,
    )
    q_b, k, weight, bias, weights = (
        parameter(checkpoint, *path, "attention", "indexer", *name)
        for name in (("q_b",), ("k",), ("k_norm", "weight"), ("k_norm", "bias"), ("weights",))
    )
    arranged = scores(np.einsum("l,lhd->hd", latent_q, q_b), hidden @ k, weight, bias, False)
    np.testing.assert_allclose(arranged, published, rtol=1e-5)
    np.testing.assert_array_equal(weights.T, read(f"{prefix}weights_proj.weight"))


def test_experts_are_stacked(glm):
    gate_up = parameter(glm, "layers", 1, "mlp", "gate_up")
    down = parameter(glm, "layers", 1, "mlp", "down")
    assert (gate_up.shape, down.shape) == ((4, 20, 2, 7), (4, 7, 20))
    for expert in range(4):
        prefix = f"model.layers.1.mlp.experts.{expert}."
        for place, name in enumerate(("gate", "up")):
            stored = glm.read(f"{prefix}{name}_proj.weight")
            np.testing.assert_array_equal(gate_up[expert, :, place].T, stored)
        np.testing.assert_array_equal(down[expert].T, glm.read(f"{prefix}down_proj.weight"))


@pytest.mark.parametrize(
    "path, prefix",
    [
        (("layers", 0, "mlp"), "model.layers.0.mlp."),
        (("layers", 3, "mlp", "shared"), "model.layers.3.mlp.shared_experts."),
        (("draft", "layer", "mlp", "shared"), "model.layers.4.mlp.shared_experts."),
    ],
)
def test_dense_products(glm, path, prefix):
    gate_up = parameter(glm, *path, "gate_up")
    for place, name in enumerate(("gate", "up")):
        stored = glm.read(f"{prefix}{name}_proj.weight")
        np.testing.assert_array_equal(gate_up[:, place].T, stored)
    stored = glm.read(f"{prefix}down_proj.weight")
    np.testing.assert_array_equal(parameter(glm, *path, "down").T, stored)


@pytest.mark.parametrize(
    "path, name, is_turned",
    [
        ("embedding.weight", "model.embed_tokens.weight", False),
        ("norm.weight", "model.norm.weight", False),
        ("head.weight", "lm_head.weight", False),
        ("layers.1.attention_norm.weight", "model.layers.1.input_layernorm.weight", False),
        ("layers.1.mlp_norm.weight", "model.layers.1.post_attention_layernorm.weight", False),
        ("layers.1.attention.q_a", "model.layers.1.self_attn.q_a_proj.weight", True),
        (
            "layers.1.attention.q_a_norm.weight",
            "model.layers.1.self_attn.q_a_layernorm.weight",
            False,
        ),
        (
            "layers.1.attention.kv_a_norm.weight",
            "model.layers.1.self_attn.kv_a_layernorm.weight",
            False,
        ),
        ("layers.1.mlp.router.weight", "model.layers.1.mlp.gate.weight", False),
        ("layers.1.mlp.router.bias", "model.layers.1.mlp.gate.e_score_correction_bias", False),
        ("draft.embedding_norm.weight", "model.layers.4.enorm.weight", False),
        ("draft.hidden_norm.weight", "model.layers.4.hnorm.weight", False),
        ("draft.projection", "model.layers.4.eh_proj.weight", True),
        ("draft.norm.weight", "model.layers.4.shared_head.norm.weight", False),
        ("draft.layer.mlp_norm.weight", "model.layers.4.post_attention_layernorm.weight", False),
    ],
)
def test_what_is_taken_as_it_is(glm, path, name, is_turned):
    steps = [int(step) if step.isdigit() else step for step in path.split(".")]
    read = parameter(glm, *steps)
    np.testing.assert_array_equal(read.T if is_turned else read, glm.read(name))


def test_tensors_are_converted_one_by_one(glm):
    """A layer's experts are never there all at once as what they are read as, float32 here."""
    alive, most = set(), 0

    def read(name):
        nonlocal most
        tensor = np.array(glm.read(name))
        alive.add(name)
        weakref.finalize(tensor, alive.remove, name)
        most = max(most, len(alive))
        return tensor

    path = ("layers", 1, "mlp", "gate_up")
    experts = parameter(replace(glm, read=read), *path, dtype=ml_dtypes.bfloat16)
    assert most == 1 and not alive
    whole = parameter(replace(glm, read=read), *path)
    assert most == 2, "the twin: tensors that need no conversion are kept until arranged"
    np.testing.assert_array_equal(experts, whole.astype(ml_dtypes.bfloat16))
