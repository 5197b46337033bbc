"""One request on its way through a simulation."""

from dataclasses import dataclass, field

from dcpjax.planner.sim_pool import Holding
from dcpjax.planner.trace_files import Turn


@dataclass(eq=False)
class Job:
    """Where a request is. Times are seconds of the simulation; 0.0 until they are known.

    Attributes:
        attempt: how often it was begun again because an engine failed.
        sent: arrival.
        started: its first prompt chunk began.
        prefilled: its prompt was computed.
        joined: its KV had landed where it is decoded.
    """

    number: int
    turn: Turn
    sent: float
    attempt: int = 0
    started: float = 0.0
    prefilled: float = 0.0
    joined: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    cached_tokens: int = 0
    host_tokens: int = 0
    computed: int = 0
    holdings: dict[int, Holding] = field(default_factory=dict[int, Holding])
    step_joined: int = 0
    last_step: int = 0

    @property
    def num_tokens(self) -> int:
        return self.turn.num_input + self.turn.num_output

    def begin_again(self) -> None:
        """As if it had just arrived, but for the time at which it did."""
        self.attempt += 1
        self.started = self.prefilled = self.joined = self.first_token = 0.0
        self.cached_tokens = self.host_tokens = self.computed = 0

    @property
    def ttft(self) -> float:
        return self.first_token - self.sent

    @property
    def latency(self) -> float:
        return self.finished - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 with a single one."""
        rest = self.turn.num_output - 1
        return (self.finished - self.first_token) / rest if rest else 0.0
