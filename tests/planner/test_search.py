"""Searches: laws of the estimate, the frontier, refusals, and commands that our CLI takes."""

import shlex
from dataclasses import replace
from typing import Any

import click
import pytest

from dcpjax.cli import main
from dcpjax.config import EngineConfig
from dcpjax.errors import ConfigError, UnsupportedCombination
from dcpjax.planner import Demand, Deployment, build_cluster, parse_size
from dcpjax.planner.candidates import Candidate, engine_sizes
from dcpjax.planner.evaluate import Setting, evaluate
from dcpjax.planner.hardware import find_device
from dcpjax.planner.launch import launch
from dcpjax.planner.memory import capacity
from dcpjax.planner.models import find_model
from dcpjax.planner.search import pareto, search

MILLION = 1 << 20
GLM, H200 = find_model("glm-5.2"), find_device("h200")
LONG = Demand(context=MILLION, num_input=131_072, hit_rate=0.9)
SMALL = Demand(context=8192, num_input=2048, num_output=128)


@pytest.fixture(scope="module")
def glm():
    return search("glm-5.2", "h200", 16, LONG)


def read(command: str) -> dict[str, Any]:
    """As the shell and our CLI read it."""
    program, name, *arguments = shlex.split(command)
    assert program == "dcpjax"
    return main.commands[name].make_context(name, arguments).params


def settings_of(command: str) -> EngineConfig:
    """Refused settings raise."""
    known = EngineConfig.__dataclass_fields__
    settings = {key: value for key, value in read(command).items() if key in known}
    return EngineConfig.from_settings(settings.pop("model"), settings)


def parse(command: str) -> None:
    """Any command; what our CLI or the engine refuses raises."""
    settings_of(command) if command.startswith("dcpjax serve") else read(command)


def test_the_winner_of_seed_c_is_found(glm):
    """16 H200, contexts of 1M tokens: prompts split by tokens over a sharded cache.

    The source compares engines whose PCP ranks have all heads. With the heads of attention split as
    well, more memory is left for prefixes.
    """
    sources = [point.candidate.prefill for point in glm.points if point.candidate.prefill]
    compared = [source for source in sources if source.tp == 1 or source.pcp == 1]
    best = Deployment(pcp=8, dcp=8, prefill_kv="sharded", draft_tokens=3)
    assert compared[0] == best
    assert sources[0] == replace(best, pcp=4, tp=2)
    reasons = {(item.role, item.deployment): item.reason for item in glm.rejected}
    dp8 = reasons["prefill", Deployment(dp=8, draft_tokens=3)]
    assert "takes 53.4 GiB of each rank" in dp8 and "39.0 GiB short" in dp8
    assert ("decode", Deployment(tp=8, draft_tokens=3)) in reasons


def test_every_point_uses_all_devices_and_holds_the_context(glm):
    assert glm.points
    for point in glm.points:
        assert point.candidate.num_devices == 16
        source, target = glm.room(point.candidate)
        assert all(room.missing_bytes(MILLION) == 0 for room in (source, target) if room)
        assert 0 < point.batch <= point.max_batch and 0 <= point.prefill_busy <= 1
        assert point.ttft > 0 and point.tpot > 0
        users = point.requests_per_second * (LONG.num_output / point.interactivity)
        assert users == pytest.approx(LONG.concurrency)


def test_no_point_of_the_frontier_is_beaten(glm):
    frontier = glm.frontier
    speeds = [point.interactivity for point in frontier]
    amounts = [point.device_throughput for point in frontier]
    assert speeds == sorted(speeds, reverse=True) or speeds == sorted(speeds)
    assert amounts == sorted(amounts, reverse=speeds == sorted(speeds))
    assert all(point.bottleneck for point in frontier)


def test_a_frontier_by_hand(glm):
    base = glm.points[0]
    made = [
        replace(base, device_throughput=float(x), interactivity=float(y))
        for x, y in ((1, 9), (5, 5), (4, 4), (9, 1), (9, 0.5), (5, 5))
    ]
    kept = [(p.device_throughput, p.interactivity) for p in pareto(made)]
    assert sorted(kept) == [(1, 9), (5, 5), (9, 1)]


def test_commands_are_accepted_by_the_cli(glm):
    _, commands = glm.servable
    assert commands.commands
    for command in commands.commands:
        parse(command)


