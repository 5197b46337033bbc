"""Bound plans move the right bytes, all of them, once, and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpjax.transfer.bind import bind
from dcpjax.transfer.plan import plan_transfer
from tests.transfer.simulated import (
    SimulatedEngine,
    move,
    move_blocks,
    placement_pairs,
    token_ranges,
)


def make_engines(source, target, tokens, rng, **options):
    engines = [
        SimulatedEngine.build(placement, tokens.stop, rng, **options)
        for placement in (source, target)
    ]
    engines[0].fill(tokens.stop)
    return engines


def transferred(source, target, tokens, seed=0, mover=move, spoil=None, **options):
    """The bytes of the target after a transfer, what they should be, and the bound transfer."""
    engines = make_engines(source, target, tokens, np.random.default_rng(seed), **options)
    plan = plan_transfer(source, target, num_tokens=tokens.stop, first_token=tokens.start)
    bound = bind(plan, engines[0].memory, engines[1].memory)
    expected, num_bytes = engines[1].expected(tokens)
    # All that is wanted arrives, and not more bytes than that move: each item moves once.
    assert bound.num_bytes == num_bytes == plan.bytes_by_path(bound_item(engines)).sum()
    mover(spoil(bound) if spoil else bound, *engines)
    return engines[1].data, expected, bound


def bound_item(engines):
    return engines[0].memory.ranks[0].token_bytes


def check_random_transfer(data):
    source, target = data.draw(placement_pairs())
    tokens = data.draw(token_ranges(source, target))
    got, expected, _ = transferred(
        source,
        target,
        tokens,
        seed=data.draw(st.integers(0, 2**16)),
        mover=data.draw(st.sampled_from([move, move_blocks])),
        with_gaps=data.draw(st.booleans()),
        items_per_token=data.draw(st.integers(1, 2)),
    )
    np.testing.assert_array_equal(got, expected)


@settings(max_examples=300)
@given(st.data())
def test_any_source_to_any_target(data):
    check_random_transfer(data)


@pytest.mark.matrix
@settings(max_examples=6000)
@given(st.data())
def test_any_source_to_any_target_thousands(data):
    check_random_transfer(data)
