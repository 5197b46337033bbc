"""The audit passes every step that the engine compiles, and finds each way to copy a pool."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dcpjax.cache.parts import KV
from dcpjax.engine.audit import StepAudit, audit_step, check_aliased
from dcpjax.engine.collectives import collectives_of
from dcpjax.engine.step import StepResult, StepShape
from dcpjax.errors import AuditError
from dcpjax.models.checkpoint import Checkpoint
from tests.engine.harness import Layout, StepHarness

TABLE = 8
SHAPES = {
    "one row": StepShape(1, 0, 0, TABLE),
    "four rows": StepShape(4, 0, 0, TABLE),
    "rows and a chunk": StepShape(2, 1, 16, TABLE),
    "rows and two chunks": StepShape(1, 2, 16, TABLE),
}
MESHES = {
    "1x1": Layout(),
    "1x3": Layout(1, 3, exchange="a2a"),
    "2x2": Layout(2, 2, prefill_gather="q", interleave=4),
}
NUM_PAGES = 40


def harness_of(tiny, mesh: str, shape: str, kv_dtype: str, num_pages: int = NUM_PAGES):
    return StepHarness(
        tiny, MESHES[mesh], SHAPES[shape], num_pages=num_pages, kv_dtype=jnp.dtype(kv_dtype)
    )


def audited(harness: StepHarness, compiled: Any) -> StepAudit:
    share = harness.pool.addressable_shards[0].data
    return audit_step(compiled, "step", pool_shapes=[share.shape])


# Batch 1 and above, one rank and several, both ways to store values; not every one with every one.
STEPS = [
    ("1x1", "one row", "float32"),
    ("1x1", "four rows", "bfloat16"),
    ("1x1", "rows and a chunk", "float32"),
    ("1x3", "one row", "bfloat16"),
    ("1x3", "rows and two chunks", "float32"),
    ("2x2", "one row", "float32"),
    ("2x2", "rows and a chunk", "bfloat16"),
]


@pytest.mark.parametrize("mesh, shape, kv_dtype", STEPS)
def test_a_step_updates_the_pool_in_place(tiny, mesh, shape, kv_dtype):
    """No copy; and temporaries do not grow with the pool, which a copy in disguise would."""
    small = harness_of(tiny, mesh, shape, kv_dtype)
    large = harness_of(tiny, mesh, shape, kv_dtype, 2 * NUM_PAGES)
    audits = [audited(harness, harness.compiled) for harness in (small, large)]
    shares = [harness.pool.addressable_shards[0].data.nbytes for harness in (small, large)]
    assert shares[1] > 1.9 * shares[0]
    assert [audit.aliased_bytes for audit in audits] == shares
    assert audits[1].temporary_bytes == audits[0].temporary_bytes


def test_the_pool_stays_where_it_was(tiny):
    harness = harness_of(tiny, "2x2", "rows and a chunk", "float32")
    before = [shard.data.unsafe_buffer_pointer() for shard in harness.pool.addressable_shards]
    harness.run()
    after = [shard.data.unsafe_buffer_pointer() for shard in harness.pool.addressable_shards]
    assert len(set(before)) == 4 and before == after


# Planted violations


def changed(harness: StepHarness, change: Any) -> Any:
    """The harness's step with a pool that went through ``change``."""

    def step(parameters, pools, *rest):
        pools, *others = harness.step(parameters, pools, *rest)
        return {KV: change(pools[KV])}, *others

    return step


def test_an_old_pool_read_after_the_write_is_a_copy(tiny):
    harness = harness_of(tiny, "1x1", "one row", "float32")

    def step(parameters, pools, *rest):
        written, tokens, logits, *_ = harness.step(parameters, pools, *rest)
        return written, tokens, logits + pools[KV][0, 0, 0, 0, 0]

    with pytest.raises(AuditError, match="copies of the KV pool"):
        audited(harness, harness.compile(step))


