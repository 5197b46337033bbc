"""SmolLM2-135M in the engine against transformers: 64 greedy tokens of 20 prompts, and logits.

What transformers says stands beside this file; it is compared with it where it is installed.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcpjax.engine.step import StepShape
from dcpjax.models.catalog import bring_model
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.composition.pairwise import Choice, all_choices, pairwise_cover
from tests.engine.harness import Layout, Piece, StepHarness
from tests.engine.serving import engine_of, request_of, serve
from tests.golden.records import NEAR_TIE, NUM_TOKENS, Logits, read_continuations, read_logits

TOLERANCE = 2e-3
matrix = pytest.mark.matrix
LONG = "long"  # the prompt of 6K tokens
SHORT = [item.name for item in read_continuations("smollm2") if item.name != LONG]
SOME = SHORT[::3]  # in the ordinary run
OPTIONS = {
    "mesh": ((1, 1), (3, 1), (1, 3), (3, 3)),
    "interleave": (1, 4, "page"),
    "page_size": (8, 16, 64),
    "exchange": ("ag_rs", "a2a"),
    "prefill_gather": ("none", "q"),
}
CHOICES = all_choices(
    OPTIONS,
    lambda choice: (
        choice["mesh"][1] > 1 or (choice["exchange"], choice["prefill_gather"]) == ("ag_rs", "none")
    ),
)
QUICK = [
    Layout(3, 3, interleave=4, page_size=8, exchange="a2a", prefill_gather="q"),
    Layout(1, 3, interleave=16, page_size=16),
]


def layout_of(choice: Choice) -> Layout:
    page_size = choice["page_size"]
    interleave = page_size if choice["interleave"] == "page" else choice["interleave"]
    return Layout(
        *choice["mesh"], interleave, page_size, choice["exchange"], choice["prefill_gather"]
    )


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return open_checkpoint("smollm2-135m")


def check_tokens(
    checkpoint: Checkpoint, layout: Layout, names: Collection[str], **settings: Any
) -> dict[str, Any]:
    """All chosen prompts together, eight at a time; what the engine has counted."""
    chosen = [item for item in read_continuations("smollm2") if item.name in names]
    longest = max(len(item.prompt) for item in chosen) + NUM_TOKENS
    virtual_page, rows = layout.page_size * layout.dcp, min(8, len(chosen))
    engine = engine_of(
        checkpoint,
        **layout.settings,
        **settings,
        max_num_seqs=rows,
        max_num_batched_tokens=max(64 if longest < 2000 else 512, layout.dcp * layout.interleave),
        max_model_len=longest,
        num_pages=rows * -(-min(longest, 1000) // virtual_page) + -(-longest // virtual_page),
    )
    served = serve(
        engine, [request_of(item.name, item.prompt, max_tokens=NUM_TOKENS) for item in chosen]
    )
    stats = engine.stats()
    engine.close()
    assert {item.name: served[item.name].tokens for item in chosen} == {
        item.name: list(item.tokens) for item in chosen
    }
    return stats


def test_the_prompts_are_what_they_should_be():
    recorded = read_continuations("smollm2")
    lengths = {item.name: len(item.prompt) for item in recorded}
    assert len(recorded) == len(lengths) == 20
    assert min(lengths.values()) == 1 and 6000 < lengths[LONG] < 6300
    assert {len(item.tokens) for item in recorded} == {NUM_TOKENS}
    assert min(item.margin for item in recorded) > NEAR_TIE


@pytest.mark.parametrize("layout", [pytest.param(QUICK[0], marks=matrix), QUICK[1]], ids=str)
def test_tokens(layout, smollm2):
    check_tokens(smollm2, layout, SOME)


@pytest.mark.parametrize("layout", [pytest.param(Layout(1, 1), marks=matrix), QUICK[1]], ids=str)
def test_tokens_with_speculation(layout, smollm2):
    """Drafts from n-grams change how many steps it takes, and nothing else."""
    config = {"method": "ngram", "num_speculative_tokens": 3}
    stats = check_tokens(smollm2, layout, SOME, speculative_config=config)
    assert stats["speculation"]["num_accepted_tokens"] > 20
    assert stats["acceptance_length"] > 1.3


@matrix
@pytest.mark.parametrize("residency", ["replicated", "layer_split"])
def test_tokens_of_prompts_on_two_ranks(residency, smollm2):
    settings = {"prefill_context_parallel_size": 2, "prefill_kv": residency}
    check_tokens(smollm2, Layout(1, 1), [*SHORT, LONG], **settings)


@matrix
@pytest.mark.parametrize("layout", [layout_of(choice) for choice in CHOICES], ids=str)
def test_tokens_of_every_layout(layout, smollm2):
    check_tokens(smollm2, layout, SHORT)


@matrix
@pytest.mark.parametrize("layout", [layout_of(c) for c in pairwise_cover(CHOICES)], ids=str)
def test_tokens_after_a_long_prompt(layout, smollm2):
    check_tokens(smollm2, layout, [LONG])


# Logits


def check_logits(checkpoint: Checkpoint, layout: Layout, every: int = 1) -> None:
    """At the end of each prompt, or each ``every``-th, and of its continuation; chunks of 48
    tokens."""
    table = -(-800 // (layout.page_size * layout.dcp))
    stripe = layout.dcp * layout.interleave
    shape = StepShape(1, 1, -(-48 // stripe) * stripe, table)
    harness = StepHarness(checkpoint, layout, shape, num_pages=table)
    pages = list(reversed(range(table)))
    for name, expected in list(read_logits("smollm2").items())[::every]:
        found = run_chunks(harness, expected.tokens.tolist(), expected.positions.tolist(), pages)
        assert_close(found, expected, name)


def run_chunks(
    harness: StepHarness, tokens: list[int], ends: list[int], pages: list[int]
) -> np.ndarray:
    """Logits [ends, vocabulary] at these positions."""
    rows, start = [], 0
    for end in ends:
        while start <= end:
            chunk = tokens[start : min(start + 48, end + 1)]
            logits = harness.run(prefill=[Piece(chunk, start, pages)])
            start += len(chunk)
        rows.append(logits[0])
    return np.stack(rows)


def assert_close(found: np.ndarray, expected: Logits, name: str) -> None:
    values = np.take_along_axis(found, expected.ids, axis=1)
    np.testing.assert_allclose(values, expected.values, atol=TOLERANCE, rtol=0, err_msg=name)


def test_logits(smollm2):
    check_logits(smollm2, Layout(3, 1, interleave=4, page_size=16), every=3)


@matrix
@pytest.mark.parametrize("layout", [layout_of(c) for c in pairwise_cover(CHOICES)], ids=str)
def test_logits_of_other_layouts(layout, smollm2):
    check_logits(smollm2, layout)


# Live


@pytest.mark.oracle
def test_golden_files_are_what_transformers_says():
    pytest.importorskip("torch", reason="the oracle is transformers on torch")
    pytest.importorskip("transformers", reason="the oracle is transformers")
    live = pytest.importorskip("tests.golden.live")
    model = live.load(Path(bring_model("smollm2-135m")))
    # A few of the prompts, not the long one: they were all made by the same run of the script.
    for item in read_continuations("smollm2")[:-1:6]:
        tokens, margins = live.choices(model, list(item.prompt), item.tokens)
        assert tokens == item.tokens and margins.min() > NEAR_TIE
    for name, recorded in list(read_logits("smollm2").items())[::4]:
        rows = live.logits_of(model, recorded.tokens.tolist(), last=NUM_TOKENS + 1)[[0, -1]]
        assert_close(rows, recorded, name)
