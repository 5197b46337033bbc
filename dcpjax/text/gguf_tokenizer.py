"""Tokenizers from GGUF metadata (``tokenizer.ggml.*``): byte-level BPE and SentencePiece's BPE.

The file names its pre-tokenizer instead of describing it; a name that is not known here is refused,
since a wrong split changes the ids of ordinary text without any other sign.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from dcpjax.errors import CheckpointError
from dcpjax.gguf_file import token_id
from dcpjax.text.pieces import PieceSpelling

SPACE_MARK = "\u2581"
CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split_by(_LLAMA3_SPLIT),
    "qwen2": lambda: _split_by(_QWEN2_SPLIT),
}
_TOKEN_ID_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def build_backend(metadata: Mapping[str, Any]) -> tuple[Tokenizer, PieceSpelling]:
    """The tokenizer that the metadata describes, putting nothing in front, and its spelling.

    Raises:
        CheckpointError: entries are missing or of a kind that is not understood.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, spelling = _byte_level(metadata), PieceSpelling()
    elif kind == "llama":
        adds_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        backend = _sentencepiece(metadata, adds_space)
        spelling = PieceSpelling(SPACE_MARK, True, adds_space)
    else:
        raise CheckpointError("tokenizer.ggml.model is gpt2 or llama", model=kind)
    _add_special_tokens(backend, metadata)
    return backend, spelling


def special_token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Ids by the names that chat templates use, such as ``bos_token``; only those given."""
    found = {name: token_id(metadata, key) for name, key in _TOKEN_ID_KEYS.items()}
    return {name: token for name, token in found.items() if token is not None}


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether encoding puts ``bos_token`` in front; models that always did need not say so."""
    implied = metadata.get("tokenizer.ggml.model") == "llama" or (
        metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    )
    return metadata.get("tokenizer.ggml.add_bos_token", implied)


def adds_eos(metadata: Mapping[str, Any]) -> bool:
    """Whether encoding puts ``eos_token`` behind a text; hardly any model wants that."""
    return metadata.get("tokenizer.ggml.add_eos_token", False)


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; further ones have keys ``tokenizer.chat_template.NAME``."""
    prefix = "tokenizer.chat_template"
    return {
        key.removeprefix(prefix).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if key == prefix or key.startswith(f"{prefix}.")
    }


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"tokenizer.ggml.pre is one of {', '.join(_PRE_TOKENIZERS)}", pre=name
        )
    merges = [_merge(line) for line in _list(metadata, "merges", str)]
    backend = Tokenizer(_bpe(_vocabulary(metadata), merges, ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[name]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], adds_space: bool) -> Tokenizer:
    vocabulary = _vocabulary(metadata)
    scores = _list(metadata, "scores", float)
    if len(scores) != len(vocabulary):
        raise CheckpointError("each token has a score", tokens=len(vocabulary), scores=len(scores))
    tokens = _list(metadata, "tokens", str)
    unknown = token_id(metadata, "unknown_token_id") or 0
    backend = Tokenizer(
        _bpe(
            vocabulary,
            _merges_by_score(vocabulary, scores),
            unk_token=tokens[unknown] if unknown < len(tokens) else None,
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    front = [normalizers.Prepend(SPACE_MARK)] if adds_space else []
    backend.normalizer = normalizers.Sequence([*front, normalizers.Replace(" ", SPACE_MARK)])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE_MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *strip,
        ]
    )
    return backend


def _merges_by_score(vocabulary: Mapping[str, int], scores: list[Any]) -> list[tuple[str, str]]:
    """All pairs whose join is a token, best score first: the order in which they are joined."""
    pairs = [
        (-scores[token], token, piece[:cut], piece[cut:])
        for piece, token in vocabulary.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    return [(left, right) for _, _, left, right in sorted(pairs)]


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **settings: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **settings)
    except Exception as error:  # the library knows no narrower type
        raise CheckpointError(
            "the merges of the GGUF file join tokens of its vocabulary", found=str(error)
        ) from error


def _merge(line: str) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not space:
        raise CheckpointError("a merge is two tokens with a space between", merge=line)
    return left, right


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    tokens = _list(metadata, "tokens", str)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(
            "each token is in the vocabulary once",
            tokens=len(tokens),
            different=len(vocabulary),
        )
    return vocabulary


def _list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise CheckpointError(
            f"tokenizer.ggml.{name} is a list of {kind.__name__}", found=type(values).__name__
        )
    return values


def _add_special_tokens(backend: Tokenizer, metadata: Mapping[str, Any]) -> None:
    tokens = _list(metadata, "tokens", str)
    kinds = _list(metadata, "token_type", int)
    if len(kinds) != len(tokens):
        raise CheckpointError("each token has a type", tokens=len(tokens), types=len(kinds))
    by_kind = {
        wanted: [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]
        for wanted in (CONTROL, USER_DEFINED)
    }
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in by_kind[CONTROL]]
    )
    backend.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in by_kind[USER_DEFINED]]
    )