def test_a_pool_rewritten_as_a_whole_is_a_copy(tiny):
    harness = harness_of(tiny, "1x3", "one row", "float32")
    with pytest.raises(AuditError, match="copies of the KV pool"):
        audited(harness, harness.compile(changed(harness, lambda pool: pool * 1.5)))


def test_a_step_that_is_not_donated_is_found(tiny):
    harness = harness_of(tiny, "1x1", "one row", "float32")
    with pytest.raises(AuditError, match="not updated in place"):
        audited(harness, harness.compile(harness.step, donate=False))


def scatter_step(pool: jax.Array, row: jax.Array, *, leading: bool) -> tuple[jax.Array, jax.Array]:
    """Write layer by layer and read it back, on a pool with or without an axis of 1 in front."""
    inner = pool[0] if leading else pool
    total = jnp.zeros(())
    for layer in range(3):
        inner = inner.at[row, layer].set(total + jnp.ones(inner.shape[2:], inner.dtype))
        total += jnp.sum(jax.lax.dynamic_slice_in_dim(inner[:, layer], row[0], 2, axis=0))
    return (inner[None] if leading else inner), total


@pytest.mark.parametrize("leading", [False, True])
def test_a_leading_axis_of_one_is_found_where_it_copies(leading):
    """A habit of shard_map code. Where this version of XLA does not copy, nothing is found."""
    shape = (64, 3, 2, 8, 16)
    pool = jnp.zeros((1, *shape) if leading else shape)
    step = jax.jit(partial(scatter_step, leading=leading), donate_argnums=0)
    compiled = step.lower(pool, jnp.zeros(1, jnp.int32)).compile()
    share = pool.nbytes
    if compiled.memory_analysis().temp_size_in_bytes < share:
        audit_step(compiled, "step", pool_shapes=[pool.shape])
    else:
        assert leading
        with pytest.raises(AuditError):
            audit_step(compiled, "step", pool_shapes=[shape])


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="newer XLA:CPU updates bfloat16 arrays in place"
)
def test_a_pool_of_native_bfloat16_is_found():
    pool = jnp.zeros((64, 3, 2, 8, 16), jnp.bfloat16)

    def write(pool, row):
        return pool.at[row, 1, :, 3].set(jnp.ones((1, 2, 16), pool.dtype)), row

    compiled = jax.jit(write, donate_argnums=0).lower(pool, jnp.zeros(1, jnp.int32)).compile()
    with pytest.raises(AuditError, match="copies of the KV pool"):
        audit_step(compiled, "step", pool_shapes=[pool.shape])


def test_the_pools_are_the_first_result_of_a_step():
    """Where the audit looks for them."""
    assert StepResult._fields[0] == "pools"


# The reader of compiled programs, on small ones written by hand

HEADER = (
    "HloModule step, input_output_alias={ {0}: (3, {}, may-alias), {2}: (5, {}, must-alias) }\n"
)


class Program:
    """Text, and sizes that do not matter."""

    alias_size_in_bytes = 7
    temp_size_in_bytes = 5

    def __init__(self, body: str, header: str = HEADER) -> None:
        self.text = header + body

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> "Program":
        return self


def audit_text(body: str) -> StepAudit:
    return audit_step(Program(body), "by hand", pool_shapes=[(9, 2)])


IN_PLACE = """
%fused_computation (p.1: f32[9,2], p.2: f32[1,2]) -> f32[9,2] {
  %p.1 = f32[9,2]{1,0} parameter(0)
  %p.2 = f32[1,2]{1,0} parameter(1)
  %inside = f32[9,2]{1,0} add(%p.1, %p.1)
  ROOT %dus = f32[9,2]{1,0} dynamic-update-slice(%p.1, %p.2)
}

ENTRY %main (pool: f32[9,2]) -> (f32[9,2], s32[]) {
  %pool = f32[9,2]{1,0} parameter(0), metadata={op_name="pool"}
  %new = f32[1,2]{1,0} constant({...})
  %written = f32[9,2]{1,0} fusion(%pool, %new), kind=kLoop, calls=%fused_computation
  %loop = (f32[9,2]{1,0}, s32[]) while(%written), condition=%c, body=%b
  %passed = f32[9,2]{1,0} get-tuple-element(%loop), index=0
  ROOT %out = (f32[9,2]{1,0}, s32[]) tuple(%passed)
}
"""


