"""What a client may send, and what it means. No JAX, no HTTP, no tokenizer.

A field that is not listed is refused. A field of type Any belongs to an API that we speak but asks
for something that we do not do: ``unsupported.py`` accepts it only where it asks for nothing.
None always means: the default.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from dcpjax.engine.kv_params import KVTransferParams
from dcpjax.engine.request import SamplingParams
from dcpjax.errors import RequestError
from dcpjax.server.unsupported import refuse_unsupported

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Role = Literal["system", "developer", "user", "assistant"]

_MAX_MESSAGE = 400  # characters of a parser's message that are repeated to the client
_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat share."""

    model: str | None = None
    request_id: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    kv_transfer_params: KVTransferParams | None = None
    add_special_tokens: bool | None = None

    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Int64 | None = None
    n: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    # labels for the client's own books: nothing here depends on them
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    allowed_token_ids: Any = None
    bad_words: Any = None
    length_penalty: Any = None
    priority: Any = None
    prompt_logprobs: Any = None
    service_tier: Any = None
    spaces_between_special_tokens: Any = None
    store: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None


class CompletionCall(GenerationCall):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str | Int64 | list[Int64]]
    logprobs: Int64 | None = None

    best_of: Any = None
    echo: Any = None
    response_format: Any = None
    suffix: Any = None

    @property
    def num_prompts(self) -> int:
        return len(self.prompts())

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or a list of token ids; a flat list of ids is one prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        flat = [item for item in self.prompt if isinstance(item, int)]
        if flat and len(flat) == len(self.prompt):
            return [flat]
        many = [item for item in self.prompt if not isinstance(item, int)]
        if flat or not many or len({type(item) for item in many}) > 1:
            raise RequestError(
                "prompt is a text, a list of token ids, or a list of several of either kind",
                param="prompt",
            )
        return many

    def sampling_params(self) -> SamplingParams:
        return _sampling_params(self, logprobs=self.logprobs)


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None

    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    refusal: Any = None
    tool_calls: Any = None

    def for_template(self) -> dict[str, Any]:
        """Role and content as templates expect them; "developer" is OpenAI's later "system"."""
        refuse_unsupported(self)
        if self.content is None and self.role != "assistant":
            raise RequestError(f"a message of role {self.role!r} has content", param="messages")
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content or ""}
        return message if self.name is None else {**message, "name": self.name}


class ChatCall(GenerationCall):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # without tools both values ask for nothing

    audio: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    prediction: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    num_prompts: ClassVar[int] = 1

    def sampling_params(self) -> SamplingParams:
        """Without a limit the answer may fill the context."""
        return _sampling_params(self, logprobs=self._num_logprobs(), max_tokens=self._max_tokens())

    def _max_tokens(self) -> int | None:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestError(
                "max_tokens and max_completion_tokens are two names of one limit",
                param="max_completion_tokens",
                max_tokens=old,
                max_completion_tokens=new,
            )
        return old if new is None else new

    def _num_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise RequestError(
                "top_logprobs needs logprobs to be true",
                param="top_logprobs",
                top_logprobs=self.top_logprobs,
            )
        return None


class TokenizeCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /tokenize``: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[Int64]


Call = TypeVar("Call", CompletionCall, ChatCall, TokenizeCall, DetokenizeCall)


def parse(body: bytes, kind: type[Call]) -> Call:
    """Read a body, or say which field is wrong.

    Raises:
        RequestError: not JSON, an unknown field, a wrong type, or something that we do not do.
    """
    try:
        call = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        raise RequestError(_shortened(message), param=_blamed_field(message)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {_shortened(str(error))}") from None
    refuse_unsupported(call)
    return call


def transfer_params(call: CompletionCall | ChatCall) -> Mapping[str, Any] | None:
    """What the engine is told about KV of other engines; None for an ordinary call. Raises
    RequestError if that contradicts itself, or would hold for several sequences."""
    params = call.kv_transfer_params
    if params is None or not params.asks_for_transfer:
        return None
    params.check()
    n = call.sampling_params().n
    if call.num_prompts != 1 or n != 1:
        rule = "a call with kv_transfer_params has one prompt and n = 1"
        raise RequestError(rule, param="kv_transfer_params", prompts=call.num_prompts, n=n)
    return params.json()


def _shortened(message: str) -> str:
    """What a client sent may be in the middle; the end says where."""
    half = _MAX_MESSAGE // 2
    return message if len(message) <= _MAX_MESSAGE else f"{message[:half]}...{message[-half:]}"


def _blamed_field(message: str) -> str | None:
    """The field that a validation message of msgspec is about."""
    found = re.search(r"(?:unknown|required) field `([^`]*)`|at `\$\.(\w+)", message)
    return (found.group(1) or found.group(2)) if found else None


def _sampling_params(
    call: GenerationCall, *, logprobs: int | None, **given: int | None
) -> SamplingParams:
    """Fields that the client left out, or sent as null, keep the defaults of SamplingParams."""
    sent = {name: getattr(call, name) for name in _SAMPLING}
    settings: dict[str, Any] = {name: value for name, value in sent.items() if value is not None}
    stop = call.stop or ()
    settings.update(
        given,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(call.stop_token_ids or ()),
        logit_bias=_logit_bias(call.logit_bias or {}),
        logprobs=logprobs,
    )
    return SamplingParams(**settings)


def _logit_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for token_id, value in bias.items():
        if not re.fullmatch(r"[0-9]{1,9}", token_id) or not -100 <= value <= 100:
            raise RequestError(
                "logit_bias maps token ids to numbers in [-100, 100]",
                param="logit_bias",
                token_id=token_id[:20],
                value=value,
            )
    return tuple((int(token_id), value) for token_id, value in bias.items())
