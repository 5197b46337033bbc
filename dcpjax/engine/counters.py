"""What a scheduler counts since its start. Host only."""

from dataclasses import dataclass

from dcpjax.engine.request import Request


@dataclass(frozen=True)
class SchedulerStats:
    """Gauges of now and counters since the start; prefix counters are in prompt tokens."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_recomputations: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_prompt_tokens: int
    num_generation_tokens: int
    page_usage: float


@dataclass
class Counters:
    """The counters among them."""

    num_preemptions: int = 0
    num_recomputations: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0

    def add_start(self, request: Request, *, has_prefix_cache: bool) -> None:
        """Count a request that got its pages. Recomputation is neither new work nor a hit."""
        if request.num_cached_at_start is not None:
            return
        request.num_cached_at_start = request.num_cached
        self.num_prompt_tokens += request.num_tokens
        if has_prefix_cache:
            self.num_prefix_queries += request.num_tokens
            self.num_prefix_hits += request.num_cached
