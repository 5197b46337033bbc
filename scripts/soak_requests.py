"""What the clients of the soak test ask, and what they may get. No network here.

A :class:`Case` is one request. It is answered once alone, and every other answer to it is judged
by that one: equal up to the end, or up to where its client left. Which other sequences are in a
step changes how sums are rounded, so where the two likeliest tokens of the lone answer are all but
equal, another answer may go the other way from there.
"""

import math
import random
from dataclasses import dataclass, field
from typing import Any

TIE = 1e-3
"""Difference of the two best log-probabilities up to which either token is right."""
_WORDS = (
    "harbour tide lamp keeper storm rope anchor gull chart signal night letter boat island north "
    "wind captain fog bell stone shore winter market bread road child river bridge paper clock"
).split()
_STOPS = (".", ",", "\n", " the", "e")
Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One distinct greedy request."""

    path: str
    body: Json

    @property
    def max_tokens(self) -> int:
        return self.body["max_tokens"]

    @property
    def stops(self) -> list[str]:
        return self.body.get("stop", [])

    def request(self, *, with_logprobs: bool) -> Json:
        """The body of a stream that shows its token ids and ends with its usage."""
        shown: Json = {}
        if with_logprobs and self.path.endswith("/chat/completions"):
            shown = {"logprobs": True, "top_logprobs": 2}
        elif with_logprobs:
            shown = {"logprobs": 2}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {**self.body, "temperature": 0, "return_token_ids": True, **stream, **shown}


@dataclass(frozen=True)
class Visit:
    """One client's turn: what it asks, and when it leaves, after so many tokens or seconds."""

    case: Case
    with_logprobs: bool
    leaves_after_tokens: int | None = None
    leaves_after_seconds: float | None = None


