"""What the clients of the chaos script ask, and what they may get. No network here.

The tokens of every case are known beforehand, from one plain engine, and no case has a place where
its two likeliest tokens are all but equal: so whatever the engines' shapes and whatever else is in
a step, another token is a wrong one.
"""

import enum
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dcpjax
from dcpjax.models.checkpoint import open_checkpoint

TIE = 1e-3
"""Difference of log-probabilities below which another order of sums may choose either token."""
Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One greedy request and its answer."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    def request(self, *, stream: bool, **changes: Any) -> Json:
        """The body of a completion that shows its token ids."""
        return {
            "prompt": self.prompt,
            "max_tokens": len(self.tokens),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
            **changes,
        }


def make_cases(
    choose: random.Random, settings: Json, *, count: int, max_prompt: int, max_tokens: int
) -> list[Case]:
    """Cases with the answers of one plain engine, in this process.

    Args:
        settings: of the engine, "model" included.
    """
    vocab_size = open_checkpoint(settings["model"], weights=False).config.vocab_size
    cases: list[Case] = []
    with dcpjax.LLM(**settings) as llm:
        while len(cases) < count:
            prompts = make_prompts(choose, vocab_size, count=count, max_prompt=max_prompt)
            cases += _answered(llm, prompts, choose, max_tokens)
    return cases[:count]


def make_prompts(
    choose: random.Random, vocab_size: int, *, count: int, max_prompt: int
) -> list[list[int]]:
    """Token ids: short and long prompts, most of them with one of a few beginnings."""

    def tokens(length: int) -> list[int]:
        return choose.choices(range(vocab_size), k=length)

    beginnings = [[], *(tokens(max_prompt // part) for part in (8, 4, 2))]
    return [
        choose.choice(beginnings) + tokens(choose.randint(1, max_prompt // 2)) for _ in range(count)
    ]


def _answered(
    llm: dcpjax.LLM, prompts: list[list[int]], choose: random.Random, max_tokens: int
) -> list[Case]:
    """Those of the prompts whose answers leave no doubt."""
    lengths = [choose.choice([1, 2, max_tokens // 2, max_tokens]) for _ in prompts]
    params = [
        dcpjax.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=2)
        for length in lengths
    ]
    cases: list[Case] = []
    for result in llm.generate(prompts, params):
        (answer,) = result.outputs
        margins = [entry.top[0][1] - entry.top[1][1] for entry in answer.logprobs or ()]
        if min(margins, default=math.inf) > TIE:
            cases.append(Case(tuple(result.prompt_token_ids), answer.token_ids))
    return cases


class Way(enum.Enum):
    """How a client goes about it.

    ROUTED asks the router, as clients do. The others ask engines themselves, as a router that fails
    or lies: UNCLAIMED has a prompt computed and lets it be; TWICE has two decode engines fetch what
    one should; LYING says of a prompt's KV that it is where it is not.
    """

    ROUTED = "routed"
    UNCLAIMED = "unclaimed"
    TWICE = "twice"
    LYING = "lying"


@dataclass(frozen=True)
class Visit:
    """One client's turn. It leaves after so many tokens or seconds, or stays to the end.

    ``salt``: of the prefix caches; one that was not used before has everything computed and moved.
    """

    case: Case
    way: Way = Way.ROUTED
    stream: bool = True
    salt: str | None = None
    leaves_after_tokens: int | None = None
    leaves_after_seconds: float | None = None

    def request(self, *, stream: bool, **changes: Any) -> Json:
        salted = {} if self.salt is None else {"cache_salt": self.salt}
        return self.case.request(stream=stream, **salted, **changes)


def make_visit(choose: random.Random, cases: Sequence[Case]) -> Visit:
    case = choose.choice(cases)
    way = choose.choices(list(Way), weights=[9, 1, 1, 1])[0]
    stream = choose.random() < 0.6
    salt = f"{choose.getrandbits(64):x}" if choose.random() < 0.5 else None
    visit = Visit(case, way, stream, salt)
    match choose.randrange(5):
        case 0 if stream and way is Way.ROUTED:
            return replace(visit, leaves_after_tokens=choose.randrange(len(case.tokens)))
        case 1 if way is Way.ROUTED:
            return replace(visit, leaves_after_seconds=choose.expovariate(1.0))
    return visit


def make_lie(choose: random.Random, offer: Json) -> Json:
    """What a prefill engine said about its KV, with something wrong in it."""
    pages = offer["remote_block_ids"]
    lies: list[Json] = [
        {"remote_engine_id": f"{choose.getrandbits(64):x}"},
        {"remote_request_id": f"{choose.getrandbits(64):x}"},
        {"remote_port": 1},
        {"remote_block_ids": pages[:-1]},
        {"remote_block_ids": [choose.randrange(10**6, 2**31) for _ in pages]},
    ]
    return {**offer, **choose.choice(lies)}


@dataclass
class Answer:
    """What one call has brought so far.

    ``broken``: how the connection ended before the answer; ``is_late``: we ended it ourselves.
    """

    status: int | None = None
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None
    error: Any = None
    broken: str | None = None
    is_late: bool = False
    is_done: bool = False
    has_left: bool = False

    def add(self, event: Json) -> None:
        """Take one event of a stream, or an answer in one piece."""
        if "error" in event:
            self.error = event["error"]
            return
        for choice in event["choices"]:
            self.token_ids += choice["token_ids"]
            self.finish_reason = choice["finish_reason"]


def judge(visit: Visit, answer: Answer) -> list[str]:
    """What is wrong with an answer, if errors are right."""
    tokens = visit.case.tokens
    rules: dict[str, Callable[[], bool]] = {
        "tokens are those of one engine": lambda: (
            tuple(answer.token_ids) == tokens[: len(answer.token_ids)]
        ),
        "an answer comes sooner or later": lambda: not answer.is_late,
        "an answer ends, or is an error, or its client has left": lambda: bool(
            answer.finish_reason or answer.error or answer.broken or answer.has_left
        ),
        "an end is a whole answer": lambda: (
            answer.finish_reason is None
            or (answer.finish_reason == "length" and tuple(answer.token_ids) == tokens)
        ),
        "an error is an object of the OpenAI API": lambda: (
            answer.error is None or is_error_object(answer.error)
        ),
        "an error of the server has a status of one": lambda: (
            answer.error is None or answer.status in (200, 500, 503)
        ),
        "a stream that is not broken off ends with [DONE]": lambda: (
            answer.status != 200 or answer.is_done or answer.has_left or answer.broken is not None
        ),
    }
    return [rule for rule, holds in rules.items() if not holds()]


def is_error_object(error: object) -> bool:
    return (
        isinstance(error, dict)
        and error.keys() == {"message", "type", "param", "code"}
        and bool(error["message"])
        and isinstance(error["message"], str)
        and isinstance(error["type"], str)
    )
