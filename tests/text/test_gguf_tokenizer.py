"""Tokenizers from GGUF metadata, against hand-made vocabularies."""

from pathlib import Path

import gguf
import pytest

from dcpjax.errors import CheckpointError
from dcpjax.text import load_tokenizer
from dcpjax.text.gguf_tokenizer import build_backend, special_token_ids
from dcpjax.text.pieces import BYTE_OF_CHARACTER

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def byte_level_metadata(**changes):
    tokens = ["<s>", "</s>", *sorted(BYTE_OF_CHARACTER), "he", "ll", "hell", "<think>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 2 + [NORMAL] * 259 + [USER_DEFINED],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return with_changes(metadata, changes)


def sentencepiece_metadata(**changes):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = ["\u2581", "a", "b", "c", "bc", "ab", "\u2581ab", "\u2581a"]
    scores = [0.0] * len(tokens) + [-9, -9, -9, -9, -1, -2, -3, -4]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + pieces,
        "tokenizer.ggml.scores": [float(score) for score in scores],
        "tokenizer.ggml.token_type": [2, CONTROL, CONTROL] + [6] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return with_changes(metadata, changes)


def with_changes(metadata, changes):
    """``changes`` by the last part of their key; None takes the key away."""
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def write(path: Path, metadata, **more) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {**metadata, **more}.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool}[type(value)](
                key, value
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pieces_of(metadata, text):
    return build_backend(metadata)[0].encode(text, add_special_tokens=False).tokens


def test_a_file_becomes_a_tokenizer(tmp_path):
    template = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", byte_level_metadata(), **template))
    ids = tokenizer.encode("hello<think></s>")
    assert [tokenizer.token_bytes(token) for token in ids] == [b"hell", b"o", b"<think>", b"</s>"]
    assert tokenizer.decode(ids) == "hello<think>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<s>x"


@pytest.mark.parametrize(
    "pre, text, pieces",
    [
        ("gpt-2", "I've 1234\n\n x", ["I", "'ve", " 1234", "\n\n", " x"]),
        ("smollm", "I've 1234\n\n x", ["I", "'ve", " ", "1", "2", "3", "4", "\n\n", " x"]),
        ("llama-bpe", "I'VE 1234\n\n x", ["I", "'VE", " ", "123", "4", "\n\n", " x"]),
        ("qwen2", "I'VE 1234\n\n x", ["I", "'VE", " ", "1", "2", "3", "4", "\n\n", " x"]),
        ("llama-bpe", "a.b\t(c)!\n", ["a", ".b", "\t", "(c", ")!\n"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_were_trained(pre, text, pieces):
    backend, _ = build_backend(byte_level_metadata(pre=pre))
    spans = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in spans] == pieces


def test_qwen_composes_accents_and_others_do_not():
    apart = "e\u0301"
    composed = pieces_of(byte_level_metadata(pre="qwen2"), "\u00e9")
    assert pieces_of(byte_level_metadata(pre="qwen2"), apart) == composed
    assert pieces_of(byte_level_metadata(pre="gpt-2"), apart) != composed


def test_sentencepiece_joins_the_best_pair_first():
    assert pieces_of(sentencepiece_metadata(), "abc") == ["\u2581a", "bc"]
    assert pieces_of(sentencepiece_metadata(), "ab") == ["\u2581ab"]
    assert pieces_of(sentencepiece_metadata(), "\u4e2d")[-1] == "<0xAD>"


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentencepiece_text_comes_back(tmp_path, adds_space):
    metadata = sentencepiece_metadata(add_space_prefix=adds_space)
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", metadata))
    for text in ("abc", " abc", "  a", "", "\u4e2d\U0001f600 b"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("abc", add_special_tokens=False)) == 2


@pytest.mark.parametrize(
    "metadata, adds",
    [
        (sentencepiece_metadata(), True),
        (sentencepiece_metadata(add_bos_token=False), False),
        (byte_level_metadata(), False),
        (byte_level_metadata(add_bos_token=True), True),
        (byte_level_metadata(pre="llama-bpe"), True),
        (byte_level_metadata(pre="llama-bpe", add_bos_token=False), False),
    ],
)
def test_what_is_put_in_front(tmp_path, metadata, adds):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", metadata))
    front = [tokenizer.bos_token_id] if adds else []
    assert tokenizer.encode("a") == front + tokenizer.encode("a", add_special_tokens=False)


def test_what_is_put_behind(tmp_path):
    metadata = byte_level_metadata(add_bos_token=True, add_eos_token=True)
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", metadata))
    assert tokenizer.encode("he", add_special_tokens=True)[::2] == [0, 1]


def test_further_templates_have_names(tmp_path):
    templates = {"tokenizer.chat_template": "one", "tokenizer.chat_template.tool_use": "two"}
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", byte_level_metadata(), **templates))
    assert tokenizer.apply_chat_template([]) == "one"
    assert tokenizer.templates["tool_use"].render([], False, {}) == "two"


@pytest.mark.parametrize(
    "metadata, message",
    [
        (byte_level_metadata(model="bert"), "bert"),
        (byte_level_metadata(model=None), "model=None"),
        (byte_level_metadata(pre="tekken"), "tekken"),
        (byte_level_metadata(merges=None), "merges"),
        (byte_level_metadata(merges=["he"]), "merge='he'"),
        (byte_level_metadata(merges=["zz zz"]), "merges"),
        (byte_level_metadata(tokens=["a", "a"], token_type=[1, 1], merges=[]), "once"),
        (byte_level_metadata(tokens=[1, 2]), "tokens"),
        (byte_level_metadata(token_type=[1]), "types=1"),
        (sentencepiece_metadata(scores=[1.0]), "scores=1"),
    ],
)
def test_what_is_not_understood_is_refused(metadata, message):
    with pytest.raises(CheckpointError, match=message):
        build_backend(metadata)


@pytest.mark.parametrize("key", ["bos_token_id", "padding_token_id", "unknown_token_id"])
@pytest.mark.parametrize("wrong", ["2", 2.0, True, -1, 2**40])
def test_token_ids_are_integers(key, wrong):
    with pytest.raises(CheckpointError, match=f"tokenizer.ggml.{key} is a token id"):
        special_token_ids(byte_level_metadata() | {f"tokenizer.ggml.{key}": wrong})


def test_an_absent_pre_tokenizer_is_that_of_gpt2():
    text = "I've 1234"
    assert pieces_of(byte_level_metadata(pre=None), text) == pieces_of(byte_level_metadata(), text)
