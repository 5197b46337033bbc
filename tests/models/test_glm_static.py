"""A sparse model in the static form has the logits of the dynamic one, on every kind of mesh."""

import numpy as np
import pytest

from dcpjax.engine.step import StepShape
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.engine.harness import Layout, Piece, StepHarness
from tests.models.tiny_glm import GLM, write_model

TOKENS = np.random.default_rng(0).integers(0, GLM["vocab_size"], 48).tolist()
PIECES = (5, 1, 1, 16, 3, 1, 15, 6)
NUM_PAGES = 8
LAYERS = {"num_hidden_layers": 3, "index_n_heads": 16}
LAYOUTS = [
    Layout(form="static"),
    Layout(dcp=4, interleave=4, form="static"),
    Layout(dcp=4, index="replicated", form="unrolled"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("glm")
    write_model(folder, GLM | LAYERS)
    return open_checkpoint(str(folder))


def logits_of(checkpoint: Checkpoint, layout: Layout) -> np.ndarray:
    """Behind the last token of each piece of the sequence."""
    width = max(PIECES)
    harness = StepHarness(checkpoint, layout, StepShape(2, 1, width, 6), num_pages=NUM_PAGES)
    pages = np.random.default_rng(1).permutation(NUM_PAGES).tolist()
    pages = pages[: -(-len(TOKENS) // (layout.page_size * layout.dcp))]
    found, start = [], 0
    for count in PIECES:
        piece = Piece(TOKENS[start : start + count], start, pages)
        found.append(harness.run(decode=[piece]) if count == 1 else harness.run(prefill=[piece]))
        start += count
    return np.concatenate(found)


@pytest.fixture(scope="module")
def expected(checkpoint) -> np.ndarray:
    return logits_of(checkpoint, Layout())


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: f"{one.form}-dcp{one.dcp}-{one.index}")
def test_logits_are_those_of_the_dynamic_form(checkpoint, expected, layout):
    found = logits_of(checkpoint, layout)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_one_token_less_to_choose_gives_other_logits(expected, tmp_path):
    write_model(tmp_path, GLM | LAYERS | {"index_topk": GLM["index_topk"] - 1})
    found = logits_of(open_checkpoint(str(tmp_path)), Layout(form="static"))
    assert np.abs(found - expected).max() > 0.01 * np.abs(expected).max()
