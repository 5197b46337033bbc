"""Chat templates: messages to a prompt, by the checkpoint's own jinja2 source in a sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dcpjax.errors import CheckpointError, RequestError

# What a template's own expressions can raise, beside jinja2's errors: wrong types and keys of the
# messages, the sandbox's range limit (OverflowError, an ArithmeticError), recursion of macros.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt", "tools", "documents", "self"})
"""What a template is given by us, by jinja2, or not at all; a caller's variables are others."""


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template and the special tokens that it may name, such as ``bos_token``."""

    template: jinja2.Template
    special_tokens: Mapping[str, str]

    @classmethod
    def compile(cls, source: str, special_tokens: Mapping[str, str]) -> "ChatTemplate":
        """Raises CheckpointError when the source is no valid template."""
        if not isinstance(source, str):
            raise CheckpointError("a chat template is a text", found=type(source).__name__)
        try:
            return cls(_environment().from_string(source), special_tokens)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                "the chat template is valid jinja2", line=error.lineno, found=error.message
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt of ``messages``; ``variables`` are handed to the template.

        Raises:
            RequestError: a variable has a name that is reserved, a message is malformed, or the
                template refuses or fails on it.
        """
        reserved = sorted(RESERVED_VARIABLES & set(variables))
        if reserved:
            raise RequestError(
                "chat_template_kwargs are variables of the template's own",
                param="chat_template_kwargs",
                reserved=reserved,
            )
        plain = [_with_plain_content(message) for message in messages]
        known = {
            **self.special_tokens,
            "tools": None,
            "documents": None,
            **variables,
            "messages": plain,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self.template.render(known)
        except _TEMPLATE_FAILURES as error:
            raise RequestError(
                "the chat template cannot render these messages",
                param="messages",
                code="chat_template_error",
                reason=str(error),
            ) from error


def _with_plain_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its content as one string (or None): text parts are joined as they are."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            "a message is an object with a role",
            param="messages",
            code="invalid_message",
            got=type(message).__name__,
        )
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        content = "".join(_text_of_part(part) for part in _parts(content))
    return {**message, "content": content}


def _parts(content: Any) -> Sequence[Any]:
    if not isinstance(content, list | tuple):
        raise RequestError(
            "the content of a message is a string or a list of parts",
            param="messages",
            code="invalid_content",
            got=type(content).__name__,
        )
    return content


def _text_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise RequestError(
            f"content of type {str(kind)[:40]!r} is not supported",
            param="messages",
            code="unsupported_content",
        )
    if set(part) != {"type", "text"} or not isinstance(part["text"], str):
        raise RequestError(
            'a part of a message is {"type": "text", "text": "..."}',
            param="messages",
            code="unsupported_content",
            fields=sorted(map(str, part))[:8],
        )
    return part["text"]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training; jinja2's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
