"""The packed input of a step, its small pure parts, and where it leaves keys and values."""

import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.engine.step import FROM_HOST, StepShape, token_ids
from dcpjax.layout import owner, slot_mapping
from tests.engine.harness import Layout, Piece, StepHarness

SHAPE = StepShape(decode_rows=2, prefill_rows=2, prefill_width=16, table_width=6)


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        StepShape(1, 0, 0, 1),
        StepShape(4, 0, 0, 9),
        StepShape(2, 1, 512, 3),
        StepShape(3, 2, 8, 2, decode_width=4),
    ],
    ids=str,
)
def test_views_are_the_packed_array_and_overlap_nowhere(shape):
    packed = np.zeros(shape.packed_size, np.int32)
    views = shape.views(packed)
    assert {name: view.shape for name, view in views.items()} == shape.fields()
    for number, view in enumerate(views.values(), start=1):
        view[...] += number
    sizes = [view.size for view in views.values()]
    assert packed.tolist() == [n for n, size in enumerate(sizes, start=1) for _ in range(size)]


def test_counts_and_name():
    assert (SHAPE.rows, SHAPE.num_tokens, str(SHAPE)) == (4, 34, "2x1+2x16 of 6 pages")
    assert str(StepShape(8, 0, 0, 3)) == "8x1+0x0 of 3 pages"
    wide = StepShape(3, 2, 8, 5, decode_width=4)
    assert (wide.rows, wide.num_tokens, wide.num_outputs) == (5, 28, 14)
    assert [wide.first_token(row) for row in range(5)] == [0, 4, 8, 12, 20]
    assert [wide.first_output(row) for row in range(5)] == [0, 4, 8, 12, 13]
    assert str(wide) == "3x4+2x8 of 5 pages"


def test_tokens_come_from_the_host_or_from_a_row_of_the_devices():
    """A step takes as many of a row as its segments have; the rest of the step is the host's."""
    shape = StepShape(3, 1, 2, 1, decode_width=2)
    packed = np.zeros(shape.packed_size, np.int32)
    views = shape.views(packed)
    views["token_ids"][:] = range(10, 18)
    views["sources"][:] = [FROM_HOST, 3, 0]
    previous = np.arange(100, 112).reshape(4, 3)
    views = shape.views(jnp.asarray(packed))
    found = token_ids(shape, views, jnp.asarray(previous, jnp.int32))
    assert found.tolist() == [10, 11, 109, 110, 100, 101, 16, 17]


@pytest.mark.parametrize("form", ["dynamic", "static"])
@pytest.mark.parametrize("dcp", [1, 2])
def test_a_segment_of_drafts_is_as_many_steps_of_one_token(tiny, form, dcp):
    """Every position's logits, beside a prompt and an unused row; pages end in between."""
    layout = Layout(1, dcp, form=form)
    tokens, pages = [40, 3, 7, 99], [3, 0, 5]
    single = StepHarness(tiny, layout, StepShape(2, 1, 16, 3), num_pages=8)
    wide = StepHarness(tiny, layout, StepShape(2, 1, 16, 3, decode_width=4), num_pages=8)
    for harness in (single, wide):
        harness.run(prefill=[Piece(range(14), 0, pages)])
    expected = [
        single.run([Piece([token], 14 + place, pages)])[0] for place, token in enumerate(tokens)
    ]
    beside = Piece(range(9), 0, [1, 2, 4])
    for count in range(4, 0, -1):  # what is computed again is written again
        found = wide.run([Piece(tokens[:count], 14, pages)], [beside])[0]
        np.testing.assert_allclose(found, expected[count - 1], atol=2e-5)


LAYOUTS = [
    Layout(),
    Layout(1, 3, interleave=4),
    Layout(2, 2, interleave=8, prefill_gather="q"),
    Layout(1, 8, exchange="a2a"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_token_is_stored_once_on_its_owner(tiny, layout):
    """All of the pool that belongs to nobody keeps its NaN, except the scratch page."""
    stripe = layout.dcp * layout.interleave
    shape = StepShape(2, 2, -(-16 // stripe) * stripe, 6)
    harness = StepHarness(tiny, layout, shape, num_pages=12)
    first, second = [3, 11, 0, 7, 5, 1], [2, 9, 4, 10, 8, 6]
    harness.run(prefill=[Piece(range(13), 0, first), Piece(range(7), 0, second)])
    harness.run([Piece([40], 13, first)], [Piece(range(16), 7, second)])
    pool = np.asarray(harness.pool).reshape(layout.dcp, 13, *harness.pool.shape[1:])
    expected = np.zeros((layout.dcp, 13, layout.page_size), bool)
    for pages, length in ((first, 14), (second, 23)):
        positions = np.arange(length)
        owners = owner(positions, ranks=layout.dcp, interleave=layout.interleave)
        for rank in range(layout.dcp):
            slots = slot_mapping(
                np.asarray(pages),
                positions,
                rank,
                ranks=layout.dcp,
                interleave=layout.interleave,
                page_size=layout.page_size,
            )
            assert np.array_equal(slots >= 0, owners == rank)
            expected[rank].reshape(-1)[slots[slots >= 0]] = True
    assert expected.sum() == 14 + 23
    stored = ~np.isnan(pool[:, :12])
    assert np.array_equal(
        stored, np.broadcast_to(expected[:, :12, None, None, :, None], stored.shape)
    )


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_copies_of_a_kv_head_are_equal(tiny, layout):
    """Two KV heads on four head groups: the pool has each twice."""
    wide = Layout(4, layout.dcp if layout.dcp < 3 else 1, page_size=layout.page_size)
    harness = StepHarness(tiny, wide, StepShape(1, 1, 16, 4), num_pages=4)
    harness.run(prefill=[Piece(range(9), 0, [1, 0, 2, 3])])
    pool = np.asarray(harness.pool)[:4]
    assert pool.shape[2] == 4
    np.testing.assert_array_equal(pool[:, :, [0, 2]], pool[:, :, [1, 3]])
    assert not np.array_equal(pool[:, :, 0], pool[:, :, 2], equal_nan=True)


def test_a_step_with_nothing_to_do_stores_nothing(tiny):
    harness = StepHarness(tiny, Layout(2, 2), SHAPE, num_pages=5)
    harness.run()
    pool = np.asarray(harness.pool).reshape(2, 6, -1)
    assert np.isnan(pool[:, :5]).all()


def test_bfloat16_values_are_close(tiny):
    """Keys and values in 16 bits, all else in float32."""
    exact = StepHarness(tiny, Layout(1, 2), SHAPE, num_pages=6)
    stored = StepHarness(tiny, Layout(1, 2), SHAPE, num_pages=6, kv_dtype=jnp.bfloat16)
    assert stored.pool.dtype == jnp.uint16
    piece, pages = list(range(16)), list(range(6))
    found = []
    for harness in (exact, stored):
        harness.run(prefill=[Piece(piece, 0, pages)])
        found.append(harness.run(prefill=[Piece(piece[::-1], 16, pages)])[0])
    difference = np.abs(found[0] - found[1]).max()
    assert 0 < difference < 0.5 < np.ptp(found[0])
