"""The model inside the compiled step against transformers: logits at many places, on many meshes.

What transformers says stands in tests/golden, and is compared with it where it is installed. Pools
start as NaN, pages are handed out in no order, chunks begin anywhere.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from dcpjax.engine.step import StepShape
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.composition.pairwise import all_choices, pairwise_cover
from tests.engine.harness import Layout, Piece, StepHarness
from tests.golden.records import NEAR_TIE, NUM_TOKENS, Logits, read_continuations, read_logits
from tests.golden.tiny import (
    CONFIGS,
    PROMPT_LENGTHS,
    SCORED_LENGTH,
    random_tokens,
    write_tiny_model,
)

TOLERANCE = 2e-3
SHAPE = StepShape(decode_rows=2, prefill_rows=1, prefill_width=16, table_width=24)
# Lengths of successive pieces of the scored sequence; 1 is computed in the block of single tokens.
PIECES = (5, 1, 1, 16, 3, 1, 15, 7, 1, 1, 13, 16)
assert sum(PIECES) == 80

OPTIONS = {
    "mesh": ((1, 1), (2, 4), (4, 2), (8, 1), (1, 8), (2, 2), (1, 3)),
    "interleave": (1, 4, "page"),
    "page_size": (8, 16, 64),
    "exchange": ("ag_rs", "a2a"),
    "prefill_gather": ("none", "q"),
    "form": ("dynamic", "static", "unrolled"),
}


def is_valid(choice) -> bool:
    """Exchange and gather need DCP ranks."""
    has_dcp = choice["mesh"][1] > 1
    return has_dcp or (choice["exchange"], choice["prefill_gather"]) == ("ag_rs", "none")


CHOICES = all_choices(OPTIONS, is_valid)
COVER = list(zip(cycle(CONFIGS), pairwise_cover(CHOICES), strict=False))
ALL = list(zip(cycle(CONFIGS), CHOICES, strict=False))


def layout_of(choice) -> Layout:
    page_size = choice["page_size"]
    interleave = page_size if choice["interleave"] == "page" else choice["interleave"]
    return Layout(
        *choice["mesh"],
        interleave=interleave,
        page_size=page_size,
        exchange=choice["exchange"],
        prefill_gather=choice["prefill_gather"],
        form=choice["form"],
    )


def name_of(value) -> str:
    values = value.values() if isinstance(value, dict) else [value]
    return "-".join(str(part).replace(" ", "") for part in values)


@pytest.fixture(scope="module")
def open_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    folder = tmp_path_factory.mktemp("tiny")

    def open_model(name: str) -> Checkpoint:
        path = folder / name
        return open_checkpoint(str(path if path.is_dir() else write_tiny_model(path, name)))

    return open_model


def pages_for(harness: StepHarness, name: str, layout: Layout, tokens: int) -> list[int]:
    """Enough page ids in an order that depends on ``name``."""
    order = np.random.RandomState(len(name)).permutation(harness.pool_shape.num_pages)
    return order[: -(-tokens // (layout.page_size * layout.dcp))].tolist()


def run_pieces(checkpoint: Checkpoint, layout: Layout, tokens: list[int]) -> dict[int, np.ndarray]:
    """Logits after each of PIECES, by position."""
    stripe = layout.dcp * layout.interleave
    width = -(-max(PIECES) // stripe) * stripe
    harness = StepHarness(checkpoint, layout, replace(SHAPE, prefill_width=width), num_pages=24)
    pages = pages_for(harness, "sequence", layout, len(tokens))
    found, start = {}, 0
    for length in PIECES:
        piece = Piece(tokens[start : start + length], start, pages)
        logits = harness.run(decode=[piece]) if length == 1 else harness.run(prefill=[piece])
        start += length
        found[start - 1] = logits[0]
    return found


def assert_close(found: dict[int, np.ndarray], expected: Logits) -> None:
    for position, logits in found.items():
        np.testing.assert_allclose(
            logits, expected.values[position], atol=TOLERANCE, rtol=0, err_msg=f"at {position}"
        )


def check(model: str, choice, open_tiny) -> None:
    expected = read_logits(f"tiny_{model}")["scored"]
    found = run_pieces(open_tiny(model), layout_of(choice), expected.tokens.tolist())
    assert len(found) == len(PIECES)
    assert_close(found, expected)


@pytest.mark.parametrize("model, choice", COVER, ids=name_of)
def test_logits_are_those_of_transformers(model, choice, open_tiny):
    check(model, choice, open_tiny)


@pytest.mark.matrix
@pytest.mark.parametrize("model, choice", ALL, ids=name_of)
def test_all_logits_are_those_of_transformers(model, choice, open_tiny):
    check(model, choice, open_tiny)


def test_long_chunks_read_long_prefixes(open_tiny):
    """Two sequences side by side, one generating while the other's prompt is computed in chunks."""
    layout = Layout(2, 2, interleave=4, page_size=8, exchange="a2a", prefill_gather="q")
    checkpoint, expected = open_tiny("qwen3"), read_logits("tiny_qwen3")["scored"]
    harness = StepHarness(checkpoint, layout, SHAPE, num_pages=24)
    tokens = expected.tokens.tolist()
    other = pages_for(harness, "ab", layout, len(tokens))
    pages = [page for page in range(24) if page not in other][: len(other)]
    found = {12: harness.run(prefill=[Piece(tokens[:13], 0, other)])[0]}
    for step, start in enumerate(range(0, 80, 16)):
        place = 13 + step
        piece, chunk = tokens[place : place + 1], tokens[start : start + 16]
        decode, prefill = harness.run([Piece(piece, place, other)], [Piece(chunk, start, pages)])
        assert_close({place: decode, start + 15: prefill}, expected)
    assert_close(found, expected)


