"""What compiled prompt steps tell: even work, bytes as predicted, gathers that wait for nothing."""

from functools import cache

import jax
import pytest

from dcpjax.attention.segment import READ_TOKENS
from dcpjax.engine.hlo_text import array_types, read_instructions
from scripts.prefill import reads
from scripts.prefill.findings import Findings, imbalance, predicted_bytes
from scripts.prefill.models import GLM, LLAMA, write_model
from scripts.prefill.overlap import awaited_flops, find_exchanges
from scripts.prefill.program import Program
from scripts.prefill.steps import PLAIN, prompt_step

RANKS, CHUNK, CONTEXT = 4, 512, 4096
LAST = [CONTEXT - CHUNK]
VALUES = {
    "llama": dict(LLAMA) | {"num_hidden_layers": 4},
    "glm": dict(GLM) | {"num_hidden_layers": 4, "first_k_dense_replace": 4},
}
PCP = [(model, kv) for model in VALUES for kv in ("replicated", "sharded", "layer_split")]


@pytest.fixture(scope="module")
def find(tmp_path_factory):
    """Findings by model and residency, each compiled once."""

    @cache
    def find(model: str, residency: str) -> tuple[Findings, float]:
        folder = tmp_path_factory.mktemp(model)
        ranks = 1 if residency == PLAIN else RANKS
        step = prompt_step(
            write_model(folder, VALUES[model]),
            residency,
            jax.devices()[:ranks],
            chunk=CHUNK,
            context=CONTEXT,
        )
        compiled = step.compile()
        return Findings.of(step, compiled), compiled.cost_analysis()["flops"]

    return find


@pytest.mark.parametrize("model, residency", [*PCP, ("llama", PLAIN), ("glm", PLAIN)])
def test_products_are_those_that_the_compiler_counts(find, model, residency):
    """It counts every loop once, and besides products a few per cent of other operations."""
    found, compiler = find(model, residency)
    assert 0.95 <= found.program.total() / compiler <= 1


@pytest.mark.parametrize("model, residency", PCP)
def test_the_busiest_rank_does_no_more_than_a_twentieth_above_the_mean(find, model, residency):
    found, _ = find(model, residency)
    every = range(0, CONTEXT, CHUNK)
    assert imbalance(found.rank_flops(LAST)) <= 1.05
    for kind in found.program.score_widths:
        assert imbalance(found.loop_flops(kind, every)) <= 1.05
        assert imbalance(found.loop_flops(kind, LAST)) <= 1.05
        assert imbalance(found.pairs(kind, LAST[0])) <= 1.001


def test_ranks_with_one_long_chunk_each_would_do_uneven_work(find, monkeypatch):
    def in_order(num_tokens, ranks, rank):
        half = num_tokens // (2 * ranks)
        return [(half * n, half * (n + 1)) for n in (2 * rank, 2 * rank + 1)]

    monkeypatch.setattr(reads, "zigzag_chunks", in_order)
    found, _ = find("glm", "sharded")
    assert imbalance(found.pairs("indexer", 0)) > 1.5


@pytest.mark.parametrize("model, residency", PCP)
def test_all_ranks_together_do_the_work_of_one_device(find, model, residency):
    """Nothing is computed twice but for what a loop reads past the end of what it looks for."""
    found, plain = find(model, residency)[0], find(model, PLAIN)[0]
    work = sum(found.rank_flops(LAST)) / sum(plain.rank_flops(LAST))
    assert 0.99 <= work <= 1 + READ_TOKENS[True] / LAST[0]
    if model == "glm":
        shares = found.loop_flops("indexer", LAST)
        (whole,) = plain.loop_flops("indexer", LAST)
        assert max(shares) <= whole / RANKS


@pytest.mark.parametrize("model, residency", PCP)
def test_a_step_exchanges_what_the_planner_says(find, model, residency):
    found, _ = find(model, residency)
    assert found.exchanged_bytes == predicted_bytes(found.step, VALUES[model])
    parts = find_exchanges(found.program, found.step).values()
    copied = 0 if residency == "replicated" else 1
    assert all(len(part.rows) == len(part.layers) for part in parts)
    assert all(len(part.copies) == copied * len(part.layers) for part in parts)


AHEAD = [case for case in PCP if case[1] != "replicated"]


@pytest.mark.parametrize("model, residency", AHEAD)
def test_a_layer_is_gathered_while_the_one_before_it_computes(find, model, residency):
    found, _ = find(model, residency)
    parts = find_exchanges(found.program, found.step)
    for part in parts.values():
        assert set(awaited_flops(found.program, parts, part).values()) == {0}
    overlaps = found.overlaps(LAST[0])
    assert [one.layer for one in overlaps] == [1, 2, 3]
    assert all(one.beside == pytest.approx(1) for one in overlaps)


def test_a_gather_that_needs_the_layer_before_is_found(find):
    """The new rows of a layer are gathered late: they need all of the layer before."""
    found, _ = find("llama", "sharded")
    parts = find_exchanges(found.program, found.step)
    (part,) = parts.values()
    late = type(part)(part.layers, part.rows, part.rows)
    assert min(awaited_flops(found.program, parts, late).values()) > 0


LOOPS = """
%inner (p: f32[2]) -> f32[2] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[16,4]{1,0} parameter(1)
  ROOT %dot = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%outer (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %w = f32[2]{0} while(%p), condition=%c, body=%inner, backend_config={}
}

ENTRY %main (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  %one = (f32[2]{0}, pred[3]{0}) while(%p), condition=%c, body=%outer, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %two = f32[2]{0} while(%p), condition=%c, body=%inner, \
backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_loops_count_as_often_as_they_run():
    """A loop of unknown length inside one of a known length: its runs are those of all together."""
    program = Program.of(LOOPS, {"attention": 16})
    once = 2 * 8 * 4 * 16
    assert program.total() == 2 * once
    assert program.total({"attention": 7}) == (7 + 5) * once
    assert program.loops("attention", {"attention": 7}) == 7 * once


def test_the_text_of_a_program_tells_sizes_and_what_is_the_program_itself():
    instructions = read_instructions(LOOPS)
    assert [one.name for one in instructions if one.is_entry] == ["p", "one", "two"]
    (loop,) = (one for one in instructions if one.name == "one")
    assert (loop.body, loop.trip_count) == ("outer", 3)
    assert [array.num_bytes for array in array_types(loop.type)] == [8, 3]
    assert array_types("bf16[2,3]{1,0}")[0].num_bytes == 12
    assert array_types("f8e4m3fn[5]{0}")[0].num_bytes == 5
