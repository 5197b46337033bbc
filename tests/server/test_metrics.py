"""What one sequence leaves in the histograms, with a clock that the test moves."""

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dcpjax.engine.request import FinishReason
from dcpjax.server.metrics import Metrics, SequenceTimer
from dcpjax.speculation import AcceptanceCounts
from tests.fakes import CountUpEngine


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    yield Metrics("m")


def values(metrics: Metrics, stats: dict[str, object] | None = None) -> dict[str, float]:
    """Sample name, with the finish reason where there is one, to value."""
    families = text_string_to_metric_families(metrics.render(stats).decode())
    return {
        sample.name + sample.labels.get("finished_reason", ""): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_times_of_one_sequence(metrics: Metrics) -> None:
    clock = Clock()
    timer = SequenceTimer(metrics, num_prompt_tokens=7, arrival=100.0, clock=clock)
    for now, count in ((102.0, 1), (103.0, 1), (103.5, 0), (105.0, 4)):
        clock.now = now
        timer.add_tokens(count)
    clock.now = 106.0
    timer.end(FinishReason.STOP)
    timer.end(FinishReason.ABORT)
    seen = values(metrics)
    assert seen["vllm:time_to_first_token_seconds_sum"] == 2.0
    assert seen["vllm:inter_token_latency_seconds_count"] == 5
    assert seen["vllm:inter_token_latency_seconds_sum"] == 3.0
    assert seen["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(3.0 / 5)
    assert seen["vllm:e2e_request_latency_seconds_sum"] == 6.0
    assert seen["vllm:request_prompt_tokens_sum"] == 7
    assert seen["vllm:request_generation_tokens_sum"] == 6
    assert seen["vllm:request_success_totalstop"] == 1
    assert seen["vllm:request_success_totalabort"] == 0


def test_a_sequence_without_tokens(metrics: Metrics) -> None:
    SequenceTimer(metrics, 1, 100.0, Clock()).end(FinishReason.ABORT)
    seen = values(metrics)
    assert seen["vllm:time_to_first_token_seconds_count"] == 0
    assert seen["vllm:request_time_per_output_token_seconds_count"] == 0
    assert seen["vllm:request_success_totalabort"] == 1


def test_numbers_of_the_engine_are_those_of_the_scrape(metrics: Metrics) -> None:
    engine = CountUpEngine()
    assert "vllm:num_requests_running" not in values(metrics)
    stats = engine.stats() | {"num_requests_running": 3, "prompt_tokens": 50}
    seen = values(metrics, stats)
    assert seen["vllm:num_requests_running"] == 3
    assert seen["vllm:prompt_tokens_total"] == 50
    assert seen["vllm:prefix_cache_hits_total"] == 4
    assert seen["dcpjax:kv_bytes_per_rank"] == 4096
    assert seen["dcpjax:audited_steps"] == 1
    assert values(metrics, None)["vllm:prompt_tokens_total"] == 50


def test_speculation_is_counted_where_there_is_some(metrics: Metrics) -> None:
    stats = CountUpEngine().stats()
    assert "vllm:spec_decode_num_drafts_total" not in values(metrics, stats)
    counts = AcceptanceCounts(3)
    counts.add(3, 2)
    counts.add(3, 0)
    text = metrics.render(stats | {"speculation": counts.as_stats()}).decode()
    for line in (
        'vllm:spec_decode_num_drafts_total{model_name="m"} 2.0',
        'vllm:spec_decode_num_draft_tokens_total{model_name="m"} 6.0',
        'vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 2.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 1.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="2"} 0.0',
    ):
        assert line in text


def test_prompts_on_several_ranks_have_numbers_of_their_own(metrics: Metrics) -> None:
    stats = CountUpEngine().stats()
    assert "dcpjax:prompt_work_balance" not in values(metrics, stats)
    split = {"ranks": 2, "prefill_kv": "sharded", "balance": 1.25, "copy_bytes": 512}
    seen = values(metrics, stats | {"pcp": split})
    assert seen["dcpjax:prompt_work_balance"] == 1.25
    assert seen["dcpjax:prompt_copy_bytes"] == 512


def test_two_servers_do_not_share_numbers(metrics: Metrics) -> None:
    SequenceTimer(metrics, 1, 100.0, Clock()).end(FinishReason.STOP)
    assert values(Metrics("m"))["vllm:request_success_totalstop"] == 0
