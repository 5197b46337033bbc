"""Latent-cache models inside the compiled step against transformers: logits and what is cached.

What transformers says stands in tests/golden, and is compared with it where it is installed. Pools
start as NaN, pages are handed out in no order, chunks begin anywhere, and each step also generates
for another sequence. Sequences are ten times longer than what the indexer chooses.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle

import numpy as np
import pytest

from dcpjax.cache.parts import INDEXER, LATENT
from dcpjax.engine.step import StepShape
from dcpjax.layout import slot_mapping
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.composition.pairwise import all_choices, pairwise_cover
from tests.engine.harness import Layout, Piece, StepHarness
from tests.golden.records import Scored, read_scored
from tests.golden.tiny_glm import GLM_CONFIGS, scored_tokens, write_tiny_glm

TOLERANCE = 1e-4
"""Of the largest value; discrete choices, of tokens and experts, have no near ties here."""
NUM_PAGES = 24
# Lengths of successive pieces of the scored sequence; 1 is computed in the block of single tokens.
PIECES = (5, 1, 1, 16, 3, 1, 15, 7, 1, 1, 13, 16)
OTHER = 13
"""Tokens that the other sequence begins with; it gets one more in each step."""
assert sum(PIECES) == 80

OPTIONS = {
    "mesh": ((1, 1), (1, 2), (1, 4), (2, 2), (1, 8), (4, 1)),
    "interleave": (1, 4, "page"),
    "exchange": ("ag_rs", "a2a"),
    "index": ("sharded", "replicated"),
    "prompts": ("expanded", "absorbed"),
}


def is_valid(choice) -> bool:
    """Exchange and copies of the indexer's keys need DCP ranks."""
    has_dcp = choice["mesh"][1] > 1
    return has_dcp or (choice["exchange"], choice["index"]) == ("ag_rs", "sharded")


CHOICES = all_choices(OPTIONS, is_valid)
COVER = list(zip(cycle(GLM_CONFIGS), pairwise_cover(CHOICES), strict=False))
QUICK = {
    "periodic": Layout(1, 4, interleave=4),
    "listed": Layout(2, 2, interleave=8, exchange="a2a", index="replicated"),
    "v32": Layout(1, 2, exchange="a2a"),
    "v3": Layout(4, 1),
}


def layout_of(choice) -> Layout:
    interleave = 8 if choice["interleave"] == "page" else choice["interleave"]
    return Layout(
        *choice["mesh"],
        interleave=interleave,
        exchange=choice["exchange"],
        index=choice["index"],
    )


def name_of(value) -> str:
    values = value.values() if isinstance(value, dict) else [value]
    return "-".join(str(part).replace(" ", "") for part in values)


@pytest.fixture(scope="module")
def open_glm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    @cache
    def open_model(name: str) -> Checkpoint:
        return open_checkpoint(str(write_tiny_glm(tmp_path_factory.mktemp(name), name)))

    return open_model


