"""What the router reads of a call, and how it words the two legs. Pure functions over bytes.

Only the top level of a body is parsed. Every value that is not about the transfer goes on byte for
byte, whether the router knows its field or not: checking it is the engines' business.
"""

from collections.abc import Mapping

import msgspec

Fields = dict[str, msgspec.Raw]

TRANSFER = "kv_transfer_params"

_NULL = msgspec.Raw(b"null")
_TO_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_WHEN_COMPUTED = msgspec.Raw(msgspec.json.encode(_TO_DECODE))
_WHEN_BEGUN = msgspec.Raw(msgspec.json.encode({**_TO_DECODE, "early_offer": True}))
_NOT_FOR_PREFILL = frozenset({"stream_options", "min_tokens", "n", "best_of", "return_token_ids"})


def read_fields(body: bytes) -> Fields | None:
    """The fields of a call whose prompt one engine computes for another.

    None: the call goes to a decode engine as it is, which computes all of it. These are calls for
    several sequences, calls that say themselves where their KV is, and what is no call at all and
    will be refused there.
    """
    try:
        fields = msgspec.json.decode(body, type=Fields)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    is_own = bytes(fields.get(TRANSFER, _NULL)) != b"null"
    return None if is_own or _is_for_several(fields) else fields


def _is_for_several(fields: Fields) -> bool:
    many = (bytes(fields.get(name, _NULL)) not in (b"null", b"1") for name in ("n", "best_of"))
    return any(many) or _num_prompts(bytes(fields.get("prompt", _NULL))) > 1


def _num_prompts(prompt: bytes) -> int:
    """Of the JSON value of ``prompt``. A list of numbers, perhaps a million, is not parsed."""
    inner = prompt[1:].lstrip()
    if not prompt.startswith(b"[") or not inner.startswith((b'"', b"[")):
        return 1
    return len(msgspec.json.decode(prompt, type=list[msgspec.Raw]))


def prefill_body(fields: Fields, *, is_chat: bool, is_early: bool = False) -> bytes:
    """The call for the engine that only computes the prompt, and one token that nobody sees.

    Args:
        is_early: it says where the KV is, as the first event of a stream, when it begins.
    """
    one = msgspec.Raw(b"1")
    kept = {name: value for name, value in fields.items() if name not in _NOT_FOR_PREFILL}
    changed = {
        "stream": msgspec.Raw(b"true" if is_early else b"false"),
        "max_tokens": one,
        TRANSFER: _WHEN_BEGUN if is_early else _WHEN_COMPUTED,
    }
    if is_chat:
        changed["max_completion_tokens"] = one
    return msgspec.json.encode({**kept, **changed})


def decode_body(fields: Fields, params: msgspec.Raw | None) -> bytes:
    """The client's call with what the prefill engine answered; None: decode computes the prompt."""
    if params is None:
        return msgspec.json.encode(fields)
    return msgspec.json.encode({**fields, TRANSFER: params})


def transfer_params_of_events(events: bytes) -> msgspec.Raw | None:
    """The same of the first event of a stream that says something about its KV."""
    data = (line[5:] for line in events.splitlines() if line.startswith(b"data:"))
    return next((params for part in data if (params := transfer_params_of(part))), None)


def transfer_params_of(answer: bytes) -> msgspec.Raw | None:
    """What a prefill engine says about its KV; None: nothing, or it is no answer at all."""
    try:
        fields: Mapping[str, msgspec.Raw] = msgspec.json.decode(answer, type=Fields)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    params = fields.get(TRANSFER, _NULL)
    return params if bytes(params).startswith(b"{") else None
