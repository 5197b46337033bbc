"""A request, its sampling parameters and what comes out of it. Host only, token ids only."""

import enum
from dataclasses import dataclass, field

from dcpjax.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
MAX_BIASED_TOKENS = 64


class FinishReason(enum.Enum):
    """Why a request ended; the values are those of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to end.

    ``logprobs`` is the number of alternatives reported per token (0: only the chosen one, None:
    nothing). ``max_tokens`` None means: up to the context length. ``seed`` None draws from the
    engine's own seed. Stop strings are matched on decoded text, by whoever holds the tokenizer.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # a convenience that every serving API has
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, ok, rule in (
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("temperature", 0 <= self.temperature < float("inf"), "finite and at least 0"),
            ("top_k", self.top_k >= -1, "at least 1, or 0 or -1 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("n", 1 <= self.n <= 128, "in [1, 128]"),
            (
                "logit_bias",
                len(self.logit_bias) <= MAX_BIASED_TOKENS,
                f"of at most {MAX_BIASED_TOKENS} tokens",
            ),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"in [0, {MAX_LOGPROBS}]",
            ),
            ("stop", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings"),
            (
                "stop",
                all(0 < len(s) <= MAX_STOP_LENGTH for s in self.stop),
                f"of strings that have 1 to {MAX_STOP_LENGTH} characters",
            ),
        ):
            if not ok:
                shown = getattr(self, name)
                if name in ("stop", "logit_bias"):  # may be megabytes
                    shown = len(shown)
                raise RequestError(f"{name} is {rule}", param=name, got=shown)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens is at most max_tokens",
                param="min_tokens",
                min_tokens=self.min_tokens,
                max_tokens=self.max_tokens,
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the plain argmax of the logits, nothing else asked for."""
        return (
            self.temperature == 0
            and self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and self.min_tokens == 0
            and not self.logit_bias
            and self.logprobs is None
        )


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, from the unmodified logits.

    ``top`` is sorted by falling probability and has ``logprobs`` entries.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TokenOutput:
    """What one step adds to one request. ``finish_reason`` is set on the last one."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence and its progress; only the scheduler changes it.

    Token ranges of the sequence, by who knows what::

        [0, num_cached)              found in the prefix cache, never computed here
        [num_cached, num_scheduled)  computed by a step that was dispatched
        [num_scheduled, num_tokens)  known, not yet computed
        [num_tokens, +num_pending)   sampled by a dispatched step, not yet on the host
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival: float = 0.0  # time.monotonic() seconds

    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list[int])
    page_ids: list[int] = field(default_factory=list[int])
    num_cached: int = 0
    num_scheduled: int = 0
    num_pending: int = 0
    num_preemptions: int = 0
    num_cached_at_start: int | None = None
    slot: int | None = None  # row of the per-sequence sampling state, held while running

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]