def test_commands_of_two_sides_end_with_a_router():
    demand = replace(SMALL, concurrency=4)
    candidate = Candidate(Deployment(tp=2, dcp=2), 2, Deployment(tp=4), 1)
    setting = Setting(find_model("qwen3-30b-a3b"), H200, demand)
    found = launch(setting, candidate, "./model dir")
    assert len(found.commands) == 4
    for command in found.commands:
        parse(command)
    assert found.commands[0].startswith("dcpjax serve './model dir'")
    assert "kv_producer" in found.commands[0] and "kv_consumer" in found.commands[1]
    assert found.commands[-1].startswith("dcpjax router") and found.commands[-1].count("http") == 3


ROOMY = Setting(GLM, replace(H200, memory_gib=4096), replace(LONG, context=262_144))
PCP = {
    "replicated": Deployment(pcp=8, draft_tokens=3),
    "sharded": Deployment(pcp=8, dcp=8, prefill_kv="sharded", draft_tokens=3),
    "layer_split": Deployment(pcp=8, prefill_kv="layer_split", draft_tokens=3),
}


@pytest.mark.parametrize("residency", PCP)
def test_pcp_engines_get_their_settings(residency):
    """What a rank holds in the plan is what the command asks for."""
    prefill = replace(PCP[residency], cache_dtype="bfloat16")
    decode = Deployment(tp=8, dcp=8, draft_tokens=3, cache_dtype="bfloat16")
    found = launch(ROOMY, Candidate(decode, 1, prefill, 2), "x")
    assert len(found.commands) == 4
    for command in found.commands:
        parse(command)
    config = settings_of(found.commands[0])
    assert config.residency == residency
    assert config.prefill_context_parallel_size == config.num_ranks == 8
    assert config.virtual_page_size == prefill.virtual_page
    assert config.kv_transfer_config.kv_role == "kv_producer" and config.drafts_with_model
    assert config.interleave == settings_of(found.commands[2]).interleave == 64


def test_engines_may_spread_scaled_keys_over_other_ranks():
    target = Deployment(tp=8, dcp=8, draft_tokens=3)
    for residency in PCP:
        commands = launch(ROOMY, Candidate(target, 1, PCP[residency], 1), "x").commands
        assert "fp8_ds_mla" in commands[0]


def test_the_check_of_commands_can_fail():
    with pytest.raises((click.ClickException, ConfigError)):
        parse("dcpjax serve x --tensor-parallel-size 8 --decode-context-parallel-size 3")
    with pytest.raises(click.ClickException):
        parse("dcpjax serve x --no-such-option 1")


def test_what_is_not_served_has_no_commands():
    with pytest.raises(UnsupportedCombination, match="one copy of the attention.*dp=8"):
        launch(Setting(GLM, H200, LONG), Candidate(Deployment(dp=8), 1), "x")


@pytest.mark.parametrize("residency", PCP)
def test_experts_are_split_over_all_ranks_of_an_engine(residency):
    """743 GB of them on eight devices; on each of them all would not fit."""
    same_pages = Deployment(tp=8, dcp=8 if residency == "sharded" else 1, draft_tokens=3)
    candidate = Candidate(same_pages, 1, PCP[residency], 1)
    rooms = [
        capacity(GLM, H200, PCP[residency], context=32768, expert_ranks=ranks) for ranks in (8, 1)
    ]
    assert rooms[0].missing_bytes(32768) == 0 < rooms[1].missing_bytes(32768)
    assert launch(replace(ROOMY, device=H200), candidate, "x").commands


def test_a_plan_ends_with_the_commands_of_its_winner(glm):
    point, commands = glm.servable
    assert glm.winner.candidate.prefill.pcp > 1
    assert commands.commands
    assert point is glm.winner and glm.obstacle is None


def test_ten_percent_more_is_never_worse(glm):
    assert {item.what for item in glm.sensitivity} >= {"memory", "memory bandwidth", "compute"}
    for item in glm.sensitivity:
        most = 2 if item.what == "memory" else 1.15  # its tenth nearly doubles what weights leave
        assert 1 - 1e-6 <= item.throughput < most and 1 - 1e-6 <= item.interactivity < most


