"""The HTTP endpoints. Each reads a body, asks the :class:`Service`, and words the answer."""

import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import dcpjax
from dcpjax.llm.sequence import SequenceDelta
from dcpjax.server import protocol
from dcpjax.server.endpoint import ERROR_HANDLERS, read_body
from dcpjax.server.metrics import CONTENT_TYPE
from dcpjax.server.middleware import ApiKey, RequestId
from dcpjax.server.protocol import (
    ChatCall,
    CompletionCall,
    DetokenizeCall,
    StreamOptions,
    TokenizeCall,
)
from dcpjax.server.responses import ChatFormat, CompletionFormat, Format, Head, Json, Wanted
from dcpjax.server.service import Generation, PromptIds, Service
from dcpjax.server.streaming import EventStream, JsonResponse, begun, while_connected

Answer = Response | EventStream


def create_app(service: Service, *, api_keys: Sequence[str] = ()) -> Starlette:
    """The ASGI application. Its engine client is started and stopped by whoever made it."""
    middleware = [Middleware(RequestId)]
    if api_keys:
        middleware.append(Middleware(ApiKey, keys=api_keys))
    app = Starlette(
        routes=_Endpoints(service).routes(),
        middleware=middleware,
        exception_handlers=dict(ERROR_HANDLERS),
    )
    app.router.redirect_slashes = False
    return app


class _Endpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version),
            Route("/load", self.load),
            Route("/stats", self.stats),
            Route("/metrics", self.metrics),
        ]

    async def completions(self, request: Request) -> Answer:
        call = protocol.parse(await read_body(request), CompletionCall)

        async def answer() -> Answer:
            prompts = await self._service.completion_prompts(call)
            return await self._generate(request, call, prompts, CompletionFormat())

        return await self._admit(request, call, answer)

    async def chat(self, request: Request) -> Answer:
        call = protocol.parse(await read_body(request), ChatCall)

        async def answer() -> Answer:
            prompt = await self._service.chat_prompt(call)
            return await self._generate(request, call, [prompt], ChatFormat())

        return await self._admit(request, call, answer)

    async def _admit(
        self,
        request: Request,
        call: CompletionCall | ChatCall,
        answer: Callable[[], Coroutine[Any, Any, Answer]],
    ) -> Answer:
        """Refuse what can be refused before the prompt is read; drop it when the client leaves."""
        self._service.check_model(call.model)
        protocol.transfer_params(call)
        num_sequences = call.num_prompts * call.sampling_params().n
        self._service.client.check_accepting(num_sequences)
        return await while_connected(request.receive, answer(), _discard)

    async def _generate(
        self,
        request: Request,
        call: CompletionCall | ChatCall,
        prompts: Sequence[PromptIds],
        format: Format,
    ) -> Answer:
        params, transfer = call.sampling_params(), protocol.transfer_params(call)
        run = _Run(
            format=format,
            head=Head(
                name=call.request_id or request.state.request_id,
                created=int(time.time()),
                model=self._service.check_model(call.model),
            ),
            wanted=Wanted(
                logprobs=params.logprobs,
                token_ids=call.return_token_ids is True,
                token_bytes=self._service.token_bytes,
            ),
            generation=await self._service.start(
                prompts, params, request.state.arrival, call.cache_salt or "", transfer
            ),
        )
        if not call.stream:
            return JsonResponse(await run.whole())
        events = run.events(call.stream_options or StreamOptions())
        if transfer is not None:  # without a status a router can still ask another engine
            events = await begun(events, run.generation.close)
        return EventStream(events, run.generation.close)

    # Text

    async def tokenize(self, request: Request) -> Response:
        call = protocol.parse(await read_body(request), TokenizeCall)
        self._service.check_model(call.model)
        tokens = await self._service.tokenize(call)
        shown = [self._service.token_bytes(token).decode(errors="replace") for token in tokens]
        return JsonResponse(
            {
                "count": len(tokens),
                "max_model_len": self._service.max_model_len,
                "tokens": tokens,
                "token_strs": shown if call.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        call = protocol.parse(await read_body(request), DetokenizeCall)
        self._service.check_model(call.model)
        return JsonResponse({"prompt": await self._service.detokenize(call)})

    # State

    async def models(self, request: Request) -> Response:
        cards = [self._card(name) for name in self._service.model_names]
        return JsonResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        return JsonResponse(self._card(self._service.check_model(request.path_params["name"])))

    def _card(self, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "dcpjax",
            "root": self._service.model_names[0],
            "parent": None,
            "max_model_len": self._service.max_model_len,
        }

    async def health(self, request: Request) -> Response:
        self._service.client.check_alive()
        return Response()

    async def version(self, request: Request) -> Response:
        return JsonResponse({"version": dcpjax.__version__})

    async def load(self, request: Request) -> Response:
        return JsonResponse({"server_load": self._service.client.num_open})

    async def stats(self, request: Request) -> Response:
        return JsonResponse(await self._service.client.call(lambda engine: engine.stats()))

    async def metrics(self, request: Request) -> Response:
        return Response(await self._service.scrape(), media_type=CONTENT_TYPE)

    async def reset_prefix_cache(self, request: Request) -> Response:
        await self._service.client.call(lambda engine: engine.reset_prefix_cache())
        return Response()


@dataclass(frozen=True)
class _Run:
    """The way from a running generation to JSON."""

    format: Format
    head: Head
    wanted: Wanted
    generation: Generation

    async def whole(self) -> Json:
        with closing(self.generation):
            async for _ in self.generation.deltas():
                pass
        choices = [(choice.place, choice.record) for choice in self.generation.choices]
        answer = self.format.whole(self.head, choices, self.wanted)
        return {**answer, "usage": self.generation.usage().json(), **self._transfer()}

    async def events(self, options: StreamOptions) -> AsyncGenerator[Json, None]:
        """One chunk for each piece of text; a token without text yet waits for the next one."""
        async for choice, delta in self.generation.deltas():
            if choice.kv_transfer_params is not None and delta.finish_reason is None:
                early = self.format.envelope(self.head, [], is_chunk=True)
                yield {
                    **early,
                    **self._transfer(),
                }  # a prompt that is offered before it is computed
            if not self._is_shown(delta):
                continue
            chunk = self.format.chunk(self.head, choice.advance(), delta, self.wanted)
            if options.continuous_usage_stats:
                chunk["usage"] = self.generation.usage().json()
            if delta.finish_reason is not None:
                chunk.update(self._transfer())
            yield chunk
        if options.include_usage:
            last = self.format.envelope(self.head, [], is_chunk=True)
            yield {**last, "usage": self.generation.usage().json()}

    def _transfer(self) -> Json:
        params = self.generation.kv_transfer_params
        return {} if params is None else {"kv_transfer_params": params}

    def _is_shown(self, delta: SequenceDelta) -> bool:
        wants_tokens = self.wanted.token_ids or self.wanted.logprobs is not None
        return bool(delta.text or delta.finish_reason or (wants_tokens and delta.token_ids))


def _discard(answer: Answer) -> None:
    if isinstance(answer, EventStream):
        answer.close()
