"""Fields that clients send and this server cannot honour, and the values with which they ask for
nothing."""

from collections.abc import Mapping

import msgspec

from dcpjax.errors import RequestError

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {  # besides null
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # what other servers of this API add
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "length_penalty": (1,),
    "priority": (0,),
    "prompt_logprobs": (),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    # of a message
    "annotations": ([],),
    "refusal": (),
    "tool_calls": ([],),
}


def refuse_unsupported(call: msgspec.Struct) -> None:
    """Raise RequestError for the first field of ``call`` that asks for what we do not do."""
    for name in call.__struct_fields__:
        if name in NEUTRAL_VALUES and not _is_neutral(name, getattr(call, name)):
            raise RequestError(f"{name} is not supported", param=name)


def _is_neutral(name: str, value: object) -> bool:
    # True == 1 in Python, not in JSON
    return value is None or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in NEUTRAL_VALUES[name]
    )
