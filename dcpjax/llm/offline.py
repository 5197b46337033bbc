"""Text in, text out, in this process. Importing it does not import JAX, opening an engine does."""

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.progress import Progress as ProgressBar

from dcpjax.config import EngineConfig, Progress
from dcpjax.engine.request import Request, SamplingParams, TokenLogprobs
from dcpjax.errors import CheckpointError, ConfigError, RequestError
from dcpjax.llm.dispatch import Dispatcher
from dcpjax.llm.interfaces import TokenEngine
from dcpjax.llm.sequence import Message, Prompt, SequenceDelta, SequenceRecord, TextSide
from dcpjax.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from dcpjax.models.checkpoint import Checkpoint


def load_follower(config: EngineConfig, progress: Progress | None = None) -> Callable[[], None]:
    """This process of an engine that another one leads, loaded and compiled.

    Returns:
        what follows the leader until it closes the engine; raises EngineDeadError when a process of
        it is gone or failed.

    Raises:
        ConfigError: a setting or a model file is wrong, or not the same on all processes.
    """
    from dcpjax.engine.engine import Engine

    return Engine(config, _open(config, progress), progress=progress).follow


def load_engine(
    config: EngineConfig, progress: Progress | None = None
) -> tuple[TokenEngine, Tokenizer | None]:
    """Open the checkpoint, place the weights and compile every shape.

    Args:
        progress: called as ``progress(what, done, total)`` while that goes on.

    Raises:
        ConfigError: a setting or a model file is wrong.
        EngineDeadError: another process of the engine is gone or failed.
    """
    from dcpjax.engine.engine import Engine

    if not config.distributed.is_leader:
        raise ConfigError(
            "the process with node rank 0 takes requests; the others follow it with "
            "`dcpjax serve` and their own --node-rank",
            node_rank=config.node_rank,
        )
    checkpoint = _open(config, progress)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(checkpoint.path)
    if tokenizer is not None:
        _check_vocabulary(tokenizer, checkpoint.config.vocab_size)
    return Engine(config, checkpoint, progress=progress), tokenizer


def _open(config: EngineConfig, progress: Progress | None) -> "Checkpoint":
    from dcpjax.models.checkpoint import open_checkpoint

    return open_checkpoint(
        config.model,
        weights=config.load_format != "dummy",
        draft_layers=None if config.drafts_with_model else False,
        progress=None if progress is None else _in_percent(progress),
    )


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    if tokenizer.max_token_id >= vocab_size:
        raise CheckpointError(
            "the model has an embedding for every token of its tokenizer",
            largest_token_id=tokenizer.max_token_id,
            vocab_size=vocab_size,
        )


def _in_percent(progress: Progress) -> Callable[[str, float | None], None]:
    """For a download, which knows the part that is done, or not even that."""
    return lambda what, part: progress(what, int(100 * (part or 0)), 100)


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence. ``logprobs`` is None unless it was asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its ``n`` generated sequences. ``prompt`` is None for token-id prompts."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0


class LLM:
    """An engine and its tokenizer in this process.

    Args:
        model: folder, ``.gguf`` file or known name.
        progress: called as ``progress(what, done, total)`` while loading and compiling.
        settings: the fields of :class:`dcpjax.config.EngineConfig`.
    """

    def __init__(self, model: str, *, progress: Progress | None = None, **settings: Any) -> None:
        self.config = EngineConfig.from_settings(model, settings)
        self._engine, self.tokenizer = load_engine(self.config, progress)
        self._text = TextSide.of(self._engine, self.tokenizer)
        self._dispatcher = Dispatcher(self._engine)
        self._ids = itertools.count()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the engine; more than once is fine."""
        self._engine.close()

    def stats(self) -> dict[str, object]:
        return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or several, texts or lists of token ids.

        Raises:
            RequestError: one of them is wrong; then none is computed.
        """
        many = _as_prompts(prompts)
        encoded = [self.encode(prompt) for prompt in many]
        texts = [prompt if isinstance(prompt, str) else None for prompt in many]
        return self._generate(texts, encoded, sampling_params, use_progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; otherwise as :meth:`generate`."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        encoded = [
            self.encode_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._generate([None] * len(encoded), encoded, sampling_params, use_progress)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt, special tokens of its beginning included."""
        return self._text.encode(prompt)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation, as the model's chat template writes it."""
        return self._text.encode_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=chat_template_kwargs,
        )

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[SequenceDelta, None, None]:
        """Complete one prompt piece by piece; closing the iterator aborts the request.

        Raises:
            RequestError: the prompt or the parameters are wrong.
        """
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise RequestError("a stream has one sequence", param="n", n=params.n)
        requests = self._requests(self.encode(prompt), params)
        with closing(self._run(requests)) as deltas:
            for _, delta in deltas:
                yield delta

    def _generate(
        self,
        texts: Sequence[str | None],
        encoded: Sequence[tuple[int, ...]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_progress: bool,
    ) -> list[RequestOutput]:
        many_params = _per_prompt(sampling_params, len(encoded))
        groups = [
            self._requests(ids, params) for ids, params in zip(encoded, many_params, strict=True)
        ]
        records = {request.request_id: SequenceRecord() for group in groups for request in group}
        requests = [request for group in groups for request in group]
        with (
            ProgressBar(disable=not use_progress) as bar,
            closing(self._run(requests)) as deltas,
        ):
            task = bar.add_task("generate", total=len(requests))
            for request_id, delta in deltas:
                records[request_id].add(delta)
                bar.advance(task, delta.finish_reason is not None)
        return [
            _request_output(text, group, [records[request.request_id] for request in group])
            for text, group in zip(texts, groups, strict=True)
        ]

    def _run(self, requests: Sequence[Request]) -> Generator[tuple[str, SequenceDelta], None, None]:
        """What the requests yield until all have ended; what is left at an exit is aborted."""
        states = {request.request_id: self._text.state(request.params) for request in requests}
        with closing(self._dispatcher.open(requests)) as mailbox:
            while states:
                output = mailbox.take()
                state = states.get(output.request_id)
                if state is None:  # a stop string ended it while more was on the way
                    continue
                delta = state.push(output)
                if delta.finish_reason is not None:
                    del states[output.request_id]
                    self._dispatcher.abort(output.request_id)
                yield output.request_id, delta

    def _requests(self, prompt_token_ids: tuple[int, ...], params: SamplingParams) -> list[Request]:
        request_id = f"llm-{next(self._ids)}"
        return self._text.requests(request_id, prompt_token_ids, params, time.monotonic())


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a flat list or array of integers is one prompt."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        return [prompts]
    many: Any = list(prompts)
    return [many] if many and isinstance(many[0], int | np.integer) else many


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            "sampling_params is one set for all prompts or one for each",
            prompts=count,
            sampling_params=len(params),
        )
    return list(params)


def _request_output(
    prompt: str | None, group: Sequence[Request], records: Sequence[SequenceRecord]
) -> RequestOutput:
    outputs = [
        CompletionOutput(
            index=index,
            text=record.text,
            token_ids=tuple(record.token_ids),
            finish_reason=record.finish_reason.value if record.finish_reason else "abort",
            stop_reason=record.stop_reason,
            logprobs=None if request.params.logprobs is None else tuple(record.logprobs),
        )
        for index, (request, record) in enumerate(zip(group, records, strict=True))
    ]
    return RequestOutput(
        request_id=group[0].request_id.rpartition("-")[0],
        prompt=prompt,
        prompt_token_ids=group[0].prompt_token_ids,
        outputs=outputs,
        num_cached_tokens=records[0].num_cached_tokens,
    )