def test_objectives_choose_another_winner(glm):
    fast = replace(LONG, tpot=1.05 * min(point.tpot for point in glm.points))
    strict = search("glm-5.2", "h200", 16, fast)
    assert strict.winner.tpot <= fast.tpot
    assert strict.winner.device_throughput <= glm.winner.device_throughput
    impossible = search("glm-5.2", "h200", 16, replace(LONG, ttft=1e-6))
    assert impossible.winner is None and impossible.points


def test_more_users_wait_longer():
    candidate = Candidate(Deployment(tp=8, dcp=8), 1, Deployment(pcp=8), 1)
    rooms = [capacity(GLM, H200, d) for d in (candidate.prefill, candidate.decode)]
    points = [
        evaluate(
            Setting(GLM, H200, replace(LONG, concurrency=users, hit_rate=0.0)), candidate, *rooms
        )
        for users in (1, 4, 16, 64)
    ]
    rates = [point.requests_per_second for point in points]
    speeds = [point.interactivity for point in points]
    assert rates == sorted(rates) and speeds == sorted(speeds, reverse=True)


def test_the_host_s_memory_keeps_prefixes():
    crowded = replace(LONG, concurrency=200)
    candidate = Candidate(Deployment(tp=8, dcp=8), 1, Deployment(pcp=8), 1)
    rooms = [capacity(GLM, H200, d) for d in (candidate.prefill, candidate.decode)]
    rates = [
        evaluate(Setting(GLM, H200, crowded, host_gib), candidate, *rooms).hit_rate
        for host_gib in (0, 512, 1e6)
    ]
    assert rates[0] < rates[1] < rates[2] == 0.9


def test_kinds_of_constants_are_named(glm):
    assert {"datasheet", "measured", "reported", "derived"} == set(glm.kinds)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"num_devices": 0}, "at least one device"),
        ({"num_devices": 12}, "fill the devices exactly"),
        ({"host_gib": -1}, "at least 0"),
        ({"demand": replace(LONG, context=2 * MILLION)}, "1,048,576 tokens too long"),
        ({"device": "h100"}, "fits into an engine.*too much"),
        ({"model": "smollm2-135m", "draft_tokens": 2, "demand": SMALL}, "draft layer"),
    ],
)
def test_plans_that_cannot_be_are_refused(change, match):
    arguments = {"model": "glm-5.2", "device": "h200", "num_devices": 16, "demand": LONG, **change}
    with pytest.raises(ConfigError, match=match):
        search(**arguments)


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"context": 0}, "context"),
        ({"num_output": -3}, "num_output"),
        ({"hit_rate": 1.0}, "hit_rate"),
        ({"hit_rate": -0.1}, "hit_rate"),
        ({"ttft": 0}, "objectives"),
        ({"num_input": 8192}, "fits into the longest context"),
    ],
)
def test_demands_that_contradict_themselves(settings, match):
    with pytest.raises(ConfigError, match=match):
        replace(SMALL, **settings)


def test_sizes():
    assert [parse_size(text) for text in ("1M", "64k", "1000", "0.5K")] == [
        MILLION,
        65536,
        1000,
        512,
    ]
    for wrong in ("", "-1", "1.5", "many", "0", "1T"):
        with pytest.raises(ConfigError, match="whole number"):
            parse_size(wrong)


def test_engines_are_at_most_a_node():
    assert engine_sizes(16, H200) == [1, 2, 4, 8] and engine_sizes(3, H200) == [1, 2]


def test_simulated_clusters_have_the_planned_memory():
    candidate = Candidate(Deployment(dp=2), 2, Deployment(pcp=2, prefill_kv="layer_split"), 1)
    model = replace(find_model("deepseek-v3"), experts=None, inner_size=2048)
    cluster = build_cluster(model, H200, candidate, context=8192, host_gib=10)
    assert len(cluster.decode) == 4 and len(cluster.prefill) == 1
    room = capacity(model, H200, candidate.decode, context=8192)
    assert {spec.num_pages for spec in cluster.decode} == {room.num_pages}
    assert cluster.prefill[0].host_pages > 0 == cluster.decode[0].host_pages
    assert cluster.num_devices == 6 and cluster.transfer_per_token > 0
    with pytest.raises(ConfigError, match="room for its cache"):
        build_cluster(GLM, H200, Candidate(Deployment(), 1), context=8192)
