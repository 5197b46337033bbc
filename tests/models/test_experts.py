"""Expert layers against NumPy and transformers, over ranks and in both forms."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dcpjax.config.glm import ExpertsConfig
from dcpjax.errors import ConfigError, MeshError
from dcpjax.models.experts import Experts, tile_rows
from dcpjax.models.router import is_among_largest
from tests.models.expert_layers import (
    choose_by_numpy,
    glm_config,
    layer_by_numpy,
    make_layer,
    random_parameters,
    sharding_of,
)

TOLERANCE = 1e-5
WIDTH = 12
GROUPED = {"num_groups": 8, "groups_per_token": 4}
FORMS = ("dynamic", "static", "unrolled")


def rows(tokens: int, seed: int = 0, width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32)


def config_of(per_token: int = 2, num_experts: int = 16, **more):
    settings = {"width": 6, "scale": 2.5, **more}
    return glm_config(WIDTH, num_experts=num_experts, num_per_token=per_token, **settings)


def assert_near(found, expected: np.ndarray) -> None:
    scale = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * scale)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", [{}, GROUPED], ids=["one group", "groups"])
@pytest.mark.parametrize("per_token", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 9])
def test_the_layer_is_what_numpy_computes(form, groups, per_token, tokens):
    config = config_of(per_token, **groups)
    parameters, x = random_parameters(config, per_token), rows(tokens)
    found = make_layer(config, parameters, form=form)(x)
    assert found.dtype == jnp.float32
    assert_near(found[0], layer_by_numpy(config, parameters, x))


@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 130])
@pytest.mark.parametrize("num_experts", [2, 3, 32])
def test_any_number_of_tokens_is_cut_into_tiles(tokens, num_experts):
    config = config_of(2, num_experts)
    parameters, x = random_parameters(config, tokens), rows(tokens)
    assert_near(make_layer(config, parameters)(x)[0], layer_by_numpy(config, parameters, x))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks, dcp", [(2, 1), (2, 2), (4, 2), (8, 4), (8, 1)])
def test_every_rank_has_the_whole_result(form, ranks, dcp):
    config = config_of(3, **GROUPED)
    parameters, x = random_parameters(config, ranks), rows(7)
    found = make_layer(config, parameters, ranks=ranks, dcp=dcp, form=form)(x)
    assert found.shape == (ranks, 7, WIDTH)
    for of_rank in found:
        assert_near(of_rank, layer_by_numpy(config, parameters, x))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("more", [{"num_shared": 0}, {"num_shared": 2}, {"is_normalised": False}])
def test_shared_experts_and_normalisation_are_optional(form, more):
    config = config_of(4, **more)
    parameters, x = random_parameters(config, 0), rows(5)
    found = make_layer(config, parameters, ranks=4, form=form)(x)
    assert_near(found[0], layer_by_numpy(config, parameters, x))


def test_there_is_one_sum_over_the_ranks():
    config = config_of(2)
    layer = make_layer(config, random_parameters(config, 0), ranks=2)
    assert layer.lower(rows(3)).as_text().count("stablehlo.all_reduce") == 1


@pytest.mark.parametrize("form", ["static", "unrolled"])
def test_the_static_form_has_only_what_neuron_compiles(form):
    """The dynamic one has all of it, so the words are those of this version of JAX."""
    config = config_of(3, **GROUPED)
    words = ("top_k", "stablehlo.sort", "stablehlo.scatter", "stablehlo.gather")

    def program(form: str) -> str:
        return make_layer(config, random_parameters(config, 0), form=form).lower(rows(3)).as_text()

    assert all(word in program("dynamic") for word in words)
    assert not any(word in program(form) for word in words)


@pytest.mark.parametrize("form", FORMS)
def test_all_tokens_may_choose_the_same_experts(form):
    """More pairs of one expert than a tile has rows, and ranks with nothing to do."""
    config = config_of(2)
    parameters, x = random_parameters(config, 0), rows(100)
    parameters["router.bias"][[3, 4]] = 5.0
    found = make_layer(config, parameters, ranks=8, form=form)(x)
    assert_near(found[0], layer_by_numpy(config, parameters, x))


@pytest.mark.parametrize("form", FORMS)
def test_the_bias_chooses_and_does_not_weigh(form):
    """The same bias for all changes nothing, one for some changes the choice alone."""
    config = config_of(2, is_normalised=False)
    parameters, x = random_parameters(config, 0), rows(6)
    plain = make_layer(config, parameters, form=form)(x)
    shifted = {**parameters, "router.bias": parameters["router.bias"] + np.float32(64)}
    np.testing.assert_allclose(make_layer(config, shifted, form=form)(x), plain, rtol=1e-5)
    moved = {**parameters, "router.bias": -parameters["router.bias"]}
    assert_near(make_layer(config, moved, form=form)(x)[0], layer_by_numpy(config, moved, x))
    assert not np.allclose(layer_by_numpy(config, moved, x), plain[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", [{}, GROUPED], ids=["one group", "groups"])
def test_among_equal_scores_the_lowest_expert_is_chosen(form, groups):
    """Scores of few values, exact in float32: almost all of them are equal to others."""
    config = config_of(5, **groups)
    parameters = random_parameters(config, 0)
    random = np.random.default_rng(1)
    parameters["router.weight"] = random.integers(-1, 2, (16, WIDTH)).astype(np.float32)
    parameters["router.bias"] = np.zeros(16, np.float32)
    x = random.integers(-1, 2, (20, WIDTH)).astype(np.float32)
    x[0] = 0  # all equal
    assert list(choose_by_numpy(config.experts, parameters, x[0])) == [0, 1, 2, 3, 4]
    found = make_layer(config, parameters, form=form)(x)
    assert_near(found[0], layer_by_numpy(config, parameters, x))


@pytest.mark.parametrize("form", FORMS)
def test_scores_of_zero_do_not_divide_by_zero(form):
    config = config_of(2)
    parameters = random_parameters(config, 0)
    parameters["router.weight"] = np.full((16, WIDTH), -100, np.float32)
    x = np.abs(rows(3)) + 1
    shared = make_layer(config, {**parameters, "down": parameters["down"] * 0}, form=form)(x)
    found = make_layer(config, parameters, form=form)(x)
    np.testing.assert_array_equal(found, shared)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_padding_changes_no_other_row(form, ranks):
    config = config_of(3)
    parameters, x = random_parameters(config, 0), rows(11)
    is_real = np.arange(11) % 3 != 1
    x[~is_real] = np.nan
    found = make_layer(config, parameters, ranks=ranks, form=form)(x, is_real)
    assert_near(found[0][is_real], layer_by_numpy(config, parameters, x[is_real]))


def count_tiles(monkeypatch: pytest.MonkeyPatch, config, x, is_real=None) -> int:
    """Trips of the loop over tiles."""
    trips = []
    loop = lax.fori_loop

    def counted(start, stop, body, init):
        jax.debug.callback(lambda n: trips.append(int(n)), stop)
        return loop(start, stop, body, init)

    layer = make_layer(config, random_parameters(config, 0))
    monkeypatch.setattr(lax, "fori_loop", counted)
    layer(x, is_real).block_until_ready()
    monkeypatch.undo()
    jax.effects_barrier()
    (count,) = trips
    return count


@pytest.mark.parametrize("num_experts", [8, 64, 256])
def test_one_token_costs_its_own_experts(monkeypatch, num_experts):
    assert count_tiles(monkeypatch, config_of(4, num_experts), rows(1)) == 4


def test_padding_costs_no_tiles(monkeypatch):
    config, x = config_of(4, 64), rows(20)
    x[2:] = np.nan
    is_real = np.arange(20) < 2
    assert 4 <= count_tiles(monkeypatch, config, x, is_real) <= 8
    assert count_tiles(monkeypatch, config, x, is_real & False) == 0


def test_an_expert_of_many_tokens_has_several_tiles(monkeypatch):
    """One expert alone: its tokens are cut into full tiles and a last one."""
    config = config_of(1, 1)
    assert tile_rows(130, config.experts) == 64
    assert count_tiles(monkeypatch, config, rows(130)) == 3
    assert count_tiles(monkeypatch, config, rows(128)) == 2


@pytest.mark.parametrize(
    "tokens, num_experts, rows_of_tile",
    [(1, 256, 2), (32, 256, 2), (64, 256, 4), (512, 256, 32), (4096, 256, 64), (0, 8, 2)],
)
def test_tiles_are_about_twice_what_an_expert_gets(tokens, num_experts, rows_of_tile):
    config = ExpertsConfig(layers=(0,), num_experts=num_experts, num_per_token=8, width=4)
    assert tile_rows(tokens, config) == rows_of_tile


@pytest.mark.parametrize("form", FORMS)
def test_narrow_types_are_summed_in_float32(form):
    """The router does not see that weights and activations are narrow."""
    config = config_of(4)
    parameters, x = random_parameters(config, 0), rows(9)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
    layer = make_layer(config, parameters, form=form, dtype=jnp.bfloat16)
    found = layer(jnp.asarray(x, jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    expected = layer_by_numpy(config, parameters, x)
    error = np.abs(np.asarray(found[0], np.float32) - expected)
    assert np.max(error) < 8 * 2**-8 * np.max(np.abs(expected))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_experts, ranks", [(16, 3), (6, 4), (2, 8)])
def test_ranks_that_do_not_divide_the_experts_are_refused(form, num_experts, ranks):
    with pytest.raises(MeshError, match="ranks divides the number of experts") as caught:
        Experts(config_of(1, num_experts), sharding_of(ranks, 1, form), jnp.float32)
    assert caught.value.values == {"num_experts": num_experts, "ranks": ranks}


def test_a_model_without_experts_is_refused():
    with pytest.raises(ConfigError, match="has experts"):
        Experts(replace(config_of(), experts=None), sharding_of(1, 1, "dynamic"), jnp.float32)


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_rounds_choose_what_top_k_chooses(count):
    """Values of few kinds, −inf among them."""
    random = np.random.default_rng(count)
    values = random.choice(np.float32([-np.inf, 0.0, -0.0, 1.0, 2.5]), (50, 7))
    _, places = lax.top_k(jnp.where(values == 0, 0.0, values), count)
    expected = np.zeros(values.shape, bool)
    np.put_along_axis(expected, np.asarray(places), True, axis=1)
    np.testing.assert_array_equal(is_among_largest(jnp.asarray(values), count), expected)


# transformers


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["GlmMoeDsa", "DeepseekV3"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "per_token, more", [(1, {}), (4, {}), (8, GROUPED), (3, {"is_normalised": False})]
)
def test_transformers_says_the_same(name, seed, per_token, more):
    config = config_of(per_token, **more)
    parameters, x = random_parameters(config, seed), rows(17, seed)
    expected = transformers_layer(name, config, parameters, x)
    assert_near(layer_by_numpy(config, parameters, x), expected)
    for form in FORMS:
        assert_near(make_layer(config, parameters, ranks=2, form=form)(x)[0], expected)


def transformers_layer(name, config, parameters, x) -> np.ndarray:
    """What the class of transformers computes with the same parameters."""
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
    folder = {"GlmMoeDsa": "glm_moe_dsa", "DeepseekV3": "deepseek_v3"}[name]
    module = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    experts = config.experts
    settings = getattr(transformers, f"{name}Config")(
        hidden_size=config.hidden_size,
        moe_intermediate_size=experts.width,
        n_routed_experts=experts.num_experts,
        num_experts_per_tok=experts.num_per_token,
        n_shared_experts=experts.num_shared,
        n_group=experts.num_groups,
        topk_group=experts.groups_per_token,
        norm_topk_prob=experts.is_normalised,
        routed_scaling_factor=experts.scale,
    )
    layer = getattr(module, f"{name}MoE")(settings)
    layer.load_state_dict(
        {key: torch.from_numpy(value) for key, value in torch_names(parameters).items()}
    )
    with torch.no_grad():
        return layer(torch.from_numpy(x)[None])[0].numpy()


def torch_names(parameters):
    """The parameters as transformers names and shapes them."""
    gate_up, shared = parameters["gate_up"], parameters["shared.gate_up"]
    experts = gate_up.transpose(0, 2, 3, 1).reshape(gate_up.shape[0], -1, gate_up.shape[1])
    named = {
        "gate.weight": parameters["router.weight"],
        "gate.e_score_correction_bias": parameters["router.bias"],
        "experts.gate_up_proj": experts,
        "experts.down_proj": parameters["down"].transpose(0, 2, 1),
        "shared_experts.gate_proj.weight": shared[:, 0].T,
        "shared_experts.up_proj.weight": shared[:, 1].T,
        "shared_experts.down_proj.weight": parameters["shared.down"].T,
    }
    return {name: np.ascontiguousarray(value) for name, value in named.items()}
