"""What a team wants to serve, in a few numbers."""

import math
import re
from dataclasses import dataclass

from dcpjax.errors import ConfigError

_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """A count such as ``1M`` = 1,048,576, ``64K`` or ``1000``.

    Raises:
        ConfigError: no such size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    value = float(match[1]) * _SUFFIXES[match[2]] if match else -1.0
    if value < 1 or value != int(value):
        raise ConfigError("a size is a whole number of at least 1, as in 64K or 1M", size=text)
    return int(value)


@dataclass(frozen=True)
class Demand:
    """Traffic, as far as a plan without a trace looks at it.

    Attributes:
        context: tokens of the longest sequence that has to fit.
        num_input, num_output: tokens of a usual request.
        hit_rate: share of prompt tokens that are a prefix seen before.
        concurrency: users, each of whom sends one request after the other.
        think: seconds that a user takes from an answer to the next request.
        ttft, tpot: objectives in seconds.

    Raises:
        ConfigError: negative or contradictory numbers.
    """

    context: int
    num_input: int
    num_output: int = 512
    hit_rate: float = 0.0
    concurrency: int = 16
    think: float = 0.0
    ttft: float = math.inf
    tpot: float = math.inf

    def __post_init__(self) -> None:
        for name in ("context", "num_input", "num_output", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is at least 1", **{name: getattr(self, name)})
        if not 0 <= self.hit_rate < 1:
            raise ConfigError("hit_rate is in [0, 1)", hit_rate=self.hit_rate)
        if not 0 <= self.think < math.inf:
            raise ConfigError("think is a number of seconds of at least 0", think=self.think)
        if not (self.ttft > 0 and self.tpot > 0):
            raise ConfigError("objectives are above 0", ttft=self.ttft, tpot=self.tpot)
        if self.num_input + self.num_output > self.context:
            raise ConfigError(
                "a usual request fits into the longest context",
                num_input=self.num_input,
                num_output=self.num_output,
                context=self.context,
            )

    def is_met(self, ttft: float, tpot: float) -> bool:
        """Whether times keep the objectives."""
        return ttft <= self.ttft and tpot <= self.tpot
