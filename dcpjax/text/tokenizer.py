"""Text to token ids and back, and messages to a prompt, as the checkpoint defines it.

A tokenizer comes from a Hugging Face folder (tokenizer.json and its companions) or from the
metadata of a GGUF file. It does not change after loading and may be used from several threads.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from dcpjax.errors import CheckpointError, RequestError
from dcpjax.gguf_file import read_gguf
from dcpjax.text import gguf_tokenizer
from dcpjax.text.pieces import PieceSpelling, spelling_of
from dcpjax.text.template import ChatTemplate

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token")


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """One checkpoint's tokenizer.

    ``special_ids`` are the ids that ``skip_special_tokens`` leaves out; ``templates`` are the chat
    templates by name, the usual one being "default".
    """

    backend: tokenizers.Tokenizer
    spelling: PieceSpelling
    special_ids: frozenset[int]
    bos_token_id: int | None
    eos_token_id: int | None
    templates: Mapping[str, ChatTemplate]

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_token_id(self) -> int:
        """The largest id, which is at least ``vocab_size - 1``: ids may have gaps."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of UTF-8 that one token stands for at most."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        return max((len(self.spelling.bytes_of(piece)) for piece in vocabulary), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens spelled out in it are recognised.

        Raises:
            RequestError: the text is not valid Unicode (it has unpaired surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                "a text has no unpaired surrogates", code="invalid_unicode", position=error.start
            ) from error
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``; bytes that are no UTF-8 become U+FFFD."""
        pieces = (self.token_bytes(token, skip_special_tokens) for token in token_ids)
        text = b"".join(pieces).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.spelling.strips_first_space else text

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """The bytes that one token stands for; none for a special one that is to be skipped and
        for ids without a token, which padded embeddings have."""
        if skip_special_tokens and token_id in self.special_ids:
            return b""
        piece = self.backend.id_to_token(token_id)
        return b"" if piece is None else self.spelling.bytes_of(piece)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of ``messages``, special tokens spelled out: encode it without adding more.

        Raises:
            RequestError: there is no template, a message or a variable is malformed, or the
                template fails.
        """
        template = self.templates.get("default")
        if template is None:
            raise RequestError(
                "the model has a chat template", param="messages", code="no_chat_template"
            )
        return template.render(messages, add_generation_prompt, variables or {})


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model folder or .gguf file.

    Raises:
        CheckpointError: it is missing, broken, or of a kind that is not understood.
    """
    path = Path(path)
    return _load_folder(path) if path.is_dir() else _load_gguf(path)


def _load_folder(folder: Path) -> Tokenizer:
    backend, spelling = _read_backend(folder / "tokenizer.json")
    settings_path = folder / "tokenizer_config.json"
    settings = _read_object(settings_path) if settings_path.is_file() else {}
    special = {
        name: token
        for name in SPECIAL_TOKEN_NAMES
        if (token := _token_text(settings.get(name))) is not None
    }
    if "add_bos_token" in settings or "add_eos_token" in settings:
        # Said explicitly, it goes before what tokenizer.json puts around a text.
        _surround(
            backend,
            first=special.get("bos_token") if settings.get("add_bos_token") else None,
            last=special.get("eos_token") if settings.get("add_eos_token") else None,
        )
    ids = {name: backend.token_to_id(token) for name, token in special.items()}
    return _assemble(backend, spelling, special, ids, _folder_templates(folder, settings))


def _load_gguf(path: Path) -> Tokenizer:
    metadata = read_gguf(path).metadata
    backend, spelling = gguf_tokenizer.build_backend(metadata)
    ids = gguf_tokenizer.special_token_ids(metadata)
    special = {name: token for name in ids if (token := backend.id_to_token(ids[name]))}
    _surround(
        backend,
        first=special.get("bos_token") if gguf_tokenizer.adds_bos(metadata) else None,
        last=special.get("eos_token") if gguf_tokenizer.adds_eos(metadata) else None,
    )
    return _assemble(backend, spelling, special, ids, gguf_tokenizer.chat_templates(metadata))


def _assemble(
    backend: tokenizers.Tokenizer,
    spelling: PieceSpelling,
    special: Mapping[str, str],
    ids: Mapping[str, int | None],
    templates: Mapping[str, str],
) -> Tokenizer:
    added = backend.get_added_tokens_decoder()
    return Tokenizer(
        backend=backend,
        spelling=spelling,
        special_ids=frozenset(token for token, entry in added.items() if entry.special),
        bos_token_id=ids.get("bos_token"),
        eos_token_id=ids.get("eos_token"),
        templates={
            name: ChatTemplate.compile(source, special) for name, source in templates.items()
        },
    )


def _read_backend(path: Path) -> tuple[tokenizers.Tokenizer, PieceSpelling]:
    values = _read_object(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library knows no narrower type
        raise CheckpointError(
            "tokenizer.json describes a tokenizer", path=str(path), found=str(error)
        ) from error
    backend.no_truncation()  # settings of training, saved along
    backend.no_padding()
    return backend, spelling_of(values.get("decoder"))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(
            "the tokenizer's file is valid JSON", path=str(path), found=str(error)
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError("the tokenizer's file is a JSON object", path=str(path))
    return values


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            "the tokenizer's file can be read as UTF-8", path=str(path), found=str(error)
        ) from error


def _token_text(value: Any) -> str | None:
    """A special token of tokenizer_config.json: a string, or an object with its ``content``."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _surround(
    backend: tokenizers.Tokenizer, first: str | None = None, last: str | None = None
) -> None:
    """Let encoding put these special tokens around a text."""
    tokens = {token: backend.token_to_id(token) for token in (first, last) if token}
    unknown = [token for token, token_id in tokens.items() if token_id is None]
    if unknown:
        raise CheckpointError("special tokens are in the vocabulary", unknown=unknown)
    single = " ".join(part for part in (first, "$A", last) if part)
    backend.post_processor = TemplateProcessing(
        single=single,
        pair=f"{single} {single.replace('$A', '$B')}",
        special_tokens=list(tokens.items()),
    )


def _folder_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; a file of its own goes before tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": _read_text(path)}
    found = settings.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    try:
        return {item["name"]: item["template"] for item in found}
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            "chat_template is a string or a list of names and templates", folder=str(folder)
        ) from error
