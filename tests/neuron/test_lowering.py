"""One rank's program without the devices: what XLA's partitioner would make, in the old form."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from neuron.errors import LoweringError
from neuron.hlo import File, Module, entry
from neuron.lowering import abstract_mesh, lower
from neuron.program import to_bytes

MESH = {"tp": 2, "dcp": 4}
MOVES = {"parameter", "tuple", "get-tuple-element", "copy", "constant", "broadcast"}
"""The partitioner copies inputs and outputs, and shares equal constants."""
RANKS = PartitionSpec(("tp", "dcp"))


def program(mesh: Any, factor: float = 2.0) -> Any:
    """Two collectives, a nested function, and an array that is updated in place."""

    @jax.jit
    def doubled(x):
        return factor * x

    def on_rank(x, pool):
        gathered = lax.all_gather(doubled(doubled(x)), "dcp", axis=0, tiled=True)
        own = lax.psum_scatter(gathered, "tp", scatter_dimension=0, tiled=True)
        return own, lax.dynamic_update_slice(pool, own[:1], (0, 0))

    return jax.shard_map(on_rank, mesh=mesh, in_specs=(RANKS, RANKS), out_specs=(RANKS, RANKS))


def arguments(mesh: Any) -> list[Any]:
    sharding = NamedSharding(mesh, RANKS)
    shapes = (32, 3), (32, 3)
    return [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes]


@pytest.fixture(scope="module")
def lowered() -> Any:
    mesh = abstract_mesh(MESH)
    return lower(program(mesh), arguments(mesh), name="both", aliases={1: 1})


def instructions(module: Any) -> list[Any]:
    return [i for computation in module.computations for i in computation.instructions]


def test_a_program_of_ranks_that_do_not_exist():
    mesh = abstract_mesh({"tp": 16, "dcp": 4})
    sharding = NamedSharding(mesh, RANKS)
    wide = [jax.ShapeDtypeStruct((1024, 3), jnp.float32, sharding=sharding)] * 2
    module = lower(program(mesh), wide, name="many", aliases={})
    groups = [i.replica_groups for i in instructions(module) if i.opcode == "all-gather"]
    assert [[list(g.replica_ids) for g in group][:2] for group in groups] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    ]


def test_ids_are_dense_and_small(lowered):
    ids = [i.id for i in instructions(lowered)]
    assert ids == list(range(1, len(ids) + 1))
    known = set(ids)
    assert all(set(i.operand_ids) <= known for i in instructions(lowered))


def test_groups_are_explicit_and_in_the_oldest_field(lowered):
    found = {
        i.opcode: [list(group.replica_ids) for group in i.replica_groups]
        for i in instructions(lowered)
        if i.replica_groups
    }
    assert found == {
        "all-gather": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "reduce-scatter": [[0, 4], [1, 5], [2, 6], [3, 7]],
    }
    assert not any(i.HasField("collective_device_list") for i in instructions(lowered))
    assert not any(i.HasField("mesh_axes_replica_group_list") for i in instructions(lowered))


def test_calls_are_gone_and_shapes_are_those_of_one_rank(lowered):
    assert "call" not in {i.opcode for i in instructions(lowered)}
    shapes = [tuple(s.dimensions) for s in lowered.host_program_shape.parameters]
    assert shapes == [(4, 3), (4, 3)]


def test_aliases_are_kept(lowered):
    (alias,) = lowered.input_output_alias.entries
    assert list(alias.output_shape_index) == [1]
    assert alias.parameter_number == 1


def test_two_lowerings_give_the_same_bytes(lowered):
    mesh = abstract_mesh(MESH)
    again = lower(program(mesh), arguments(mesh), name="both", aliases={1: 1})
    assert to_bytes(again) == to_bytes(lowered)


def test_unknown_fields_survive(lowered):
    """A dot's precision or a scatter's flags are not among the messages' fields."""
    copied = Module.FromString(lowered.SerializeToString())
    assert copied.SerializeToString(deterministic=True) == lowered.SerializeToString(
        deterministic=True
    )


def test_a_rank_program_is_what_the_partitioner_makes(lowered, tmp_path):
    """The real devices' compiled module starts from the same instructions."""
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), devices=jax.devices()[:8])
    options = {
        "xla_dump_to": str(tmp_path),
        "xla_dump_hlo_as_proto": True,
        "xla_dump_hlo_pass_re": ".*",
    }
    factor = random.random()  # a program that no cache has: only a compilation writes files
    jax.jit(program(mesh, factor)).lower(*arguments(mesh)).compile(compiler_options=options)
    partitioned = sorted(tmp_path.glob("*spmd-partitioner.after_*before_pipeline-end.hlo.pb"))
    assert partitioned
    module = File.FromString(partitioned[-1].read_bytes()).hlo_module
    assert computed(lowered) == computed(module)


def computed(module: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Opcodes and shapes of what computes or exchanges something."""
    return sorted(
        (i.opcode, tuple(i.shape.dimensions))
        for i in entry(module).instructions
        if i.opcode not in MOVES
    )


def test_a_lone_rank_has_a_program():
    """JAX writes no manual computation for a mesh of one device."""
    mesh = abstract_mesh({"tp": 1, "dcp": 1})
    alone = lower(program(mesh), arguments(mesh), name="both", aliases={1: 1})
    shapes = [tuple(s.dimensions) for s in alone.host_program_shape.parameters]
    assert shapes == [(32, 3), (32, 3)]
    assert [alias.parameter_number for alias in alone.input_output_alias.entries] == [1]


def test_more_than_a_shard_map_is_refused():
    mesh = abstract_mesh(MESH)
    with pytest.raises(LoweringError, match="one shard_map"):
        lower(
            lambda x, pool: tuple(y + 1 for y in program(mesh)(x, pool)),
            arguments(mesh),
            name="x",
            aliases={},
        )
