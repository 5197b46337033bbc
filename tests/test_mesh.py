"""Meshes against the rank orders of the layout; heads on a mesh; weights on the producer's mesh."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dcpjax.config import LlamaConfig
from dcpjax.errors import ConfigError, MeshError
from dcpjax.layout import (
    KVPlacement,
    decode_dcp_rank,
    decode_groups,
    decode_head_group,
    head_group,
    prefill_cp_rank,
    prefill_groups,
    prefill_head_group,
)
from dcpjax.mesh import (
    ALL_RANKS,
    DCP,
    LOGICAL_AXES,
    PAGE_RANKS,
    TP,
    WORLD,
    HeadLayout,
    decode_mesh,
    find_devices,
    own_devices,
    padded,
    partition,
    prefill_mesh,
    sharding,
)
from dcpjax.models.llama import Llama
from dcpjax.models.sharding import Sharding

ROOT = Path(__file__).resolve().parent.parent
NUM_DEVICES = len(jax.devices())
SHAPES = [(1, 1), (4, 1), (2, 2), (3, 3), (8, 2), (8, 4), (8, 8), (6, 3)]  # ranks, dcp


def ranks_of(mesh):
    """Device ids along ("tp", "dcp"): the devices are numbered by rank."""
    (ids,) = np.vectorize(lambda device: device.id)(mesh.devices)
    return ids if mesh.axis_names == WORLD else ids.T


@pytest.mark.parametrize("ranks, dcp", SHAPES)
def test_the_decode_mesh_has_the_decode_order(ranks, dcp):
    by_group = ranks_of(decode_mesh(jax.devices()[:ranks], dcp))
    assert by_group.tolist() == decode_groups(ranks, dcp)
    for rank in range(ranks):
        assert by_group[decode_head_group(rank, dcp), decode_dcp_rank(rank, dcp)] == rank


@pytest.mark.parametrize("ranks, dcp", SHAPES)
def test_the_prefill_mesh_has_the_producer_order(ranks, dcp):
    by_group = ranks_of(prefill_mesh(jax.devices()[:ranks], dcp))
    same_tokens, same_heads = prefill_groups(ranks, dcp)
    assert (by_group.T.tolist(), by_group.tolist()) == (same_tokens, same_heads)
    for rank in range(ranks):
        place = prefill_head_group(rank, ranks, dcp), prefill_cp_rank(rank, ranks, dcp)
        assert by_group[place] == rank


@pytest.mark.parametrize("make", [decode_mesh, prefill_mesh])
@pytest.mark.parametrize("ranks, dcp", [(3, 2), (4, 8), (2, 0)])
def test_ranks_that_do_not_split_evenly_are_refused(make, ranks, dcp):
    with pytest.raises(MeshError, match="a multiple of decode_context_parallel_size") as caught:
        make(jax.devices()[:ranks], dcp)
    assert caught.value.values == {"ranks": ranks, "decode_context_parallel_size": dcp}


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_first_devices_are_found(count):
    assert find_devices(count, "cpu") == find_devices(count) == jax.devices()[:count]


@pytest.mark.parametrize(
    ("process_of", "own"), [([0, 0, 0], [0, 1, 2]), ([0, 1, 0], [0, 2]), ([1, 1, 2], [])]
)
def test_the_own_devices_are_those_of_this_process(process_of, own):
    devices = np.array([SimpleNamespace(process_index=process) for process in process_of])
    mesh: Any = SimpleNamespace(devices=devices.reshape(1, -1, 1))
    found = own_devices(mesh)
    assert list(found) == own
    assert all(device is devices[rank] for rank, device in found.items())


def test_a_process_is_not_asked_for_more_devices_than_it_could_make():
    with pytest.raises(MeshError, match="not so many ranks in one process"):
        find_devices(100_000, "cpu")


def test_more_ranks_than_devices_are_refused():
    with pytest.raises(MeshError, match="at most the number of devices.*XLA_FLAGS") as caught:
        find_devices(NUM_DEVICES + 1, "cpu")
    expected = {
        "ranks": NUM_DEVICES + 1,
        "num_devices": NUM_DEVICES,
        "platform": "cpu",
    }
    assert caught.value.values == expected


def test_a_platform_that_is_not_there_is_refused():
    with pytest.raises(MeshError, match="finds devices of the platform.*'tpu'"):
        find_devices(1, "tpu")


@pytest.mark.parametrize(
    "width, ranks, expected", [(0, 3, 0), (1, 3, 3), (3, 3, 3), (1536, 9, 1539)]
)
def test_padded_is_the_next_multiple(width, ranks, expected):
    assert padded(width, ranks) == expected


def test_every_logical_axis_names_axes_of_the_mesh():
    for axes in LOGICAL_AXES.values():
        assert axes is None or {axes} <= {TP, DCP} or axes in (ALL_RANKS, PAGE_RANKS, WORLD)
    assert tuple(partition("embed", "q_heads", None)) == (None, ALL_RANKS, None)


GROUPS = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 6, 8)))  # KV heads, groups
FITTING = [
    (heads, groups) for heads, groups in GROUPS if max(heads, groups) % min(heads, groups) == 0
]
QUERIES_AND_DCP = list(itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 5)))


@pytest.mark.parametrize("kv_heads, groups", FITTING)
def test_every_head_has_a_place_beside_its_kv_head(kv_heads, groups):
    for ratio, dcp in QUERIES_AND_DCP:
        layout = HeadLayout(kv_heads * ratio, kv_heads, groups, dcp)
        placed_q = layout.q_head_source.reshape(groups, layout.group_kv_heads, -1)
        placed_kv = layout.kv_head_source.reshape(groups, layout.group_kv_heads)
        real = placed_q[placed_q >= 0]
        assert sorted(real.tolist()) == list(range(kv_heads * ratio)), "once, over all groups"
        assert layout.group_heads % dcp == 0, "a group's heads split over its DCP ranks"
        assert placed_q.shape[1] * placed_q.shape[2] == layout.group_heads
        assert ((placed_q // ratio == placed_kv[..., None]) | (placed_q < 0)).all()
        for group in range(groups):
            held = range(*head_group(groups * dcp, dcp, kv_heads, group))
            assert placed_kv[group].tolist() == list(held)


@pytest.mark.parametrize("kv_heads, groups", FITTING)
def test_no_more_zero_heads_than_the_split_needs(kv_heads, groups):
    for ratio, dcp in QUERIES_AND_DCP:
        layout = HeadLayout(kv_heads * ratio, kv_heads, groups, dcp)
        placed_q = layout.q_head_source.reshape(groups * layout.group_kv_heads, -1)
        most, width = int((placed_q >= 0).sum(axis=1).max()), layout.queries_per_kv_head
        smaller = [w for w in range(most, width) if w * layout.group_kv_heads % dcp == 0]
        assert width >= most and not smaller


@pytest.mark.parametrize("kv_heads, groups", sorted(set(GROUPS) - set(FITTING)))
def test_heads_and_groups_that_do_not_divide_are_refused(kv_heads, groups):
    with pytest.raises(MeshError, match="one is a multiple of the other") as caught:
        HeadLayout(kv_heads, kv_heads, groups, 2)
    assert caught.value.values == {"tp": 2 * groups, "dcp": 2, "kv_heads": kv_heads}
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    "shape, rule",
    [
        ((4, 3, 1, 1), "query heads is a multiple"),
        ((0, 1, 1, 1), "query heads is a multiple"),
        ((4, 0, 1, 1), "kv_heads is at least 1"),
        ((4, 4, 0, 1), "tp is at least 1"),
        ((4, 4, 1, 0), "tp is at least 1"),
    ],
)
def test_counts_of_heads_that_make_no_sense_are_refused(shape, rule):
    with pytest.raises(MeshError, match=rule):
        HeadLayout(*shape)


PRODUCER_RANKS, PRODUCER_DCP = 8, 4
TINY = LlamaConfig(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=64,
)


def producer():
    """The mesh of a DCP producer and the parameters' shapes with their logical axes."""
    heads = HeadLayout(
        TINY.num_heads, TINY.num_kv_heads, PRODUCER_RANKS // PRODUCER_DCP, PRODUCER_DCP
    )
    model = nnx.eval_shape(lambda: Llama(TINY, Sharding(heads, prefill_gather="q"), jnp.float32))
    entries = nnx.to_flat_state(nnx.state(model))
    parameters = {path: (leaf.shape, leaf.get_metadata("axes")) for path, leaf in entries}
    return prefill_mesh(jax.devices()[:PRODUCER_RANKS], PRODUCER_DCP), parameters


