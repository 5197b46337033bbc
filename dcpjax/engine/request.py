"""A request and what comes out of it. Host only, token ids only."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcpjax.engine.params import MAX_BIASED_TOKENS as MAX_BIASED_TOKENS
from dcpjax.engine.params import MAX_LOGPROBS as MAX_LOGPROBS
from dcpjax.engine.params import MAX_STOP_TOKEN_IDS as MAX_STOP_TOKEN_IDS
from dcpjax.engine.params import SamplingParams as SamplingParams
from dcpjax.engine.remote_kv import RemoteKV
from dcpjax.errors import ContextLengthError, RequestError


class FinishReason(enum.Enum):
    """Why a request ended; the values are those of the OpenAI API, where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


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
    """What one step adds to one request. ``finish_reason`` is set on the last one.

    So is ``kv_transfer_params``, where the KV of the request waits for another engine, and
    ``error``, the reason of ``FinishReason.ERROR``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Drafts:
    """Tokens that one request may go on with. ``token_ids`` None: only the device knows them."""

    count: int
    token_ids: tuple[int, ...] | None = None


NO_DRAFTS = Drafts(0, ())


class Status(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"  # has pages and a slot; its KV is on the way from another engine
    RUNNING = "running"
    VOID = "void"  # has pages and a slot; what steps in flight compute of it is dropped
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence and its progress; only the scheduler changes it.

    Token ranges of the sequence, by who knows what::

        [0, num_cached)              found in the prefix cache, never computed here
        [num_cached, num_scheduled)  computed by a step that was dispatched
        [num_scheduled, num_tokens)  known, not yet computed
        [num_tokens, +num_pending)   sampled by a dispatched step, not yet on the host

    ``num_pending`` is 0 or 1 when a step is planned, and 2 only between planning a step and
    committing the one before it. ``num_scheduled`` counts tokens whose keys and values are, or will
    be, in pages, pending ones included. Drafts count nowhere until they are accepted: then they are
    tokens of the sequence, and computed. Requests with different ``cache_salt`` share no pages.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival: float = 0.0  # time.monotonic() seconds
    cache_salt: str = ""
    kv_transfer_params: Mapping[str, Any] | None = None

    remote_kv: RemoteKV | None = None  # until it was loaded, or cannot be loaded
    exports_kv: bool = False  # the pages of the prompt are kept at the end for another engine
    exports_early: bool = False  # from the beginning on
    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list[int])
    page_ids: list[int] = field(default_factory=list[int])
    page_hashes: list[bytes] = field(default_factory=list[bytes])  # of full pages, known tokens
    prefix_digest: tuple[int, int] = (0, 0)  # so many tokens, and what they digest to
    max_length: int = 0  # tokens of the whole sequence, set when the scheduler accepts it
    place: int = 0  # in the order of arrival, set then too
    num_cached: int = 0
    num_scheduled: int = 0
    num_pending: int = 0
    num_preemptions: int = 0
    num_recomputations: int = 0
    num_cached_at_start: int | None = None
    drafts: Drafts = NO_DRAFTS  # that the next step of it verifies
    slot: int | None = None  # row of the per-sequence sampling state, held while running

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]

    @property
    def num_uncomputed(self) -> int:
        """Tokens, known or pending, that no dispatched step has computed."""
        return self.num_tokens + self.num_pending - self.num_scheduled

    @property
    def next_output_index(self) -> int:
        """Index among the outputs of the token that the latest planned step samples."""
        return len(self.output_token_ids) + self.num_pending - 1

    @property
    def can_continue(self) -> bool:
        """Whether a step may compute more of it.

        Not while its KV is on the way or void, and not when the last token is sampled or pending.
        """
        if self.status in (Status.LOADING, Status.VOID):
            return False
        return self.num_uncomputed > 0 and self.num_tokens + self.num_pending < self.max_length

    def tokens(self, start: int, stop: int) -> list[int]:
        """The known tokens at positions ``[start, stop)``, at the cost of these only."""
        num_prompt = len(self.prompt_token_ids)
        outputs = self.output_token_ids[max(start - num_prompt, 0) : max(stop - num_prompt, 0)]
        return [*self.prompt_token_ids[start:stop], *outputs]

    def append(
        self, tokens: Sequence[int]
    ) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
        """Add generated tokens up to the one that ends the sequence.

        Returns:
            the tokens added, the reason to end with the last of them, and the stop token id if
            that is the reason.
        """
        for num_added, token in enumerate(tokens, start=1):
            self.output_token_ids.append(token)
            reason, stop_token = self._ending()
            if reason is not None:
                return tuple(tokens[:num_added]), reason, stop_token
        return tuple(tokens), None, None

    def _ending(self) -> tuple[FinishReason | None, int | None]:
        # Below min_tokens no token ends it; end-of-sequence wins over a stop id, both over length.
        token, params = self.output_token_ids[-1], self.params
        if len(self.output_token_ids) >= params.min_tokens:
            if token in self.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP, None
            if token in params.stop_token_ids:
                return FinishReason.STOP, token
        if self.num_tokens >= self.max_length:
            return FinishReason.LENGTH, None
        return None, None

    def output(
        self,
        tokens: tuple[int, ...],
        reason: FinishReason | None = None,
        stop_token: int | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> TokenOutput:
        """Describe the latest ``tokens``, already added. The first output has the cached tokens."""
        is_first = len(self.output_token_ids) == len(tokens)
        return TokenOutput(
            request_id=self.request_id,
            token_ids=tokens,
            finish_reason=reason,
            stop_token_id=stop_token,
            logprobs=tuple(logprobs),
            num_cached_tokens=(self.num_cached_at_start or 0) if is_first else 0,
        )


def length_limit(request: Request, max_model_len: int, pool_tokens: int) -> int:
    """Tokens at which the sequence of ``request`` ends at the latest.

    Args:
        pool_tokens: tokens that the whole KV pool holds; a request must fit when it runs alone.

    Raises:
        RequestError: the prompt is empty.
        ContextLengthError: the prompt, or the prompt and ``max_tokens``, are too long.
    """
    num_prompt, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
    longest = min(max_model_len, pool_tokens)
    if not num_prompt:
        raise RequestError("a prompt has at least 1 token", param="prompt", prompt_tokens=0)
    values = {
        "prompt_tokens": num_prompt,
        "max_model_len": max_model_len,
        "kv_pool_tokens": pool_tokens,
    }
    limit = f"fit into the maximum context length of {longest} tokens"
    if num_prompt + 1 > longest:
        rule = f"the prompt and at least 1 new token {limit}"
        raise ContextLengthError(rule, param="prompt", **values)
    if max_tokens is None:
        return longest
    if num_prompt + max_tokens > longest:
        rule = f"the prompt and max_tokens {limit}"
        raise ContextLengthError(rule, param="max_tokens", max_tokens=max_tokens, **values)
    return num_prompt + max_tokens
