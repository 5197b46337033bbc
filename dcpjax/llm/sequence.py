"""The text side of a sequence: prompts to token ids, and the engine's tokens back to text.

Used by :class:`dcpjax.LLM` and by the server alike. It knows nothing about HTTP and needs no JAX.
"""

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dcpjax.config import has_type
from dcpjax.engine.request import (
    FinishReason,
    Request,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from dcpjax.errors import ContextLengthError, RequestError
from dcpjax.llm.interfaces import TokenEngine
from dcpjax.text.stream import TextDelta, TextStream
from dcpjax.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray
Message = Mapping[str, Any]


@dataclass(frozen=True)
class SequenceDelta:
    """What one step adds to one sequence. ``finish_reason`` is set on the last one.

    ``offsets`` has, for each token, the position in the sequence's whole text of the character that
    it begins or continues; zeros without a tokenizer. ``stop_reason`` is the stop string or the id
    of ``stop_token_ids`` that ended it; None for an end-of-sequence token.
    """

    text: str
    token_ids: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0


class SequenceState:
    """Turns the tokens of one sequence into text and decides whether a stop string ended it."""

    def __init__(self, params: SamplingParams, stream: TextStream | None) -> None:
        self._params = params
        self._stream = stream

    def push(self, output: TokenOutput) -> SequenceDelta:
        """The text of new tokens; the token that ends a sequence has an id but no text.

        If the result has a finish reason that ``output`` has not, a stop string was found: the
        engine does not know, and the caller aborts the request there.
        """
        parts: list[TextDelta] = []
        for token_id in self._shown(output):
            parts.append(self._decode(token_id))
            if self._stopped is not None:
                return self._delta(output, parts, len(parts))
        if len(parts) < len(output.token_ids):  # the one that ends it
            parts.append(TextDelta("", offsets=(self._num_characters,)))
        if output.finish_reason is not None and self._stream is not None:
            parts.append(TextDelta(self._stream.finish()))
        return self._delta(output, parts, len(output.token_ids))

    def _delta(self, output: TokenOutput, parts: Sequence[TextDelta], count: int) -> SequenceDelta:
        """The first ``count`` tokens of ``output`` with their text and, if any, the ending."""
        finish_reason, stop_reason = output.finish_reason, self._stopped
        if stop_reason is not None:
            finish_reason = FinishReason.STOP
        elif output.stop_token_id in self._params.stop_token_ids:
            stop_reason = output.stop_token_id
        return SequenceDelta(
            text="".join(part.text for part in parts),
            token_ids=output.token_ids[:count],
            offsets=tuple(offset for part in parts for offset in part.offsets),
            logprobs=output.logprobs[:count],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=output.num_cached_tokens,
        )

    @property
    def _stopped(self) -> str | None:
        return None if self._stream is None else self._stream.stopped

    @property
    def _num_characters(self) -> int:
        return 0 if self._stream is None else self._stream.num_characters

    def _decode(self, token_id: int) -> TextDelta:
        no_text = TextDelta("", offsets=(0,))
        return no_text if self._stream is None else self._stream.push((token_id,))

    def _shown(self, output: TokenOutput) -> tuple[int, ...]:
        """The tokens that are text: a token that ends the sequence, stop id or end of sequence,
        is not, unless the client asks to see what stopped it."""
        hides_last = output.finish_reason is FinishReason.STOP
        if hides_last and not self._params.include_stop_str_in_output:
            return output.token_ids[:-1]
        return output.token_ids


@dataclass(frozen=True)
class TextSide:
    """Everything between text and token ids. Without a tokenizer only token ids are accepted.

    ``max_model_len`` bounds the texts that are worth encoding.
    """

    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    max_model_len: int

    @classmethod
    def of(cls, engine: TokenEngine, tokenizer: Tokenizer | None) -> "TextSide":
        """End of sequence is what the model's configuration or its tokenizer calls so."""
        ends = set(engine.model_config.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            ends.add(tokenizer.eos_token_id)
        return cls(tokenizer, frozenset(ends), engine.max_model_len)

    def require_tokenizer(self, what: str, param: str | None = None) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and this engine runs with skip_tokenizer_init",
                param=param,
            )
        return self.tokenizer

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt, a text or ids already.

        Raises:
            RequestError: it is neither.
            ContextLengthError: no way of encoding the text is short enough.
        """
        if isinstance(prompt, str):
            tokenizer = self.require_tokenizer("a prompt of text", "prompt")
            return self._encode_text(tokenizer, prompt, add_special_tokens, "prompt")
        token_ids: Any = prompt
        if isinstance(prompt, Iterable):
            token_ids = tuple(int(t) if isinstance(t, np.integer) else t for t in prompt)
        if not has_type(token_ids, tuple[int, ...]):
            raise RequestError(
                "a prompt is a text or a list of token ids",
                param="prompt",
                got=reprlib.repr(prompt),
            )
        return token_ids

    def _encode_text(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool, param: str
    ) -> tuple[int, ...]:
        """Token ids; a text that cannot fit is refused before the time is spent."""
        limit = self.max_model_len * tokenizer.max_token_bytes
        if len(text) > limit:
            raise ContextLengthError(
                f"the prompt fits into the maximum context length of {self.max_model_len} tokens, "
                f"each of which stands for {tokenizer.max_token_bytes} bytes at most",
                param=param,
                characters=len(text),
            )
        return tuple(tokenizer.encode(text, add_special_tokens))

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation; the template itself writes the special tokens."""
        tokenizer = self.require_tokenizer("a conversation", "messages")
        text = tokenizer.apply_chat_template(messages, add_generation_prompt, template_kwargs)
        return self._encode_text(tokenizer, text, add_special_tokens, "messages")

    def requests(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        arrival: float,
        cache_salt: str = "",
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> list[Request]:
        """The ``params.n`` engine requests of one prompt, ``request_id-0`` and so on.

        Only requests with the same ``cache_salt`` find each other's prompts in the prefix cache.
        """
        if params.stop:
            self.require_tokenizer("a stop string", "stop")
        return [
            Request(
                request_id=f"{request_id}-{i}",
                prompt_token_ids=prompt_token_ids,
                params=one,
                eos_token_ids=self.eos_token_ids,
                arrival=arrival,
                cache_salt=cache_salt,
                kv_transfer_params=kv_transfer_params,
            )
            for i, one in enumerate(split_choices(params))
        ]

    def state(self, params: SamplingParams) -> SequenceState:
        if self.tokenizer is None:
            return SequenceState(params, None)
        stream = TextStream(
            self.tokenizer,
            stop=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        return SequenceState(params, stream)


def split_choices(params: SamplingParams) -> list[SamplingParams]:
    """One set of parameters per choice, with seeds ``seed, seed + 1, ...``."""
    return [
        dataclasses.replace(params, n=1, seed=None if params.seed is None else params.seed + i)
        for i in range(params.n)
    ]


@dataclass
class SequenceRecord:
    """Everything that one sequence has produced so far."""

    parts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    offsets: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, delta: SequenceDelta) -> None:
        self.parts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.offsets.extend(delta.offsets)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
