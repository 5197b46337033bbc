"""Laws of the estimated steps: what they grow with, what divides them, what bounds them."""

from dataclasses import replace

import pytest

from dcpjax.errors import ConfigError
from dcpjax.planner.crossover import dcp_crossover
from dcpjax.planner.data import read_data
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.hardware import (
    all_constants,
    collective_seconds,
    constant,
    find_device,
    known_devices,
)
from dcpjax.planner.models import find_model
from dcpjax.planner.provenance import kinds_of
from dcpjax.planner.steps import Cost, acceptance_length, decode_step, prefill_step

GLM, H200 = find_model("glm-5.2"), find_device("h200")
LLAMA = find_model("llama-3.1-70b")
DEPLOYMENTS = [
    (GLM, Deployment(tp=8)),
    (GLM, Deployment(tp=8, dcp=8)),
    (GLM, Deployment(dp=8, draft_tokens=3)),
    (LLAMA, Deployment(tp=8)),
    (LLAMA, Deployment(tp=16, dcp=2)),
    (find_model("deepseek-v3"), Deployment(tp=8, dcp=4)),
]


@pytest.mark.parametrize("model, deployment", DEPLOYMENTS)
def test_a_step_takes_no_less_for_more(model, deployment):
    by_context = [
        decode_step(model, H200, deployment, 8, c).seconds for c in (0, 1000, 10**5, 10**6)
    ]
    by_batch = [decode_step(model, H200, deployment, b, 10**4).seconds for b in (1, 2, 16, 256)]
    by_tokens = [prefill_step(model, H200, deployment, n, 0).seconds for n in (1, 64, 4096)]
    for times in (by_context, by_batch, by_tokens):
        assert times == sorted(times) and times[0] > 0


@pytest.mark.parametrize("model, deployment", DEPLOYMENTS)
def test_parts_add_up_and_the_longest_is_named(model, deployment):
    step = decode_step(model, H200, deployment, 4, 10**5)
    parts = step.by_part()
    assert sum(parts.values()) == pytest.approx(step.seconds)
    assert step.bottleneck().split(" (")[0] == max(parts, key=lambda name: parts[name])


def test_a_cost_is_bound_by_what_takes_longest():
    costs = [
        Cost("a", 1e15, 1e3),
        Cost("b", 1e3, 1e12),
        Cost("c", 1e3, 1e3, 1.0),
    ]
    assert [cost.bound(H200, "bfloat16") for cost in costs] == ["compute", "memory", "latency"]
    assert costs[2].seconds(H200, "bfloat16") == pytest.approx(1.0)
    half_the_bandwidth = replace(H200, memory_tb_s=2.4)
    both = [costs[1].seconds(device, "bfloat16") for device in (H200, half_the_bandwidth)]
    assert both[1] == pytest.approx(2 * both[0])


def test_dcp_divides_index_reads_and_adds_exchanges():
    one, eight = (
        decode_step(GLM, H200, Deployment(tp=8, dcp=n), 1, 10**6).by_part() for n in (1, 8)
    )
    assert eight["indexer"] == pytest.approx(one["indexer"] / 8)
    assert eight["collectives"] > one["collectives"]


def test_exchanges_of_one_sequence_are_latency():
    """Facts C3: three collectives of 8 ranks in 78 layers, 2.8 ms; two of them 1.7 ms."""
    plain = decode_step(GLM, H200, Deployment(tp=8), 1, 1024).by_part()["collectives"]
    for exchange, milliseconds in (("ag_rs", 2.9), ("a2a", 1.7)):
        deployment = Deployment(tp=8, dcp=8, exchange=exchange)
        step = decode_step(GLM, H200, deployment, 1, 1024).by_part()
        assert step["collectives"] - plain == pytest.approx(milliseconds * 1e-3, rel=0.05)


