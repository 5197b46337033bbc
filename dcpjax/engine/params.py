"""How the tokens of one request are chosen, and what is allowed there. Host only."""

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from dcpjax.config import has_type, type_words
from dcpjax.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
MAX_BIASED_TOKENS = 64
MAX_STOP_TOKEN_IDS = 60
MAX_FACTOR = 1e6
"""Largest temperature and penalty factor: what is computed with them fits into a float32."""
MAX_BIAS = 1e30
"""Larger than any logit, and a float32."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to end.

    ``logprobs`` is the number of alternatives reported per token (0: only the chosen one, None:
    nothing). ``max_tokens`` None means: up to the context length. ``seed`` None draws from the
    engine's own seed. Stop strings are matched on decoded text, by whoever holds the tokenizer.
    ``stop`` may be given as one string, ``logit_bias`` as a mapping; -inf bans a token.

    Raises:
        RequestError: a value has another type or is outside its range; ``param`` is its name.
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
        for name, plain in _PLAIN_FORMS.items():
            object.__setattr__(self, name, plain(getattr(self, name)))
        for item in fields(self):
            value = getattr(self, item.name)
            if not has_type(value, item.type):
                raise _refusal(item.name, type_words(item.type), value)
        for name, holds, rule in _RANGES:
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise _refusal(name, rule, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens is at most max_tokens",
                param="min_tokens",
                min_tokens=self.min_tokens,
                max_tokens=self.max_tokens,
            )

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def has_filters(self) -> bool:
        """Whether some tokens are excluded by their probability."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the plain argmax of the logits, nothing else asked for."""
        return (
            self.temperature == 0
            and not self.has_penalties
            and self.min_tokens == 0
            and not self.logit_bias
            and self.logprobs is None
        )


_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("max_tokens", lambda v: v >= 1, "at least 1"),
    ("min_tokens", lambda v: v >= 0, "at least 0"),
    ("temperature", lambda v: 0 <= v <= MAX_FACTOR, f"in [0, {MAX_FACTOR:g}]"),
    ("top_k", lambda v: -1 <= v < 2**31, "an int32 of at least 1, or 0 or -1 for all"),
    ("top_p", lambda v: 0 < v <= 1, "in (0, 1]"),
    ("min_p", lambda v: 0 <= v <= 1, "in [0, 1]"),
    (
        "repetition_penalty",
        lambda v: 1 / MAX_FACTOR <= v <= MAX_FACTOR,
        f"in [{1 / MAX_FACTOR:g}, {MAX_FACTOR:g}]",
    ),
    ("presence_penalty", lambda v: -2 <= v <= 2, "in [-2, 2]"),
    ("frequency_penalty", lambda v: -2 <= v <= 2, "in [-2, 2]"),
    ("logit_bias", lambda v: len(v) <= MAX_BIASED_TOKENS, f"of at most {MAX_BIASED_TOKENS} tokens"),
    (
        "logit_bias",
        lambda v: all(abs(bias) <= MAX_BIAS or bias == -math.inf for _, bias in v),
        f"of values in [-{MAX_BIAS:g}, {MAX_BIAS:g}], or -inf",
    ),
    ("seed", lambda v: -(2**63) <= v < 2**63, "an int64"),
    ("n", lambda v: 1 <= v <= 128, "in [1, 128]"),
    ("stop", lambda v: len(v) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings"),
    (
        "stop",
        lambda v: all(0 < len(stop) <= MAX_STOP_LENGTH for stop in v),
        f"of strings that have 1 to {MAX_STOP_LENGTH} characters",
    ),
    ("stop_token_ids", lambda v: len(v) <= MAX_STOP_TOKEN_IDS, f"at most {MAX_STOP_TOKEN_IDS} ids"),
    ("logprobs", lambda v: 0 <= v <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
)
"""Field, what holds for its value unless that is None, and the same in words. NaN fails each."""


def _as_tuple(given: Any) -> Any:
    """The items of a collection; anything else as it is, for the check of types to refuse."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        return cast(Any, given)
    return tuple(cast(Iterable[Any], given))


def _as_strings(given: Any) -> Any:
    return (given,) if isinstance(given, str) else _as_tuple(given)


def _as_pairs(given: Any) -> Any:
    """A mapping or pairs as pairs, their values as floats; anything else as it is."""
    pairs = cast(Mapping[Any, Any], given).items() if isinstance(given, Mapping) else given
    try:
        return tuple((token, _as_float(bias)) for token, bias in pairs)
    except (TypeError, ValueError):  # not iterable, or not of pairs
        return pairs


def _as_float(given: Any) -> Any:
    is_small = has_type(given, int) and abs(given) <= MAX_BIAS
    return float(given) if is_small else given


_PLAIN_FORMS: Mapping[str, Callable[[Any], Any]] = {
    "stop": _as_strings,
    "stop_token_ids": _as_tuple,
    "logit_bias": _as_pairs,
}
"""Fields that may be given in several forms, and what makes the one that is stored."""


def _refusal(name: str, rule: str, value: Any) -> RequestError:
    shown = value if isinstance(value, int | float) else reprlib.repr(value)  # may be megabytes
    return RequestError(f"{name} is {rule}", param=name, got=shown)
