"""Collectives: predicted kind, count and bytes are those of compiled programs."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from dcpjax.engine.collectives import collectives_of
from dcpjax.engine.step import StepShape
from dcpjax.models.checkpoint import open_checkpoint
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.models import find_model
from dcpjax.planner.traffic import Collective, traffic
from tests.engine.harness import Layout, StepHarness
from tests.golden.tiny import write_tiny_model

SIZES = {"f32": 4, "bf16": 2, "s32": 4}
"""Bytes of the types of exchanged values."""


def compiled_collectives(text: str) -> Counter:
    """(kind, ranks, bytes) of each collective in a compiled program.

    The bytes are counted as :class:`Collective` counts them: of the result, times the ranks where
    it is a share.
    """
    found: Counter = Counter()
    for one in collectives_of(text):
        size = sum(SIZES[dtype] * math.prod(extents) for dtype, extents in one.shapes)
        is_share = one.kind == "reduce-scatter"
        found[one.kind, one.num_ranks, size * (one.num_ranks if is_share else 1)] += one.repeats
    return found


def predicted(collectives: tuple[Collective, ...]) -> Counter:
    found: Counter = Counter()
    for item in collectives:
        found[item.kind, item.ranks, item.num_bytes] += item.count
    return found


CASES = [
    ("gqa", Layout(1, 4), 1),
    ("gqa", Layout(1, 4, exchange="a2a"), 2),
    ("gqa", Layout(4, 1), 3),
    ("gqa", Layout(2, 2, interleave=4), 4),
    ("gqa", Layout(1, 3), 2),
    ("qwen3", Layout(2, 2), 1),
    ("mqa", Layout(2, 1), 2),
    ("gqa", Layout(1, 1), 2),
]


@pytest.mark.parametrize("name, layout, rows", CASES)
def test_collectives_are_those_of_the_compiled_step(name, layout, rows, tmp_path):
    folder = write_tiny_model(tmp_path, name)
    checkpoint = open_checkpoint(str(folder))
    harness = StepHarness(checkpoint, layout, StepShape(rows, 0, 0, 4), num_pages=8)
    deployment = Deployment(
        tp=layout.tp * layout.dcp,
        dcp=layout.dcp,
        exchange=layout.exchange,
        page_size=layout.page_size,
        cache_dtype="float32",
    )
    model = find_model(str(folder))
    wanted = predicted(traffic(model, deployment, rows, dtype="float32").collectives)
    assert compiled_collectives(harness.compiled.as_text()) == wanted
    assert bool(wanted) == (deployment.tp > 1)


def test_the_reader_of_programs_tells_sizes_apart():
    text = """ENTRY %main (x: f32[2]) -> f32[2] {
  %a = f32[4,2]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
  b = (f32[2,3]{1,0}, f32[2,3]{1,0}) all-to-all(%x, %y), replica_groups={{0,1}}
  %c = bf16[5]{0} reduce-scatter(%x), replica_groups=[1,4]<=[4]
"""
    assert compiled_collectives(text) == {
        ("all-reduce", 2, 32): 1,
        ("all-to-all", 2, 48): 1,
        ("reduce-scatter", 4, 40): 1,
    }


# Arithmetic of the sources

GLM = find_model("glm-5.2")


def test_a_decode_step_has_three_collectives_a_layer_or_two():
    for exchange, count in (("ag_rs", 3), ("a2a", 2)):
        deployment = Deployment(tp=8, dcp=8, exchange=exchange)
        found = traffic(GLM, deployment, 1)
        attention = [c for c in found.collectives if c.kind != "all-reduce" and c.count > 1]
        assert [c.count for c in attention] == [78] * count


def test_decode_moves_no_kv():
    """Bytes do not depend on the context; one source counts the whole cache as moved."""
    deployment = Deployment(tp=8, dcp=8)
    assert traffic(GLM, deployment, 1) == traffic(GLM, deployment, 1, context=10**6)


def test_prefill_with_a_shared_cache_gathers_the_context():
    """Facts C3: at 64K tokens 43 MB a layer."""
    deployment = Deployment(pcp=8, dcp=8, prefill_kv="sharded")
    found = traffic(GLM, deployment, 2048, context=65536 - 2048, is_prefill=True)
    latent = next(c for c in found.collectives if c.purpose.endswith("latent"))
    assert round(latent.num_bytes / 1e6) == 43 and latent.count == 78
    replicated = replace(deployment, dcp=1, prefill_kv="replicated")
    new = traffic(GLM, replicated, 2048, context=65536 - 2048, is_prefill=True)
    assert new.num_bytes == 2048 * (78 * 656 + 21 * 132)


def test_a_layer_split_sends_the_prefix_of_each_layer_once():
    deployment = Deployment(pcp=8, prefill_kv="layer_split")
    found = traffic(GLM, deployment, 64, context=1000, is_prefill=True)
    assert found.num_bytes == (64 + 1000) * (78 * 656 + 21 * 132)
    assert traffic(GLM, deployment, 64, is_prefill=True).num_messages == 78 + 21