def test_the_step_chooses_the_most_likely_token(open_tiny):
    harness = StepHarness(open_tiny("mqa"), Layout(2, 2), SHAPE, num_pages=24)
    expected = read_logits("tiny_mqa")["scored"]
    tokens, start = expected.tokens.tolist(), 0
    for length in (7, 16, 1, 1, 15, 1):
        piece = Piece(tokens[start : start + length], start, [4, 7, 0, 2, 9])
        _, chosen = harness.run_step(*([[piece], []] if length == 1 else [[], [piece]]))
        start += length
        assert chosen.tolist() == [int(expected.values[start - 1].argmax())]


# The comparison can fail: each of these is a mistake that the tolerance must not hide.


def changed_weights(checkpoint: Checkpoint, name: str, change) -> Checkpoint:
    def read(tensor: str) -> np.ndarray:
        values = checkpoint.read(tensor)
        return change(values) if tensor.endswith(name) else values

    return replace(checkpoint, read=read)


def swap_heads(values: np.ndarray) -> np.ndarray:
    """The first two heads of 8 rows each, exchanged."""
    return np.concatenate([values[8:16], values[:8], values[16:]])


MISTAKES = {
    "two KV heads exchanged": lambda c: changed_weights(c, "k_proj.weight", swap_heads),
    "two query heads exchanged": lambda c: changed_weights(c, "q_proj.weight", swap_heads),
    "no attention": lambda c: changed_weights(c, "o_proj.weight", np.zeros_like),
    "gate and up exchanged": lambda c: changed_weights(c, "gate_proj.weight", lambda v: v[::-1]),
    "wrong rope theta": lambda c: replace(c, config=replace(c.config, rope_theta=9000.0)),
    "wrong epsilon": lambda c: replace(c, config=replace(c.config, rms_norm_eps=1e-2)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake, open_tiny):
    expected = read_logits("tiny_gqa")["scored"]
    found = run_pieces(MISTAKES[mistake](open_tiny("gqa")), Layout(), expected.tokens.tolist())
    with pytest.raises(AssertionError):
        assert_close(found, expected)


# Live


@pytest.fixture(scope="module")
def live():
    pytest.importorskip("torch", reason="the oracle is transformers on torch")
    pytest.importorskip("transformers", reason="the oracle is transformers")
    return pytest.importorskip("tests.golden.live")


@pytest.mark.oracle
@pytest.mark.parametrize("name", CONFIGS)
def test_golden_files_are_what_transformers_says(name, live, tmp_path):
    model = live.load(write_tiny_model(tmp_path, name))
    recorded = read_logits(f"tiny_{name}")["scored"]
    assert recorded.tokens.tolist() == random_tokens(f"{name} scored", SCORED_LENGTH)
    found = live.logits_of(model, recorded.tokens.tolist())
    np.testing.assert_allclose(recorded.values, found, atol=1e-4, rtol=0)
    continuations = read_continuations(f"tiny_{name}")
    assert tuple(len(item.prompt) for item in continuations) == PROMPT_LENGTHS
    for item in continuations:
        tokens, margins = live.choices(model, list(item.prompt), item.tokens)
        assert (len(tokens), tokens) == (NUM_TOKENS, item.tokens)
        assert margins.min() > NEAR_TIE and item.margin == pytest.approx(margins.min(), abs=1e-4)