def test_large_messages_are_bound_by_links_and_small_ones_by_latency():
    """Ten percent more of the link is nothing to the small ones."""
    large = prefill_step(GLM, H200, Deployment(pcp=8, dcp=8, prefill_kv="sharded"), 8192, 10**5)
    small = decode_step(GLM, H200, Deployment(tp=8, dcp=8, exchange="a2a"), 1, 1024)
    found = {}
    for name, step in (("large", large), ("small", small)):
        (cost,) = (cost for cost in step.costs if cost.name == "collectives")
        found[name] = cost.bound(H200, step.dtype)
        assert cost.seconds(H200, step.dtype) == cost.fixed_seconds + cost.link_seconds
    assert found == {"large": "links", "small": "latency"}


def test_gathering_the_context_costs_what_the_facts_say():
    """Facts C3: 9.9 ms at 64K tokens, 37.5 + 2 ms at 248K; and a message more in each layer."""
    messages = (78 + 21) * collective_seconds("all-gather", 8, 0, H200) * 1e3
    shared = Deployment(pcp=8, dcp=8, prefill_kv="sharded")
    for context, milliseconds in ((65536, 10.4), (248_000, 39.5)):
        found = [
            prefill_step(GLM, H200, d, 2048, context - 2048).by_part()["collectives"]
            for d in (shared, Deployment(pcp=8))
        ]
        gathered = (found[0] - found[1]) * 1e3 - messages
        assert gathered == pytest.approx(milliseconds, rel=0.05)


def test_the_indexer_is_repeated_under_tp_and_divided_under_pcp():
    tp, pcp = (
        prefill_step(GLM, H200, d, 8192, 10**5).by_part()["indexer"]
        for d in (Deployment(tp=8), Deployment(pcp=8))
    )
    assert tp == pytest.approx(8 * pcp)


def test_the_crossover_is_where_the_times_meet():
    deployment = Deployment(tp=8, dcp=8, exchange="a2a")
    context = dcp_crossover(GLM, H200, deployment, 32)
    assert context is not None and 1024 < context < GLM.max_context

    def gain(tokens: int) -> float:
        times = [
            decode_step(GLM, H200, d, 32, tokens).seconds
            for d in (replace(deployment, dcp=1), deployment)
        ]
        return times[0] - times[1]

    assert gain(context) >= 0 > gain(context - 1024)


def test_no_crossover_where_exchanges_cost_more_than_any_context():
    assert dcp_crossover(find_model("glm-5"), H200, Deployment(tp=8, dcp=2), 1) is None


def test_acceptance_lengths_are_the_measured_ones():
    assert acceptance_length(GLM, 3) == 2.99 and acceptance_length(GLM, 0) == 1
    assert acceptance_length(GLM, 100) == 4.06
    assert acceptance_length(find_model("deepseek-v3"), 3) == 2.49
    assert acceptance_length(find_model("deepseek-v3"), 1) == 1  # not measured
    assert acceptance_length(LLAMA, 3) == 1  # no draft layer


# Hardware


def test_every_device_and_constant_names_its_source():
    for name in known_devices():
        assert all(item.source and item.value > 0 for item in find_device(name).constants)
    assert all(item.source and item.unit for item in all_constants())
    kinds = kinds_of((*all_constants(), *H200.constants))
    assert set(kinds) == {"datasheet", "measured", "reported", "derived"}
    assert "h200.memory_gib" in kinds["datasheet"]


@pytest.mark.parametrize("kind, ranks, num_bytes, microseconds", read_data("collectives")["points"])
def test_fits_are_near_the_measured_points(kind, ranks, num_bytes, microseconds):
    """The fit's own stated error, 20 to 45 %."""
    found = collective_seconds(kind, ranks, num_bytes, H200) * 1e6
    assert found == pytest.approx(microseconds, rel=0.45)


def test_collectives_of_other_devices_and_sizes():
    assert collective_seconds("all-gather", 1, 1e9, H200) == 0
    small = [collective_seconds("all-gather", n, 0, H200) for n in (2, 3, 4, 8, 16)]
    assert small == sorted(small) and small[1] == small[2]
    h200, b200 = (
        collective_seconds("all-gather", 8, 1e9, find_device(d)) for d in ("h200", "b200")
    )
    assert b200 < h200


def test_unknown_devices_are_refused():
    with pytest.raises(ConfigError, match="device is known"):
        find_device("tpu")
    assert find_device(H200) is H200 and find_device("H200") == H200
    assert constant("descriptor_us").kind == "reported"
