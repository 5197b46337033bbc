"""The JSON that goes back to a client: pure functions from what was computed to plain objects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dcpjax.engine.request import TokenLogprobs
from dcpjax.llm.sequence import SequenceDelta, SequenceRecord

Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]
Part = SequenceDelta | SequenceRecord  # of one sequence: what is new, or all


@dataclass(frozen=True)
class Head:
    """What all chunks of one answer have in common. ``name`` is the request's, without prefix."""

    name: str
    created: int  # unix seconds
    model: str


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Wanted:
    """What a client asked to see beside the text. ``logprobs`` is a number of alternatives."""

    logprobs: int | None
    token_ids: bool
    token_bytes: TokenBytes

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


@dataclass(frozen=True)
class Place:
    """Where a chunk stands: its choice, and what that choice has sent before."""

    index: int
    prompt_token_ids: Sequence[int]
    num_chunks: int = 0


PlacedRecord = tuple[Place, SequenceRecord]


@runtime_checkable
class Format(Protocol):
    """One of the two APIs. ``record`` holds all of a sequence, ``delta`` its newest part."""

    def chunk(self, head: Head, place: Place, delta: SequenceDelta, wanted: Wanted) -> Json:
        """One event of a stream."""
        ...

    def whole(self, head: Head, choices: Sequence[PlacedRecord], wanted: Wanted) -> Json:
        """The answer in one piece, without usage."""
        ...

    def envelope(self, head: Head, choices: Sequence[Json], *, is_chunk: bool) -> Json: ...


class CompletionFormat:
    """``/v1/completions``"""

    def chunk(self, head: Head, place: Place, delta: SequenceDelta, wanted: Wanted) -> Json:
        return self.envelope(head, [self._choice(place, delta, wanted)], is_chunk=True)

    def whole(self, head: Head, choices: Sequence[PlacedRecord], wanted: Wanted) -> Json:
        shown = [self._choice(place, record, wanted) for place, record in choices]
        return self.envelope(head, shown, is_chunk=False)

    def _choice(self, place: Place, part: Part, wanted: Wanted) -> Json:
        choice = {
            "index": place.index,
            "text": part.text,
            "logprobs": self._logprobs(part, wanted),
            **_ending(part),
        }
        if wanted.token_ids:
            choice["token_ids"] = part.token_ids
            if place.num_chunks == 0:
                choice["prompt_token_ids"] = place.prompt_token_ids
        return choice

    def envelope(self, head: Head, choices: Sequence[Json], *, is_chunk: bool) -> Json:
        return {
            "id": f"cmpl-{head.name}",
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": choices,
        }

    def _logprobs(self, part: Part, wanted: Wanted) -> Json | None:
        """Parallel lists; an offset is that of the character which the token begins or continues,
        so that the halves of one have the same."""
        if wanted.logprobs is None:
            return None
        tokens = part.logprobs
        return {
            "tokens": [wanted.token_text(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {wanted.token_text(token_id): value for token_id, value in _with_chosen(token)}
                for token in tokens
            ],
            "text_offset": part.offsets,
        }


class ChatFormat:
    """``/v1/chat/completions``"""

    def chunk(self, head: Head, place: Place, delta: SequenceDelta, wanted: Wanted) -> Json:
        message = {"content": delta.text}
        if place.num_chunks == 0:
            message = {"role": "assistant", **message}
        choice = {"index": place.index, "delta": message, **self._rest(delta, wanted)}
        chunk = self.envelope(head, [choice], is_chunk=True)
        if wanted.token_ids and place.num_chunks == 0:
            chunk["prompt_token_ids"] = place.prompt_token_ids
        return chunk

    def whole(self, head: Head, choices: Sequence[PlacedRecord], wanted: Wanted) -> Json:
        shown = [
            {
                "index": place.index,
                "message": {"role": "assistant", "content": record.text, "refusal": None},
                **self._rest(record, wanted),
            }
            for place, record in choices
        ]
        answer = self.envelope(head, shown, is_chunk=False)
        if wanted.token_ids:
            answer["prompt_token_ids"] = choices[0][0].prompt_token_ids
        return answer

    def _rest(self, part: Part, wanted: Wanted) -> Json:
        rest = {"logprobs": self._logprobs(part.logprobs, wanted), **_ending(part)}
        return {**rest, "token_ids": part.token_ids} if wanted.token_ids else rest

    def envelope(self, head: Head, choices: Sequence[Json], *, is_chunk: bool) -> Json:
        return {
            "id": f"chatcmpl-{head.name}",
            "object": "chat.completion.chunk" if is_chunk else "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": choices,
        }

    def _logprobs(self, tokens: Sequence[TokenLogprobs], wanted: Wanted) -> Json | None:
        if wanted.logprobs is None:
            return None

        def entry(token_id: int, logprob: float) -> Json:
            return {
                "token": wanted.token_text(token_id),
                "logprob": logprob,
                "bytes": list(wanted.token_bytes(token_id)),
            }

        content = [
            {
                **entry(token.token_id, token.logprob),
                "top_logprobs": [entry(*one) for one in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _ending(part: Part) -> Json:
    reason = part.finish_reason
    return {
        "finish_reason": None if reason is None else reason.value,
        "stop_reason": part.stop_reason,
    }


def _with_chosen(token: TokenLogprobs) -> Sequence[tuple[int, float]]:
    """The alternatives and, where it is not among them, the token that was chosen."""
    if any(token_id == token.token_id for token_id, _ in token.top):
        return token.top
    return (*token.top, (token.token_id, token.logprob))
