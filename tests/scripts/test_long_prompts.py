"""The scripts of long prompts, with short ones."""

import argparse

import pytest

from scripts import long_outline, long_request
from scripts.prefill.models import write_model
from scripts.prefill.steps import PLAIN, RESIDENCIES

TINY = {
    **long_request.SMALL,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "indexer_types": ["full", "shared"],
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """One prompt of 248 tokens, in chunks of 128, in every residency and on one device."""
    checkpoint = write_model(tmp_path_factory.mktemp("tiny"), TINY)
    sides = [*RESIDENCIES, PLAIN]
    arguments = ["--tokens", "256", "--chunk", "128", "--ranks", "2", "--residencies", *sides]
    return list(long_request.run(checkpoint, long_request.parse(arguments)))


def test_the_tokens_behind_a_prompt_are_the_same_in_every_residency(rows):
    assert [row["residency"] for row in rows] == [*RESIDENCIES, PLAIN]
    assert len(rows[0]["tokens"]) == long_request.NEW_TOKENS
    assert all(row["tokens"] == rows[0]["tokens"] for row in rows)


def test_pools_are_as_large_as_shapes_and_planner_say(rows):
    for row in rows:
        assert row["pool_bytes"] == row["pool_bytes_by_shapes"] == row["pool_bytes_by_planner"]
    replicated, sharded, layer_split, plain = (row["pool_bytes"] for row in rows)
    assert replicated == plain
    assert sharded < 0.7 * plain and layer_split < 0.7 * plain


def outlined(residency: str, **changes) -> dict:
    arguments = ["--tokens", "65536", "--pcp", "4", "--tp", "2", "--dcp", "2", "--no-lower"]
    options = long_outline.parse([*arguments, "--repeats", "1"])
    return long_outline.examine(residency, argparse.Namespace(**vars(options) | changes))


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_a_long_prompt_of_the_published_model_moves_no_byte_too_many(residency):
    row = outlined(residency)
    assert row["transfer"]["bytes"] == row["transfer"]["least_bytes"] > 0


def test_a_rank_holds_its_share():
    replicated, sharded, layer_split = (outlined(residency) for residency in RESIDENCIES)
    parts = [row["pool_gib_by_part"]["latent"] for row in (replicated, sharded, layer_split)]
    assert parts[0] / parts[1] == pytest.approx(4, rel=0.02)
    assert parts[0] / parts[2] == pytest.approx(78 / 20, rel=0.001)  # 20 of 78 layers
    assert replicated["copies_gib"] == 0
    assert sharded["copies_gib"] == layer_split["copies_gib"] > 0