def shares(mesh, shape, axes):
    """rank -> which of how many shares of the split axis it holds; (0, 1) for everything."""
    slices = sharding(mesh, *axes).devices_indices_map(shape)
    held = {}
    for device, index in slices.items():
        cut = [
            (place, size) for place, size in zip(index, shape, strict=True) if place != slice(None)
        ]
        place, size = cut[0] if cut else (slice(0, 1), 1)
        width = place.stop - place.start
        held[device.id] = place.start // width, size // width
    return held


def test_attention_weights_of_a_producer_are_split_by_head_group_and_equal_on_its_token_ranks():
    mesh, parameters = producer()
    groups = PRODUCER_RANKS // PRODUCER_DCP
    for name in ("qkv", "o"):
        held = shares(mesh, *parameters["layers", 0, "attention", name])
        for rank in range(PRODUCER_RANKS):
            group = prefill_head_group(rank, PRODUCER_RANKS, PRODUCER_DCP)
            assert held[rank] == (group, groups), name


def test_other_weights_of_a_producer_are_split_over_all_ranks_in_tp_major_order():
    """Rank r of the producer has share ``group * dcp + token rank``, not share r.

    The order of shares is that of ("tp", "dcp") on every mesh. Nothing but a sum over all ranks
    meets them, and the vocabulary is addressed by the same number, so any order is right as long as
    there is one.
    """
    mesh, parameters = producer()
    split = [("layers", 0, "mlp", name) for name in ("gate_up", "down")]
    split += [("embedding", "weight"), ("head", "weight")]
    rank_ids = shares(mesh, (PRODUCER_RANKS,), ("vocab",))
    for path in split:
        held = shares(mesh, *parameters[path])
        assert held == rank_ids, "the share is the number that the step sees as its rank"
        for rank in range(PRODUCER_RANKS):
            group = prefill_head_group(rank, PRODUCER_RANKS, PRODUCER_DCP)
            token_rank = prefill_cp_rank(rank, PRODUCER_RANKS, PRODUCER_DCP)
            assert held[rank] == (group * PRODUCER_DCP + token_rank, PRODUCER_RANKS)


