"""Which bytes a token stands for, so that text is the UTF-8 decoding of concatenated bytes.

The tokenizers library decodes whole sequences; a stream needs each token by itself, in constant
time. Two spellings of a vocabulary allow that: byte-level (each character of a token is one byte)
and SentencePiece (plain text, a marker for the space, "<0x41>" for single bytes).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcpjax.errors import CheckpointError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """How byte-level vocabularies spell bytes: visible ones as they are, others moved up."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = (byte for byte in range(256) if byte not in visible)
    characters = {chr(byte): byte for byte in visible}
    return characters | {chr(256 + index): byte for index, byte in enumerate(moved)}


BYTE_OF_CHARACTER: Mapping[str, int] = _byte_of_character()


@dataclass(frozen=True)
class PieceSpelling:
    """How a vocabulary spells bytes. ``space_mark`` None: byte-level.

    ``has_byte_pieces``: "<0x41>" is the byte 0x41. ``strips_first_space``: the text of a whole
    sequence loses the space that encoding put in front.
    """

    space_mark: str | None = None
    has_byte_pieces: bool = False
    strips_first_space: bool = False

    def bytes_of(self, piece: str) -> bytes:
        """The bytes of one vocabulary entry; special tokens are their own text."""
        if self.space_mark is None:
            spelled = [BYTE_OF_CHARACTER.get(character, -1) for character in piece]
            return piece.encode() if -1 in spelled else bytes(spelled)
        byte = _BYTE_PIECE.fullmatch(piece) if self.has_byte_pieces else None
        if byte:
            return bytes([int(byte[1], 16)])
        return piece.replace(self.space_mark, " ").encode()


def spelling_of(decoder: Mapping[str, Any] | None) -> PieceSpelling:
    """The spelling that a tokenizer.json's ``decoder`` undoes.

    Raises:
        CheckpointError: it is neither byte-level nor of SentencePiece's kind.
    """
    steps = _flattened(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceSpelling()
    if kinds[:1] == ["Replace"] and set(kinds[1:]) <= {"ByteFallback", "Fuse", "Strip"}:
        mark = steps[0].get("pattern", {}).get("String")
        strips = [step for step in steps if step["type"] == "Strip"]
        if mark and steps[0].get("content") == " " and all(map(_strips_one_space, strips)):
            return PieceSpelling(mark, "ByteFallback" in kinds, bool(strips))
    raise CheckpointError(
        "the tokenizer's decoder is byte-level or of SentencePiece's kind", decoder=decoder
    )


def _flattened(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flattened(inner)]


def _strips_one_space(step: Mapping[str, Any]) -> bool:
    return (step["content"], step["start"], step["stop"]) == (" ", 1, 0)