FUSIONS = {
    "%adds": """
%adds (p: f32[9,2]) -> f32[9,2] {
  %p = f32[9,2]{1,0} parameter(0)
  ROOT %sum = f32[9,2]{1,0} add(%p, %p)
}
""",
    "%pairs": """
%pairs (p: f32[9,2]) -> (s32[], f32[9,2]) {
  %p = f32[9,2]{1,0} parameter(0)
  %n = s32[] constant(3)
  %square = f32[9,2]{1,0} multiply(%p, %p)
  ROOT %both = (s32[], f32[9,2]{1,0}) tuple(s32[] %n, f32[9,2]{1,0} %square)
}
""",
}


def test_what_passes_the_pool_on_is_no_copy():
    """A fusion is its root: what is inside never gets memory of its own."""
    audit = audit_text(IN_PLACE)
    assert audit == StepAudit("by hand", 7, 5, 10)


@pytest.mark.parametrize(
    "line, named",
    [
        ("%c.1 = f32[9,2]{1,0} copy(%pool)", "c.1 (copy)"),
        ("c.2 = f32[9,2]{0,1} transpose(%pool)", "c.2 (transpose)"),
        ("%c.3 = f32[9,2]{1,0} fusion(%pool), kind=kLoop, calls=%adds", "c.3 (add)"),
        ("%c.4 = (s32[], f32[9,2]{1,0}) fusion(%pool), calls=%pairs", "c.4 (multiply)"),
        ("%c.5 = (f32[9,2]{1,0}, u32[]) copy-start(%pool)", "c.5 (copy-start)"),
        ("%c.6 = u16[9,2]{1,0} convert(%pool)", "c.6 (convert)"),
        ("%c.7 = f32[9,3]{1,0} copy(%other)", None),
        ("%c.8 = f32[19,2]{1,0} copy(%other)", None),
    ],
)
def test_what_makes_a_second_pool_is_named(line, named):
    called = "".join(text for name, text in FUSIONS.items() if f"calls={name}" in line)
    body = called + IN_PLACE.replace("  %new =", f"  {line}\n  %new =")
    if named is None:
        audit_text(body)
        return
    with pytest.raises(AuditError) as error:
        audit_text(body)
    assert error.value.values == {"step": "by hand", "instructions": [named]}


@pytest.mark.parametrize("output, is_aliased", [(0, True), (1, False), (2, True), (3, False)])
def test_aliases_are_read_from_the_header(output, is_aliased):
    if is_aliased:
        check_aliased(HEADER, "step", output)
        return
    with pytest.raises(AuditError, match="not updated in place"):
        check_aliased(HEADER, "step", output)


@pytest.mark.parametrize("header", ["", "HloModule step\n{0}: (0, {}, may-alias)"])
def test_no_aliases_in_the_header(header):
    with pytest.raises(AuditError, match="not updated in place"):
        check_aliased(header, "step")


# Collectives


def compiled_text(model: Checkpoint, layout: Layout) -> str:
    return StepHarness(model, layout, SHAPES["one row"], num_pages=8).compiled.as_text()


@pytest.mark.parametrize(
    "layout, per_layer",
    [
        (Layout(1, 4), 5),  # attention 3, and the sums after attention and MLP
        (Layout(1, 4, exchange="a2a"), 4),
        (Layout(4, 1), 2),
        (Layout(2, 2, interleave=4), 5),
    ],
)
def test_collectives_of_a_layer(tiny, layout, per_layer):
    """Of a decode step: those of two layers less those of one."""
    one = replace(tiny, config=replace(tiny.config, num_layers=1))
    counts = [len(collectives_of(compiled_text(model, layout))) for model in (one, tiny)]
    assert counts[1] - counts[0] == per_layer
