"""Small tokenizers that the tests write themselves."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dcpjax.models.catalog import bring_model
from dcpjax.text import Tokenizer, load_tokenizer
from dcpjax.text.pieces import BYTE_OF_CHARACTER

CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
# Tokens that begin or end inside a character: the tail of one emoji with the head of the next.
TORN = [b"\x98\x80\xf0", b"\xf0\x9f", b"\xcc\x81a", b"\xe4\xb8", b" \xe4", b"ab", b"aba", b"ba"]


def spelled(data: bytes) -> str:
    return "".join(CHARACTER_OF_BYTE[byte] for byte in data)


def byte_level_backend() -> Backend:
    pieces = [bytes([byte]) for byte in range(256)] + TORN
    vocabulary = {spelled(piece): index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend


def sentencepiece_backend() -> Backend:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab", "\u4e2d", "\u00e9"]
    backend = Backend(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=[("\u2581", "a"), ("a", "b"), ("\u2581a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return backend


def save_folder(folder: Path, backend: Backend, **settings: object) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save_folder(tmp_path_factory.mktemp("bytes"), byte_level_backend()))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save_folder(tmp_path_factory.mktemp("pieces"), sentencepiece_backend()))


@pytest.fixture
def byte_level_folder(tmp_path: Path) -> Path:
    return save_folder(tmp_path / "model", byte_level_backend())


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, downloaded when it is not in the user's cache."""
    return bring_model("smollm2-135m")
