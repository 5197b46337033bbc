"""One API call from prompts to outputs: what completions and chat share. No HTTP here.

A :class:`Generation` is the running call: it owns the engine requests of all its choices and must
be closed. Choice ``p * n + i`` is the i-th answer to the p-th prompt.
"""

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcpjax.engine.request import FinishReason, Request, SamplingParams, TokenOutput
from dcpjax.errors import RequestError
from dcpjax.llm.sequence import SequenceDelta, SequenceRecord, SequenceState, TextSide
from dcpjax.server.engine_thread import EngineClient, OutputStream
from dcpjax.server.errors import SequenceFailedError, UnknownModelError
from dcpjax.server.metrics import Metrics, SequenceTimer
from dcpjax.server.protocol import (
    ChatCall,
    CompletionCall,
    DetokenizeCall,
    Message,
    TokenizeCall,
)
from dcpjax.server.responses import Place, TokenBytes, Usage

PromptIds = tuple[int, ...]


@dataclass
class Choice:
    """One sequence of a call and what it has produced and sent."""

    place: Place
    state: SequenceState
    timer: SequenceTimer
    record: SequenceRecord = field(default_factory=SequenceRecord)
    kv_transfer_params: Mapping[str, Any] | None = None  # of its last output

    def take(self, output: TokenOutput) -> SequenceDelta:
        """Add what the engine has computed.

        Raises:
            SequenceFailedError: it could not go on.
        """
        if output.finish_reason is FinishReason.ERROR:
            self.timer.end(FinishReason.ERROR)
            raise SequenceFailedError(output.error or "the sequence could not be computed")
        delta = self.state.push(output)
        self.record.add(delta)
        self.kv_transfer_params = output.kv_transfer_params
        self.timer.add_tokens(len(delta.token_ids))
        if delta.finish_reason is not None:
            self.timer.end(delta.finish_reason)
        return delta

    def advance(self) -> Place:
        """The place of the next chunk, which counts as sent then."""
        place = self.place
        self.place = dataclasses.replace(place, num_chunks=place.num_chunks + 1)
        return place


