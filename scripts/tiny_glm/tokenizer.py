"""The tokenizer: 256 bytes, whole words, a few special tokens. Every text survives a round trip.

It is a byte-level BPE without merges: a word of the vocabulary is one token, any other text is its
bytes. So keys and values of facts are single tokens, and digits are too.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from scripts.tiny_glm.words import WORDS

PAD, END, SYSTEM, USER, ASSISTANT = SPECIAL = (
    "<|pad|>",
    "<|endoftext|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
VOCAB_SIZE = 512
"""Rows of the embedding: a round number at least as large as the number of tokens."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message.role + '|> ' + message.content.strip() -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""The space before the content makes its first word one token."""


def _vocabulary() -> dict[str, int]:
    byte_pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL, *byte_pieces, *(f"Ġ{word}" for word in WORDS)]
    return {piece: index for index, piece in enumerate(pieces)}


TOKEN_IDS = _vocabulary()


def token_id(word: str) -> int:
    """Of a word with the space before it, or of a single ASCII character or a special token."""
    return TOKEN_IDS[f"Ġ{word}"] if f"Ġ{word}" in TOKEN_IDS else TOKEN_IDS[word]


def token_ids(words: Iterable[str]) -> list[int]:
    return [token_id(word) for word in words]


def build_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(TOKEN_IDS, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, its config and the chat template."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n")
