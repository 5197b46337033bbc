"""The arithmetic of tiles: exact covers, limits, and estimates that are not below the truth."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron.nki import tiling
from neuron.nki.tiling import cut, fits, share, state_bytes

totals = st.integers(0, 5000)
sizes = st.integers(1, 600)


@given(totals, sizes)
def test_pieces_cover_once_and_in_order(total, size):
    pieces = cut(total, size)
    assert [i for start, stop in pieces for i in range(start, stop)] == list(range(total))


@given(totals, sizes)
def test_pieces_are_as_few_as_can_be_and_only_the_last_is_short(total, size):
    lengths = [stop - start for start, stop in cut(total, size)]
    assert len(lengths) == math.ceil(total / size)
    assert all(length == size for length in lengths[:-1])


@given(totals, st.integers(1, 8))
def test_cores_share_all_pieces_evenly(total, programs):
    pieces = cut(total, 128)
    shares = [share(pieces, program, programs) for program in range(programs)]
    assert sorted(piece for taken in shares for piece in taken) == pieces
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_step_of_scores_is_one_bank():
    """The tensor engine's limits of NC-v2 and NC-v3, and what follows for our tiles."""
    assert tiling.STEP_KEYS * 4 == tiling.PSUM_BANK_BYTES
    assert tiling.STEP_KEYS % tiling.PARTITIONS == 0
    assert tiling.PSUM_BANKS * tiling.PSUM_BANK_BYTES == 16 * 1024


def test_masking_constants_keep_their_distance():
    """Hidden scores count for nothing, whatever the row has seen, and never overflow float32."""
    with_nothing_seen = tiling.HIDDEN_SCORE - tiling.LOWEST_HIGHEST
    assert math.exp(with_nothing_seen) == 0
    assert tiling.HIDDEN_SCORE * 2 > -3.4e38
    assert 2.0**-64 < tiling.LEAST_TOTAL < 1
    assert int(tiling.NEVER) == 2**24  # beyond, float32 skips integers


rows = st.integers(1, 20_000)
widths = st.integers(1, 576)


@given(rows, widths, st.sampled_from([2, 4]))
def test_more_rows_need_more_memory(num_rows, width, item_bytes):
    less = state_bytes(num_rows, width, width, item_bytes)
    assert state_bytes(num_rows + 1, width, width, item_bytes) > less
    if fits(num_rows + 1, width, width, item_bytes):
        assert fits(num_rows, width, width, item_bytes)


@pytest.mark.parametrize(
    ("num_rows", "width", "value_width", "item_bytes", "expected"),
    [
        (512 * 8, 128, 128, 2, True),  # a chunk of 512 tokens, 8 queries per KV head
        (2048 * 8, 128, 128, 2, True),
        (8192 * 8, 128, 128, 2, False),
        (64 * 16, 576, 512, 2, True),  # MLA
    ],
)
def test_chunks_of_real_models(num_rows, width, value_width, item_bytes, expected):
    assert fits(num_rows, width, value_width, item_bytes) is expected