def harness_of(checkpoint: Checkpoint, layout: Layout, *, expanded_context: int = 0) -> StepHarness:
    stripe = layout.dcp * layout.interleave
    width = -(-max(PIECES) // stripe) * stripe
    shape = StepShape(2, 1, width, table_width=NUM_PAGES, expanded_context=expanded_context)
    return StepHarness(checkpoint, layout, shape, num_pages=NUM_PAGES)


def longest_expanded(checkpoint: Checkpoint) -> int:
    """Up to so many tokens, a query attends to all before it."""
    indexer = checkpoint.config.indexer
    return checkpoint.config.max_position_embeddings if indexer is None else indexer.top_k


@dataclass(frozen=True)
class Run:
    """Two sequences through one harness: logits by position, and the pages of both."""

    found: dict[int, np.ndarray]
    of_other: dict[int, np.ndarray]
    pages: list[int]
    other_pages: list[int]


def run_pieces(harness: StepHarness, tokens: list[int], virtual_page: int) -> Run:
    """The sequence piece by piece, and beside each the next token of another one, the same text."""
    order = np.random.RandomState(8).permutation(NUM_PAGES).tolist()
    num_other = OTHER + len(PIECES)
    split = -(-len(tokens) // virtual_page)
    pages, other = order[:split], order[split : split - (-num_other // virtual_page)]
    of_other = {OTHER - 1: harness.run(prefill=[Piece(tokens[:OTHER], 0, other)])[0]}
    found, start = {}, 0
    for place, length in enumerate(PIECES, start=OTHER):
        beside = Piece(tokens[place : place + 1], place, other)
        piece = Piece(tokens[start : start + length], start, pages)
        blocks = ([beside, piece], []) if length == 1 else ([beside], [piece])
        of_other[place], found[start + length - 1] = harness.run(*blocks)
        start += length
    return Run(found, of_other, pages, other)


def assert_close(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    limit = TOLERANCE * np.abs(expected).max(initial=0)
    np.testing.assert_allclose(found, expected, atol=limit, rtol=0, err_msg=what)


def check_logits(run: Run, expected: Scored) -> None:
    assert len(run.found) == len(PIECES)
    for name, logits in {"sequence": run.found, "other": run.of_other}.items():
        for position, found in logits.items():
            assert_close(found, expected.logits[position], f"{name} at {position}")


def cached_rows(
    pool: np.ndarray, pages: list[int], count: int, layout: Layout, *, is_whole: bool
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Per rank: its number, the positions that it holds, and their rows [layers, heads, n, W]."""
    ranks, page_size = (
        (1, layout.page_size * layout.dcp) if is_whole else (layout.dcp, layout.page_size)
    )
    by_rank = pool.reshape(layout.dcp, -1, *pool.shape[1:])
    for rank in range(layout.dcp):
        slots = slot_mapping(
            np.asarray(pages),
            np.arange(count),
            0 if is_whole else rank,
            ranks=ranks,
            interleave=1 if is_whole else layout.interleave,
            page_size=page_size,
        )
        positions = np.flatnonzero(slots >= 0)
        places, offsets = np.divmod(slots[positions], page_size)
        yield rank, positions, np.moveaxis(by_rank[rank][places, :, :, offsets], 0, 2)


def check_cache(harness: StepHarness, layout: Layout, run: Run, expected: Scored) -> None:
    """Every pool has what transformers caches where the layout says, and nothing elsewhere."""
    parts = {LATENT: expected.latents, INDEXER: expected.keys}
    assert harness.pools.keys() == {name for name, rows in parts.items() if len(rows)}
    for name, pool in harness.pools.items():
        is_whole = name == INDEXER and layout.index == "replicated"
        pool = np.asarray(pool)
        filled = 0
        for pages, count in ((run.pages, 80), (run.other_pages, OTHER + len(PIECES))):
            for rank, positions, rows in cached_rows(pool, pages, count, layout, is_whole=is_whole):
                wanted = parts[name][:, None, positions]
                wanted = np.broadcast_to(wanted, rows.shape)  # a copy for each group of heads
                assert_close(rows, wanted, f"{name} of rank {rank}")
                filled += rows.size
        usable = pool.reshape(layout.dcp, NUM_PAGES + 1, *pool.shape[1:])[:, :NUM_PAGES]
        assert np.isfinite(usable).sum() == filled


def check(harness: StepHarness, layout: Layout, expected: Scored) -> None:
    run = run_pieces(harness, expected.tokens.tolist(), layout.page_size * layout.dcp)
    check_logits(run, expected)
    check_cache(harness, layout, run, expected)


@pytest.fixture(scope="module")
def quick(open_glm) -> Callable[[str], StepHarness]:
    def open_harness(name: str) -> StepHarness:
        """Of sparse models, whose prompts are soon too long, test_glm_expanded.py has more."""
        context = longest_expanded(open_glm(name)) if name == "v3" else 0
        return harness_of(open_glm(name), QUICK[name], expanded_context=context)

    return cache(open_harness)


@pytest.mark.parametrize("name", QUICK)
def test_logits_and_cache_are_those_of_transformers(name, quick):
    check(quick(name), QUICK[name], read_scored(f"glm_{name}"))


@pytest.mark.matrix
@pytest.mark.parametrize("name, choice", COVER, ids=name_of)
def test_every_pair_of_settings_gives_the_same(name, choice, open_glm):
    layout = layout_of(choice)
    checkpoint = open_glm(name)
    context = longest_expanded(checkpoint) if choice["prompts"] == "expanded" else 0
    harness = harness_of(checkpoint, layout, expanded_context=context)
    check(harness, layout, read_scored(f"glm_{name}"))


# The comparison can fail: each of these is a mistake that the tolerance must not hide.


def changed_weights(checkpoint: Checkpoint, ending: str, change) -> Checkpoint:
    def read(tensor: str) -> np.ndarray:
        values = checkpoint.read(tensor)
        return change(values) if tensor.endswith(ending) else values

    return replace(checkpoint, read=read)


def other_indexer_rotation(checkpoint: Checkpoint) -> Checkpoint:
    config = checkpoint.config
    indexer = replace(config.indexer, is_rope_interleaved=not config.indexer.is_rope_interleaved)
    return replace(checkpoint, config=replace(config, indexer=indexer))


MISTAKES = {
    "the indexer's rotation": other_indexer_rotation,
    "bias of the indexer's norm": lambda c: changed_weights(c, "k_norm.bias", np.zeros_like),
    "heads of the indexer": lambda c: changed_weights(c, "weights_proj.weight", lambda v: v[::-1]),
    "bias of the router": lambda c: changed_weights(c, "correction_bias", np.zeros_like),
    "experts": lambda c: changed_weights(c, "experts.3.up_proj.weight", np.zeros_like),
    "query heads": lambda c: changed_weights(c, "q_b_proj.weight", lambda v: np.roll(v, 16, 0)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake, quick, open_glm):
    harness, expected = quick("periodic"), read_scored("glm_periodic")
    harness.load(MISTAKES[mistake](open_glm("periodic")))
    run = run_pieces(harness, expected.tokens.tolist(), 32)
    with pytest.raises(AssertionError):
        check_logits(run, expected)


def test_a_wrong_place_in_the_cache_is_seen(quick, open_glm):
    """Rows of neighbouring layers, exchanged behind the last step."""
    harness, expected = quick("periodic"), read_scored("glm_periodic")
    harness.load(open_glm("periodic"))
    run = run_pieces(harness, expected.tokens.tolist(), 32)
    check_cache(harness, QUICK["periodic"], run, expected)
    harness.pools[INDEXER] = np.asarray(harness.pools[INDEXER])[:, [1, 0, 2]]
    with pytest.raises(AssertionError, match="indexer of rank"):
        check_cache(harness, QUICK["periodic"], run, expected)


# Live


@pytest.fixture(scope="module")
def live():
    pytest.importorskip("torch", reason="the oracle is transformers on torch")
    pytest.importorskip("transformers", reason="the oracle is transformers")
    return pytest.importorskip("tests.golden.live")


@pytest.mark.oracle
@pytest.mark.parametrize("name", GLM_CONFIGS)
def test_golden_files_are_what_transformers_says(name, live, tmp_path):
    recorded = read_scored(f"glm_{name}")
    assert recorded.tokens.tolist() == scored_tokens(name)
    found = live.score(live.load(write_tiny_glm(tmp_path, name)), scored_tokens(name))
    for field in ("logits", "latents", "keys"):
        assert_close(getattr(found, field), getattr(recorded, field), field)


ODD = {
    "index_n_heads": 17,
    "index_topk": 5,
    "index_head_dim": 7,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 9,
    "kv_lora_rank": 11,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}


@pytest.mark.matrix
@pytest.mark.oracle
@pytest.mark.parametrize("name, seed", [("periodic", 1), ("v32", 2)])
def test_other_sizes_and_seeds(name, seed, live, tmp_path):
    path = write_tiny_glm(tmp_path, name, seed, **ODD)
    layout = Layout(1, 2, interleave=2)
    expected = live.score(live.load(path), scored_tokens(name))
    check(harness_of(open_checkpoint(str(path)), layout), layout, expected)
