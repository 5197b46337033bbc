"""Token by token, the bytes are those that the tokenizers library joins to a text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from dcpjax.errors import CheckpointError
from dcpjax.text.pieces import BYTE_OF_CHARACTER, spelling_of


def test_every_byte_has_one_character():
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))
    assert set(BYTE_OF_CHARACTER) == set(ByteLevel.alphabet())


def test_bytes_are_spelled_as_the_library_spells_them():
    spell = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    one_of_each_length = [
        *range(0x800),
        *range(0x800, 0x10000, 0x1000),
        *range(0x10000, 0x110000, 0x8000),
    ]
    for character in map(chr, one_of_each_length):
        if not character.isascii() and 0xD800 <= ord(character) < 0xE000:
            continue  # surrogates are no text
        ((piece, _),) = spell(character)
        assert bytes(BYTE_OF_CHARACTER[letter] for letter in piece) == character.encode()


@given(ids=st.lists(st.integers(0, 270)), skip=st.booleans())
def test_byte_level_decoding_is_the_librarys(byte_level, ids, skip):
    ours = byte_level.decode(ids, skip_special_tokens=skip)
    assert ours == byte_level.backend.decode(ids, skip_special_tokens=skip)


@given(text=st.text(), skip=st.booleans())
def test_sentencepiece_decoding_is_the_librarys(sentencepiece, text, skip):
    ids = [sentencepiece.bos_token_id, *sentencepiece.encode(text)]
    ours = sentencepiece.decode(ids, skip_special_tokens=skip)
    assert ours == sentencepiece.backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}]},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
                {"type": "Strip", "content": " ", "start": 0, "stop": 1},
            ],
        },
        {"type": "Replace", "pattern": {"Regex": "_+"}, "content": " "},
    ],
)
def test_other_decoders_are_refused(decoder):
    with pytest.raises(CheckpointError, match="byte-level or of SentencePiece"):
        spelling_of(decoder)
