"""What is compiled and counted, and that the pool's bytes stay in place while serving."""

import jax
import pytest

from dcpjax.cache.parts import KV
from dcpjax.config import EngineConfig
from dcpjax.engine.audit import StepAudit
from dcpjax.engine.compilations import COMPILATIONS
from dcpjax.engine.engine import Engine
from dcpjax.engine.runner import Runner
from dcpjax.errors import AuditError
from tests.engine.serving import engine_of, request_of, serve
from tests.golden.tiny import random_tokens


def addresses(pool: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in pool.addressable_shards]


@pytest.fixture(scope="module")
def progress() -> list[tuple[str, int, int]]:
    return []


@pytest.fixture(scope="module")
def engine(tiny, progress):
    config = EngineConfig(
        str(tiny.path),
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
        block_size=8,
        max_num_seqs=3,
        max_num_batched_tokens=80,
        max_model_len=128,
        num_pages=24,
        kv_cache_dtype="bfloat16",
    )
    engine = Engine(config, tiny, progress=lambda *event: progress.append(event))
    yield engine
    engine.close()


def test_every_shape_is_compiled_and_audited(engine):
    names = ["1x1+0x0", "2x1+0x0", "3x1+0x0", "3x1+1x64", "3x1+1x80"]
    names = [f"{name} of 8 pages" for name in names]
    assert engine.runner.shape_names == names
    assert [audit.step for audit in engine.runner.audits] == names
    assert all(isinstance(audit, StepAudit) for audit in engine.runner.audits)
    share = engine.runner.pools[KV].addressable_shards[0].data.nbytes
    assert {audit.aliased_bytes for audit in engine.runner.audits} == {share}
    assert all(audit.temporary_bytes < 8 << 20 for audit in engine.runner.audits)


def test_progress_is_told_of_every_tensor_and_shape(engine, progress):
    loads = [event for event in progress if event[0] == "load"]
    compiled = [event for event in progress if event[0].startswith("compile ")]
    assert [event[1] for event in loads] == list(range(1, loads[0][2] + 1))
    told = {event[0] for event in compiled}
    assert {f"compile {name}" for name in engine.runner.shape_names} < told
    assert any("sampling" in what for what in told)
    assert sorted(event[1] for event in compiled) == list(range(1, compiled[0][2] + 1))
    names = engine.runner.shape_names
    for what in ("audit", "run for the first time"):
        events = [event for event in progress if event[0].startswith(what)]
        assert sorted(event[0] for event in events) == sorted(f"{what} {name}" for name in names)
        assert sorted(event[1:] for event in events) == [(n, 5) for n in range(1, 6)]


def test_the_pool_stays_in_place_while_serving(engine):
    before = addresses(engine.runner.pools[KV])
    requests = [
        request_of(str(n), random_tokens(str(n), 10 * n + 1), max_tokens=9, logprobs=n % 2 or None)
        for n in range(6)
    ]
    serve(engine, requests)
    assert addresses(engine.runner.pools[KV]) == before


def test_a_compilation_after_warm_up_is_counted(engine):
    """The counter that says zero elsewhere can say something else."""
    before = engine.stats()["compilations_after_warmup"]
    jax.jit(lambda x: x + before)(jax.numpy.ones(3)).block_until_ready()
    assert engine.stats()["compilations_after_warmup"] > before
    counted = COMPILATIONS.unexpected
    with COMPILATIONS.expected():
        jax.jit(lambda x: x - before)(jax.numpy.ones(3)).block_until_ready()
    assert COMPILATIONS.unexpected == counted


def test_a_step_that_moves_the_pool_is_refused(tiny, monkeypatch):
    """As a runtime that does not honour the donation would."""
    counts = iter(range(1000))
    monkeypatch.setattr(Runner, "_addresses", lambda self: [next(counts)])
    with pytest.raises(AuditError, match="moved the KV pool"):
        engine_of(tiny, max_num_seqs=1)
