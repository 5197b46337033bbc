"""Prompts from expanded latents against absorbed ones, and against transformers.

Sparse models choose so many tokens here that several chunks of the sequence come before, one of
which begins and ends anywhere, and the rest of the sequence behind: it crosses from one form to the
other in the middle, as does the sequence beside it.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.attention.expanded import UpProjections
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from dcpjax.models.glm_layer import run_layer
from tests.engine.harness import Layout
from tests.golden.records import Scored
from tests.golden.tiny_glm import scored_tokens, write_tiny_glm
from tests.models.test_glm import (
    TOLERANCE,
    Run,
    check_logits,
    harness_of,
    longest_expanded,
    run_pieces,
)

TOP_K = 30  # of 80 tokens: chunks end at 5, 23, 26 and 42 of one sequence, and at 13 of the other
WIDER: dict[str, Any] = {"index_topk": TOP_K}
MODELS: dict[str, dict[str, Any]] = {"periodic": WIDER, "v3": {}}


@dataclass(frozen=True)
class Case:
    model: str
    layout: Layout

    def __str__(self) -> str:
        layout = self.layout
        mesh = f"{layout.tp}x{layout.dcp}"
        return f"{self.model}-{mesh}-i{layout.interleave}-{layout.exchange}-{layout.index}"


ABSORBED = 0
PLAIN = Case("periodic", Layout())
QUICK = [
    PLAIN,
    Case("periodic", Layout(2, 2, interleave=4, exchange="a2a")),
]
SLOW = [
    Case("periodic", Layout(1, 4, interleave=8, index="replicated")),
    Case("v3", Layout()),
    Case("v3", Layout(1, 2, exchange="a2a")),
    Case("v3", Layout(1, 4, interleave=4)),
]
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.matrix) for case in SLOW)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def write(model: str) -> Path:
        return write_tiny_glm(tmp_path_factory.mktemp(model), model, **MODELS[model])

    return write


@pytest.fixture(scope="module")
def open_glm(folder_of) -> Callable[[str], Checkpoint]:
    return functools.cache(lambda model: open_checkpoint(str(folder_of(model))))


@pytest.fixture(scope="module")
def run(open_glm) -> Callable[..., Run]:
    """A case, with latents expanded in chunks that end within so many tokens."""

    def run_one(case: Case, expanded_context: int) -> Run:
        layout = case.layout
        harness = harness_of(open_glm(case.model), layout, expanded_context=expanded_context)
        return run_pieces(harness, scored_tokens(case.model), layout.page_size * layout.dcp)

    return functools.cache(run_one)


def same(found: Run, expected: Run) -> bool:
    pairs = [(found.found, expected.found), (found.of_other, expected.of_other)]
    return all(
        np.allclose(one[place], logits, atol=TOLERANCE * np.abs(logits).max(), rtol=0)
        for one, other in pairs
        for place, logits in other.items()
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_those_of_the_absorbed_form(case, run, open_glm):
    expanded = run(case, longest_expanded(open_glm(case.model)))
    assert same(expanded, run(Case(case.model, Layout()), ABSORBED))


def rope_first(original, self, rows):
    keys, values = original(self, rows)
    return jnp.roll(keys, -self.keys.shape[1], axis=-1), values


def halves_of_kv_b_exchanged(original, self, rows):
    nope = self.keys.shape[1]
    both = jnp.concatenate([self.keys, self.values.swapaxes(1, 2)], axis=1)
    exchanged = jnp.roll(both, nope, axis=1)
    other = UpProjections(exchanged[:, :nope], exchanged[:, nope:].swapaxes(1, 2))
    return original(other, rows)


@pytest.fixture
def traced_anew() -> Iterator[None]:
    """Layers are, behind a test that changes what they call."""
    yield
    run_layer.clear_cache()


@pytest.mark.parametrize("mistake", [rope_first, halves_of_kv_b_exchanged])
def test_a_wrong_split_is_seen(mistake, run, monkeypatch, traced_anew):
    original, absorbed = UpProjections.expand, run(PLAIN, ABSORBED)
    monkeypatch.setattr(UpProjections, "expand", lambda self, rows: mistake(original, self, rows))
    run_layer.clear_cache()
    assert not same(run.__wrapped__(PLAIN, TOP_K), absorbed)


def test_expanded_beyond_what_is_chosen_is_seen(run):
    """All tokens would count, where the indexer chooses some."""
    assert not same(run(PLAIN, TOP_K + 12), run(PLAIN, ABSORBED))


# Live


@pytest.fixture(scope="module")
def live():
    pytest.importorskip("torch", reason="the oracle is transformers on torch")
    pytest.importorskip("transformers", reason="the oracle is transformers")
    return pytest.importorskip("tests.golden.live")


@pytest.mark.oracle
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_logits_are_those_of_transformers(case, live, folder_of, run):
    expected: Scored = live.score(live.load(folder_of(case.model)), scored_tokens(case.model))
    check_logits(run(case, TOP_K), expected)