@dataclass
class Answer:
    """What one stream has brought so far. ``margins``: best less second-best log-probability."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    margins: list[float] = field(default_factory=list[float])
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: Json | None = None
    error: str | None = None
    is_done: bool = False
    has_left: bool = False

    def add(self, event: Json) -> None:
        """Take one event of a stream."""
        if "error" in event:
            self.error = event["error"]["message"]
            return
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.text += choice["delta"]["content"] if "delta" in choice else choice["text"]
            self.token_ids += choice["token_ids"]
            self.margins += _margins(choice["logprobs"] or {})
            self.finish_reason = choice["finish_reason"]
            self.stop_reason = choice["stop_reason"]


def _margins(logprobs: Json) -> list[float]:
    chat = [
        [top["logprob"] for top in entry["top_logprobs"]] for entry in logprobs.get("content", ())
    ]
    plain = [list(top.values()) for top in logprobs.get("top_logprobs", ())]
    return [_margin(values) for values in chat + plain]


def _margin(values: list[float]) -> float:
    """Completions list two tokens that are written alike as one: no excuse then."""
    best = sorted(values, reverse=True)
    return best[0] - best[1] if len(best) > 1 else math.inf


def make_cases(choose: random.Random, *, count: int, max_words: int, max_tokens: int) -> list[Case]:
    """Short and long prompts, some with a common beginning; short and long answers."""
    beginnings = ["", *(_sentence(choose, max_words // part) for part in (8, 2, 1))]
    return [_make_case(choose, beginnings, max_words, max_tokens) for _ in range(count)]


def _make_case(
    choose: random.Random, beginnings: list[str], max_words: int, max_tokens: int
) -> Case:
    prompt = choose.choice(beginnings) + _sentence(choose, choose.randrange(1, max_words))
    body: Json = {"max_tokens": choose.choice([1, 2, max_tokens // 4, max_tokens // 2, max_tokens])}
    match choose.randrange(4):
        case 0:
            body["stop"] = choose.sample(_STOPS, 2)
        case 1:
            body["ignore_eos"] = True
    if choose.random() < 0.5:
        return Case("/v1/completions", {"prompt": prompt, **body})
    messages = [{"role": "user", "content": prompt}]
    return Case("/v1/chat/completions", {"messages": messages, **body})


def _sentence(choose: random.Random, num_words: int) -> str:
    return " ".join(choose.choices(_WORDS, k=num_words)) + ". "


def make_visit(choose: random.Random, cases: list[Case]) -> Visit:
    """Half of the clients stay to the end."""
    case, with_logprobs = choose.choice(cases), choose.random() < 0.25
    match choose.randrange(4):
        case 0:
            return Visit(case, with_logprobs, leaves_after_tokens=choose.randrange(case.max_tokens))
        case 1:
            return Visit(case, with_logprobs, leaves_after_seconds=choose.expovariate(0.5))
    return Visit(case, with_logprobs)


@dataclass(frozen=True)
class Verdict:
    """What is wrong with an answer, and whether it went another way at a near-tie."""

    faults: tuple[str, ...]
    is_flipped: bool = False


def judge(case: Case, alone: Answer, answer: Answer) -> Verdict:
    """Compare an answer with the one that was computed alone."""
    if answer.error is not None:
        return Verdict((f"the answer is an error: {answer.error}",))
    faults = [] if answer.has_left else ending_faults(case, answer)
    place = _first_difference(alone.token_ids, answer.token_ids)
    if place is not None and place < len(alone.margins) and alone.margins[place] < TIE:
        return Verdict(tuple(faults), is_flipped=True)
    if place is not None:
        faults.append(f"token {place} differs: {answer.token_ids[place : place + 3]}")
    elif not answer.has_left:
        faults += _unequal(alone, answer)
    elif not alone.text.startswith(answer.text):
        faults.append(f"the text differs: {answer.text[-40:]!r}")
    return Verdict(tuple(faults))


def has_near_tie(alone: Answer) -> bool:
    return any(margin < TIE for margin in alone.margins)


def _first_difference(alone: list[int], other: list[int]) -> int | None:
    """The first place where ``other`` has another token, or one too many."""
    for place, token in enumerate(other):
        if place >= len(alone) or alone[place] != token:
            return place
    return None


def _unequal(alone: Answer, answer: Answer) -> list[str]:
    pairs = {
        "tokens": (len(alone.token_ids), len(answer.token_ids)),
        "text": (alone.text, answer.text),
        "finish_reason": (alone.finish_reason, answer.finish_reason),
        "stop_reason": (alone.stop_reason, answer.stop_reason),
        "prompt_tokens": tuple((one.usage or {}).get("prompt_tokens") for one in (alone, answer)),
    }
    return [f"{name}: {a!r} alone, {b!r} now" for name, (a, b) in pairs.items() if a != b]


def ending_faults(case: Case, answer: Answer) -> list[str]:
    """What is wrong with the end of a whole answer, whatever its tokens are."""
    count, usage = len(answer.token_ids), answer.usage or {}
    prompt, cached = usage.get("prompt_tokens", 0), usage.get("prompt_tokens_details", {})
    may_stop = bool(case.stops) or not case.body.get("ignore_eos")
    rules = {
        "a stream ends with [DONE]": answer.is_done,
        "finish_reason is stop or length": answer.finish_reason in ("stop", "length"),
        "length: max_tokens are there": answer.finish_reason != "length"
        or count == case.max_tokens,
        "stop: something can stop it": answer.finish_reason != "stop" or may_stop,
        "stop_reason is one of its stops": answer.stop_reason in (None, *case.stops),
        "no stop string is in the text": not any(stop in answer.text for stop in case.stops),
        "usage counts the tokens": usage.get("completion_tokens") == count > 0,
        "usage adds up": usage.get("total_tokens") == prompt + count and prompt > 0,
        "cached tokens are of the prompt": 0 <= cached.get("cached_tokens", -1) < prompt,
    }
    return [rule for rule, holds in rules.items() if not holds]