class Generation:
    """The choices of one call while the engine computes them."""

    def __init__(
        self, prompts: Sequence[PromptIds], choices: dict[str, Choice], stream: OutputStream
    ) -> None:
        self._prompts = prompts
        self._by_request = choices
        self._stream = stream

    @property
    def choices(self) -> list[Choice]:
        return list(self._by_request.values())

    async def deltas(self) -> AsyncIterator[tuple[Choice, SequenceDelta]]:
        """What arrives, choice by choice, until all have ended.

        Raises:
            EngineDeadError: the engine stopped.
            SequenceFailedError: one of the sequences could not go on.
        """
        async for output in self._stream:
            choice = self._by_request[output.request_id]
            delta = choice.take(output)
            if delta.finish_reason is not None and output.finish_reason is None:
                self._stream.abort(output.request_id)  # a stop string: the engine does not know
            yield choice, delta

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What the next engine needs to know, of a call that has only one sequence."""
        return self.choices[0].kv_transfer_params

    def usage(self) -> Usage:
        """Tokens so far; a prompt counts once, however many answers it has."""
        choices = self.choices
        first_of_each = choices[:: len(choices) // len(self._prompts)]
        return Usage(
            prompt_tokens=sum(map(len, self._prompts)),
            completion_tokens=sum(len(choice.record.token_ids) for choice in choices),
            cached_tokens=sum(choice.record.num_cached_tokens for choice in first_of_each),
        )

    def close(self) -> None:
        """Abort what has not ended."""
        self._stream.close()
        for choice in self.choices:
            choice.timer.end(FinishReason.ABORT)


class Service:
    """The engine, its tokenizer and its names, as the endpoints see them.

    Args:
        model_names: the names the model answers to; the first one is reported.
    """

    def __init__(
        self,
        client: EngineClient,
        text: TextSide,
        *,
        max_model_len: int,
        model_names: Sequence[str],
    ) -> None:
        self.client = client
        self.text = text
        self.max_model_len = max_model_len
        self.model_names = tuple(model_names)
        self.metrics = Metrics(self.model_names[0])
        self.token_bytes = _token_bytes(text)

    def check_model(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            UnknownModelError: the client wants another model.
        """
        if name is not None and name not in self.model_names:
            raise UnknownModelError("this server does not have the model", model=name[:100])
        return name or self.model_names[0]

    async def completion_prompts(self, call: CompletionCall) -> list[PromptIds]:
        """Token ids of the prompts. Long texts take long: not on the event loop."""
        return await asyncio.to_thread(self._encode_prompts, call)

    async def chat_prompt(self, call: ChatCall) -> PromptIds:
        return await asyncio.to_thread(self._encode_chat, call, call.messages)

    async def tokenize(self, call: TokenizeCall) -> PromptIds:
        """Token ids of a text or of a conversation."""
        if call.messages is not None and call.prompt is None:
            return await asyncio.to_thread(self._encode_chat, call, call.messages)
        if call.prompt is None or call.messages is not None:
            raise RequestError("tokenize takes either prompt or messages", param="prompt")
        special = call.add_special_tokens is not False
        return await asyncio.to_thread(self.text.encode, call.prompt, add_special_tokens=special)

    async def detokenize(self, call: DetokenizeCall) -> str:
        tokenizer = self.text.require_tokenizer("detokenize", "tokens")
        return await asyncio.to_thread(tokenizer.decode, call.tokens, False)

    async def scrape(self) -> bytes:
        """The text of all metrics; of an engine that is gone, its last numbers."""
        if self.client.is_dead:
            return self.metrics.render(None)
        return self.metrics.render(await self.client.call(lambda engine: engine.stats()))

    def _encode_prompts(self, call: CompletionCall) -> list[PromptIds]:
        special = call.add_special_tokens is not False
        return [self.text.encode(prompt, add_special_tokens=special) for prompt in call.prompts()]

    def _encode_chat(self, call: ChatCall | TokenizeCall, messages: Sequence[Message]) -> PromptIds:
        if not messages:
            raise RequestError("a conversation has at least one message", param="messages")
        return self.text.encode_chat(
            [message.for_template() for message in messages],
            add_generation_prompt=call.add_generation_prompt is not False,
            add_special_tokens=call.add_special_tokens is True,
            template_kwargs=call.chat_template_kwargs,
        )

    async def start(
        self,
        prompts: Sequence[PromptIds],
        params: SamplingParams,
        arrival: float,
        cache_salt: str = "",
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Hand a call that came at ``arrival`` (monotonic seconds) to the engine.

        Raises:
            RequestError: the engine refuses it.
            UnavailableError, EngineDeadError: nothing can be served now.
        """
        call_id = uuid.uuid4().hex  # the client's own id need not be unique
        requests = [
            request
            for number, prompt in enumerate(prompts)
            for request in self.text.requests(
                f"{call_id}-{number}", prompt, params, arrival, cache_salt, kv_transfer_params
            )
        ]
        choices = {
            request.request_id: self._choice(index, request)
            for index, request in enumerate(requests)
        }
        return Generation(prompts, choices, await self.client.open(requests))

    def _choice(self, index: int, request: Request) -> Choice:
        timer = SequenceTimer(self.metrics, len(request.prompt_token_ids), request.arrival)
        place = Place(index, request.prompt_token_ids)
        return Choice(place, self.text.state(request.params), timer)


def _token_bytes(text: TextSide) -> TokenBytes:
    """What single tokens stand for, for log-probabilities; special tokens are shown."""
    tokenizer = text.tokenizer
    if tokenizer is None:
        return lambda token_id: f"token_id:{token_id}".encode()
    return tokenizer.token_bytes
