"""Checkpoint tensors in the order of the mesh: which head where, zeros where there is none."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.mesh import HeadLayout, decode_mesh
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from dcpjax.models.sharding import Sharding
from dcpjax.models.weights import PlacedModel, place_model, random_weights
from tests.golden.tiny import write_tiny_model

NAMES = ("gqa", "mqa", "qwen2", "qwen3")


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    return open_checkpoint(str(write_tiny_model(tmp_path_factory.mktemp("model"), request.param)))


def placed(checkpoint: Checkpoint, tp: int, dcp: int, gather: str = "none", **settings):
    config = checkpoint.config
    heads = HeadLayout(config.num_heads, config.num_kv_heads, tp, dcp)
    mesh = decode_mesh(jax.devices()[: tp * dcp], dcp)
    model = place_model(
        checkpoint, Sharding(heads, "ag_rs", gather), mesh, settings.get("dtype", jnp.float32)
    )
    return model, heads


def layers_of(model: PlacedModel):
    return model.merge(model.parameters)


MESHES = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 3), (2, 2), (4, 2), (1, 8)]


def heads_of(checkpoint: Checkpoint, projection: str, kind: str = "weight") -> np.ndarray:
    """A projection of the first layer by head: weights [heads, E, D], biases [heads, D]."""
    stored = np.asarray(checkpoint.read(f"model.layers.0.self_attn.{projection}_proj.{kind}"))
    by_head = stored.reshape(-1, checkpoint.config.head_dim, *stored.shape[1:])
    return np.moveaxis(by_head, 1, -1)


def placed_heads(by_head: np.ndarray, source: np.ndarray) -> list[np.ndarray]:
    return [by_head[head] if head >= 0 else np.zeros_like(by_head[0]) for head in source]


@pytest.mark.parametrize("gather", ["none", "q"])
@pytest.mark.parametrize("tp, dcp", MESHES)
def test_heads_are_where_the_layout_says(checkpoint, tp, dcp, gather):
    """A rank's share: its queries, its group's keys, its group's values; zeros where no head is."""
    model, heads = placed(checkpoint, tp, dcp, gather)
    attention = layers_of(model).layers[0].attention
    real = [head for head in heads.q_head_source if head >= 0]
    assert sorted(real) == list(range(checkpoint.config.num_heads))
    output = np.asarray(checkpoint.read("model.layers.0.self_attn.o_proj.weight")).T
    output = output.reshape(checkpoint.config.num_heads, checkpoint.config.head_dim, -1)
    assert np.array_equal(attention.o[...], placed_heads(output, heads.q_head_source))
    for kind in ("weight", "bias"):
        if kind == "bias" and not checkpoint.config.has_qkv_bias:
            continue
        array = attention.qkv[...] if kind == "weight" else attention.qkv_bias[...]
        by_kind = [heads_of(checkpoint, name, kind) for name in "qkv"]
        for rank, shard in enumerate(array.addressable_shards):
            share = np.moveaxis(np.asarray(shard.data), -2, 0)
            want = expected_share(by_kind, heads, rank, gather)
            assert np.array_equal(share, want), (kind, rank)


def expected_share(
    by_kind: list[np.ndarray], heads: HeadLayout, rank: int, gather: str
) -> list[np.ndarray]:
    """What rank ``rank`` computes of queries, keys and values, by the rank's numbers alone."""
    group, dcp_rank = divmod(rank, heads.dcp)
    queries = heads.q_head_source.reshape(heads.groups, heads.group_heads)[group]
    if gather == "none":
        queries = queries.reshape(heads.dcp, -1)[dcp_rank]
    kv_heads = heads.kv_head_source.reshape(heads.groups, heads.group_kv_heads)[group]
    sources = (queries, kv_heads, kv_heads)
    pairs = zip(by_kind, sources, strict=True)
    return [head for by_head, source in pairs for head in placed_heads(by_head, source)]


@pytest.mark.parametrize("tp, dcp", MESHES)
def test_queries_meet_their_own_kv_head(checkpoint, tp, dcp):
    """Query heads belong to the KV head that segment attention pairs them with."""
    config = checkpoint.config
    heads = HeadLayout(config.num_heads, config.num_kv_heads, tp, dcp)
    share = config.num_heads // config.num_kv_heads
    queries = heads.q_head_source.reshape(-1, heads.queries_per_kv_head)
    for kv_head, own in zip(heads.kv_head_source, queries, strict=True):
        assert {head // share for head in own if head >= 0} <= {kv_head}


@pytest.mark.parametrize("tp, dcp", [(1, 1), (4, 2), (1, 3)])
def test_widths_are_padded_with_zeros(checkpoint, tp, dcp):
    model, _ = placed(checkpoint, tp, dcp)
    llama, ranks = layers_of(model), tp * dcp
    embedding = np.asarray(llama.embedding.weight[...])
    assert embedding.shape[0] == -(-131 // ranks) * ranks
    assert np.array_equal(embedding[:131], checkpoint.read("model.embed_tokens.weight"))
    assert not embedding[131:].any()
    gate_up = np.asarray(llama.layers[1].mlp.gate_up[...])
    for place, name in enumerate(("gate", "up")):
        stored = checkpoint.read(f"model.layers.1.mlp.{name}_proj.weight")
        assert np.array_equal(gate_up[:, place, :49].T, stored)
        assert not gate_up[:, place, 49:].any()
    down = np.asarray(llama.layers[1].mlp.down[...])
    assert down.shape[0] == -(-49 // ranks) * ranks
    assert np.array_equal(down[:49].T, checkpoint.read("model.layers.1.mlp.down_proj.weight"))
    assert not down[49:].any()


def test_gathered_queries_have_whole_weights_on_each_dcp_rank(checkpoint):
    for gather, share in (("none", 4), ("q", 2)):
        model, _ = placed(checkpoint, 2, 2, gather)
        attention = layers_of(model).layers[0].attention
        for parameter, axis in ((attention.qkv, 1), (attention.o, 0)):
            array = parameter[...]
            assert array.addressable_shards[0].data.shape[axis] == array.shape[axis] // share


def test_every_tensor_is_read_once_and_progress_is_told(checkpoint):
    read: list[str] = []
    events: list[tuple[str, int, int]] = []
    config = checkpoint.config
    spy = replace(checkpoint, read=lambda name: read.append(name) or checkpoint.read(name))
    heads = HeadLayout(config.num_heads, config.num_kv_heads, 1, 1)
    mesh = decode_mesh(jax.devices()[:1], 1)
    model = place_model(
        spy, Sharding(heads), mesh, jnp.bfloat16, lambda *event: events.append(event)
    )
    assert sorted(read) == sorted(checkpoint.shapes)
    count = len(model.parameters)
    assert events == [("load", n, count) for n in range(1, count + 1)]


def test_random_weights_depend_on_name_and_seed_alone(checkpoint):
    name, norm = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    first, again, other = (random_weights(checkpoint, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.read(name), again.read(name))
    assert not np.array_equal(first.read(name), other.read(name))
    assert not np.array_equal(first.read(name), first.read(name.replace("1", "0")))
    assert np.array_equal(first.read(norm), np.ones(32))
    assert first.read(name).shape == checkpoint.shapes[name]
