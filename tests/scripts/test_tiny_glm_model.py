"""The forward pass that training uses, against transformers and against loops."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.tiny_glm import attention, mtp
from scripts.tiny_glm.config import GlmConfig
from scripts.tiny_glm.export import export, load, stored_params
from scripts.tiny_glm.losses import shifted, total_loss
from scripts.tiny_glm.model import Attending, forward, indexer_groups
from tests.scripts.mtp_reference import MtpReference
from tests.scripts.tiny import GROUPS, PUBLISHED_PATTERN, SMALL, random_params, random_tokens

SPARSE, DENSE = Attending(is_sparse=True), Attending(is_sparse=False)
ASSET = Path(__file__).resolve().parents[2] / "dcpjax" / "assets" / "glm-tiny"


def transformers_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
    transformers.logging.set_verbosity_error()  # it reports the MTP layer, which it leaves out
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def relative_difference(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def our_logits(
    folder: Path, config: GlmConfig, tokens: np.ndarray, attending: Attending
) -> np.ndarray:
    params = load(folder, config)
    return np.asarray(forward(params, config, jnp.asarray(tokens), attending).logits)


@pytest.mark.oracle
@pytest.mark.parametrize("length", [1, 7, 8, 9, 131])
@pytest.mark.parametrize("config", [SMALL, PUBLISHED_PATTERN, GROUPS], ids="small 7 groups".split())
def test_logits_are_those_of_transformers(tmp_path: Path, config: GlmConfig, length: int):
    export(tmp_path, config, random_params(config, seed=length))
    tokens = random_tokens(config, length, 2, length)
    wanted = transformers_logits(tmp_path, tokens)
    assert relative_difference(our_logits(tmp_path, config, tokens, SPARSE), wanted) < 1e-4
    dense = relative_difference(our_logits(tmp_path, config, tokens, DENSE), wanted)
    assert (dense > 1e-3) == (length > config.index_topk), "only beyond top-k it matters"


@pytest.mark.oracle
def test_the_shipped_model_s_logits_are_those_of_transformers():
    config = GlmConfig()
    assert json.loads((ASSET / "config.json").read_text()) == config.to_json()
    tokens = random_tokens(replace(config, vocab_size=493), 0, 1, 300)
    wanted = transformers_logits(ASSET, tokens)
    assert relative_difference(our_logits(ASSET, config, tokens, SPARSE), wanted) < 1e-4


@pytest.mark.parametrize("length", [2, 9, 24])
def test_drafts_are_those_of_a_loop_over_the_published_description(tmp_path: Path, length: int):
    config, steps = SMALL, 3
    params = stored_params(random_params(config, seed=5))
    tokens = jnp.asarray(random_tokens(config, 5, 1, length))
    hidden = forward(params, config, tokens, SPARSE).hidden
    draft, state, _ = mtp.first_draft(params, config, hidden, shifted(tokens, 1), SPARSE)
    found = [draft.logits]
    for step in range(1, steps):
        drafted = found[-1].argmax(axis=-1)
        draft = mtp.next_draft(params, config, draft, drafted, step, state)
        found.append(draft.logits)
    reference = MtpReference(_published_names(params), config)
    wanted = reference.drafts(np.asarray(hidden[0, :-1], np.float64), tokens[0].tolist(), steps)
    rows = np.stack([np.asarray(logits)[0, :-1] for logits in found], axis=1)
    assert relative_difference(rows, wanted) < 1e-4


def _published_names(params: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    tensors = {}
    for name, value in params.items():
        parts = np.asarray(value) if ".mlp.experts." in name else [np.asarray(value)]
        for expert, part in enumerate(parts):
            tensors[name.replace(".experts.", f".experts.{expert}.")] = part
    return tensors


def test_selection_is_the_best_earlier_keys_and_the_first_of_equal_ones():
    scores = np.random.default_rng(0).integers(0, 4, (2, 21, 21)).astype(np.float32)
    found = np.asarray(attention.select(jnp.asarray(scores), 5))[:, 0]
    for row in range(2):
        for query in range(21):
            order = sorted(range(query + 1), key=lambda key: (-scores[row, query, key], key))
            assert set(np.flatnonzero(found[row, query])) == set(order[:5])


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_chunks_of_queries_cover_them_once(length: int):
    chunks = attention.query_chunks(length)
    assert [place for start, stop in chunks for place in range(start, stop)] == list(range(length))


def test_an_indexer_serves_the_shared_layers_after_it():
    assert indexer_groups(PUBLISHED_PATTERN) == [[0], [1], [2, 3, 4, 5], [6]]
    assert indexer_groups(GlmConfig()) == [[0], [1, 2, 3], [4]]


def test_a_later_token_changes_nothing_before_it():
    params = random_params(SMALL, seed=1)
    tokens = random_tokens(SMALL, 1, 1, 20)
    changed = tokens.copy()
    changed[0, 12] += 1
    before, after = (
        np.asarray(forward(params, SMALL, jnp.asarray(which), SPARSE).logits)[0]
        for which in (tokens, changed % SMALL.vocab_size)
    )
    np.testing.assert_array_equal(before[:12], after[:12])
    assert (before[12:] != after[12:]).all(axis=1).any()


@pytest.mark.parametrize("is_sparse", [False, True])
def test_prediction_trains_everything_but_indexers_and_divergence_nothing_else(is_sparse: bool):
    params = random_params(SMALL, seed=2)
    tokens = jnp.asarray(random_tokens(SMALL, 2, 2, 20))
    weights = jnp.ones(tokens.shape)
    attending = Attending(is_sparse, trains_indexer=True)

    def parts(params: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        _, metrics = total_loss(params, SMALL, tokens, weights, attending, num_drafts=2)
        return metrics.next_token + metrics.drafts, metrics.divergence

    prediction = jax.grad(lambda params: parts(params)[0])(params)
    divergence = jax.grad(lambda params: parts(params)[1])(params)
    for name in params:
        is_indexer = ".indexer." in name
        is_bias = name.endswith("e_score_correction_bias")
        assert bool(jnp.any(divergence[name] != 0)) == is_indexer, name
        assert bool(jnp.any(prediction[name] != 0)) == (not is_indexer and not is_bias), name


def test_noise_in_place_of_scores_changes_what_is_attended_to():
    params = random_params(SMALL, seed=3)
    tokens = jnp.asarray(random_tokens(SMALL, 3, 1, 20))
    found, first, same, other = (
        np.asarray(forward(params, SMALL, tokens, attending).logits)[0]
        for attending in (SPARSE, *(Attending(True, noise=seed) for seed in (0, 0, 1)))
    )
    np.testing.assert_array_equal(first, same)
    np.testing.assert_array_equal(found[: SMALL.index_topk], first[: SMALL.index_topk])
    assert (first[-1] != other[-1]).any() and (first[-1] != found[-1]).any()


def test_what_was_exported_is_loaded_rounded(tmp_path: Path):
    params = random_params(GROUPS, seed=4)
    export(tmp_path, GROUPS, params)
    loaded, rounded = load(tmp_path, GROUPS), stored_params(params)
    assert loaded.keys() == params.keys()
    for name, value in rounded.items():
        np.testing.assert_array_equal(loaded[name], value)
        np.testing.assert_allclose(value, params[name], rtol=2.0**-8)
