"""Collectives of compiled steps: read correctly, and never dependent on what a step is about."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dcpjax.engine.collectives import Collective, check_collectives, collectives_of
from dcpjax.engine.step import StepShape
from dcpjax.errors import AuditError
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.engine.drafting_glm import drafting_glm
from tests.engine.harness import Layout, StepHarness
from tests.golden.tiny import write_tiny_model

X = "x"


def program(function: Any, *values: Any) -> str:
    """The text of a program over two ranks, of values that both have whole."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), (X,))
    whole = PartitionSpec()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return jax.jit(mapped).lower(*values).compile().as_text()


VECTOR = np.ones(4, np.float32)
COUNT = np.int32(3)


def test_kinds_shapes_groups_and_order():
    text = program(lambda v: lax.all_gather(lax.psum(v, X) * v, X), VECTOR)
    first, second = collectives_of(text)
    assert (first.kind, second.kind) == ("all-reduce", "all-gather")
    assert (first.shapes, first.num_ranks, first.repeats) == ((("f32", (4,)),), 2, 1)


def test_a_loop_of_constant_length_is_fine():
    def loop(v):
        return lax.fori_loop(0, 5, lambda _, x: lax.psum(x * v, X), v)

    found = check_collectives(program(loop, VECTOR), "loop")
    assert sum(one.repeats for one in found) == 5


def test_a_loop_of_traced_length_is_not():
    def loop(v, count):
        return lax.fori_loop(0, count, lambda _, x: lax.psum(x * v, X), v)

    with pytest.raises(AuditError, match="inside='while'"):
        check_collectives(program(loop, VECTOR, COUNT), "loop")


def test_a_branch_is_not():
    def branch(v, count):
        return lax.cond(count > 2, lambda x: lax.psum(x, X), jnp.sin, v)

    with pytest.raises(AuditError, match="inside='conditional'"):
        check_collectives(program(branch, VECTOR, COUNT), "branch")


@pytest.mark.parametrize(
    "groups, ranks", [("{{0,1},{2,3}}", 2), ("[1,4]<=[4]", 4), ("[2,3]<=[3,2]T(1,0)", 3)]
)
def test_groups_in_every_form(groups: str, ranks: int):
    text = f"ENTRY %main (x: f32[2]) -> f32[2] {{\n  %a = f32[2]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add\n}}"  # noqa: E501
    (found,) = collectives_of(text)
    assert found == Collective("all-reduce", (("f32", (2,)),), groups)
    assert found.num_ranks == ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder: Path = tmp_path_factory.mktemp("collectives")
    return {
        "llama": open_checkpoint(str(write_tiny_model(folder / "gqa", "gqa"))),
        "glm": drafting_glm(folder / "glm"),
    }


SHAPES = [StepShape(2, 0, 0, 4), StepShape(1, 1, 16, 4)]
LAYOUTS = {
    "dcp 4": Layout(1, 4),
    "tp 2, dcp 2, all-to-all": Layout(2, 2, exchange="a2a"),
    "dcp 4, whole index": Layout(1, 4, index="replicated"),
    "dcp 4, queries gathered": Layout(1, 4, prefill_gather="q"),
}
STEPS = [
    ("llama", "dcp 4"),
    ("llama", "tp 2, dcp 2, all-to-all"),
    ("llama", "dcp 4, queries gathered"),
    ("glm", "dcp 4"),
    ("glm", "dcp 4, whole index"),
]
CASES = [(*step, shape) for shape in SHAPES for step in STEPS]
CASES.append(("glm", "dcp 4", replace(SHAPES[-1], expanded_context=32)))


@pytest.mark.parametrize("model, layout, shape", CASES, ids=str)
def test_collectives_of_steps_depend_on_no_value(
    models: dict[str, Checkpoint], model: str, layout: str, shape: StepShape
):
    harness = StepHarness(models[model], LAYOUTS[layout], shape, num_pages=8)
    found = check_collectives(harness.compiled.as_text(), str(shape))
    assert len(found) > 4
    assert {one.num_ranks for one in found} <= {2, 4}