def test_the_pool_of_a_producer_lies_as_its_placement_says():
    mesh, _ = producer()
    groups = PRODUCER_RANKS // PRODUCER_DCP
    placement = KVPlacement.prefill_dcp(
        PRODUCER_RANKS, PRODUCER_DCP, layers=1, kv_heads=2, page_size=4, interleave=4
    )
    pages = shares(mesh, (PRODUCER_DCP,), ("pages",))
    heads = shares(mesh, (groups,), ("kv_heads",))
    for rank in range(PRODUCER_RANKS):
        token_rank, head = pages[rank][0], heads[rank][0]
        holds = [
            (token, h)
            for token in range(32)
            for h in range(2)
            if placement.holds(rank, 0, h, token)
        ]
        assert holds == [
            (token, head) for token in range(32) if token // 4 % PRODUCER_DCP == token_rank
        ]


def test_virtual_cpu_devices_are_made_where_none_is_in_use_yet():
    code = "from dcpjax.mesh import find_devices; print(len(find_devices(3, 'cpu')))"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout == "3\n"


def test_the_number_of_cpu_devices_stays_once_they_exist(monkeypatch):
    before = jax.config.jax_num_cpu_devices
    monkeypatch.delenv("XLA_FLAGS")
    assert find_devices(NUM_DEVICES, "cpu") == jax.devices()
    assert jax.config.jax_num_cpu_devices == before
