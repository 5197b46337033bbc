"""Kinds of numbers: what goes in comes out, mixtures do not widen, wrong values are refused."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.errors import LayoutError
from dcpjax.layout import (
    active_mask,
    filter_pages,
    global_position,
    layer_owner,
    layer_range,
    local_filled,
    local_index,
    owner,
    slot_mapping,
    window_rows,
    write_slots,
    zigzag_chunks,
)
from dcpjax.layout.domain import static_count

SPLIT = {"ranks": 4, "interleave": 2}


@pytest.mark.parametrize("rank_type", [int, np.int64, np.int32, np.uint32, jnp.int32, jnp.uint32])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize("module", [np, jnp], ids=["numpy", "jax"])
def test_a_rank_of_another_type_does_not_widen(module, dtype, rank_type):
    lengths, rank = module.arange(20, dtype=dtype), rank_type(3)
    for function in (local_filled, global_position):
        assert function(lengths, rank, **SPLIT).dtype == dtype
    assert active_mask(lengths, rank, **SPLIT).dtype == np.bool_
    expected = [local_filled(length, 3, **SPLIT) for length in range(20)]
    assert local_filled(lengths, rank, **SPLIT).tolist() == expected


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_a_traced_rank_meets_a_python_length(dtype):
    local = jax.jit(lambda rank: local_filled(13, rank, **SPLIT))(dtype(2))
    assert local.dtype == dtype and local == local_filled(13, 2, **SPLIT)


@pytest.mark.parametrize("scalar", [np.int32, np.uint32, np.int64])
def test_numpy_scalars_keep_their_type(scalar):
    for function in (owner, local_index):
        assert type(function(scalar(13), **SPLIT)) is scalar
    assert type(local_filled(scalar(13), 1, **SPLIT)) is scalar


def test_a_numpy_integer_as_static_number_does_not_widen():
    assert static_count("ranks", np.int64(4)) == 4
    assert type(static_count("ranks", np.int64(4))) is int


@pytest.mark.parametrize("ranks, interleave", [(0, 1), (-1, 1), (4, 0), (4, -2)])
def test_static_counts_are_at_least_one(ranks, interleave):
    with pytest.raises(LayoutError, match=r"at least 1 \((ranks|interleave)=(0|-1|-2)\)"):
        owner(0, ranks=ranks, interleave=interleave)


@pytest.mark.parametrize("value", [1.5, "4", None])
def test_static_counts_are_integers(value):
    with pytest.raises(LayoutError, match="ranks is a static integer"):
        static_count("ranks", value)


def test_static_counts_are_not_traced():
    with pytest.raises(LayoutError, match="page_size is a static integer"):
        jax.jit(lambda size: static_count("page_size", size))(4)


@pytest.mark.parametrize("rank", [-1, 4, np.int32(4), np.int64(-1)])
def test_ranks_are_in_range(rank):
    calls = [
        lambda: active_mask(0, rank, **SPLIT),
        lambda: local_filled(5, rank, **SPLIT),
        lambda: global_position(5, rank, **SPLIT),
        lambda: window_rows(0, 8, rank, **SPLIT),
        lambda: slot_mapping([0], [0], rank, **SPLIT, page_size=4),
        lambda: filter_pages([0], rank, ranks=4),
        lambda: layer_range(8, 4, rank),
        lambda: zigzag_chunks(8, 4, rank),
    ]
    for call in calls:
        with pytest.raises(LayoutError, match=rf"rank is in \[0, ranks\) \(rank={rank}, ranks=4\)"):
            call()


def test_negative_ints_are_refused():
    for call in (
        lambda: owner(-1, **SPLIT),
        lambda: local_index(-1, **SPLIT),
        lambda: global_position(-1, 0, **SPLIT),
        lambda: local_filled(-1, 0, **SPLIT),
        lambda: zigzag_chunks(-1, 4, 0),
        lambda: layer_owner(-1, 8, 4),
    ):
        with pytest.raises(LayoutError, match="=-1"):
            call()


@pytest.mark.parametrize("page_size, interleave", [(16, 3), (16, 32), (1, 2)])
def test_the_interleave_divides_the_page(page_size, interleave):
    """An interleave above the page has no meaning: ownership follows the page of the layout."""
    match = rf"page_size={page_size}, interleave={interleave}"
    sizes = {"ranks": 2, "interleave": interleave, "page_size": page_size}
    with pytest.raises(LayoutError, match=match):
        slot_mapping([0], [0], 0, **sizes)
    with pytest.raises(LayoutError, match=match):
        write_slots([0], [0], np.array([True]), 0, **sizes, scratch_page=9)


def test_the_layout_does_not_import_jax():
    code = "import sys, dcpjax.layout; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
