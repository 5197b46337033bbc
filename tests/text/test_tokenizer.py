"""Tokenizers of Hugging Face folders: ids, special tokens, templates, and files that are broken."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from dcpjax.errors import CheckpointError, RequestError
from dcpjax.text import load_tokenizer


def change_settings(folder, **settings):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@given(text=st.text())
def test_decoding_undoes_encoding(byte_level, text):
    assert byte_level.decode(byte_level.encode(text)) == text


def test_ids_and_sizes(byte_level):
    assert byte_level.vocab_size == 256 + 8 + 3
    assert (byte_level.bos_token_id, byte_level.eos_token_id) == (264, 265)
    assert byte_level.special_ids == {264, 265}
    assert byte_level.encode("") == []


def test_special_tokens_in_a_text_are_recognised_and_skipped_in_decoding(byte_level):
    ids = byte_level.encode("<s>a<think></s>")
    assert ids == [264, byte_level.encode("a")[0], 266, 265]
    assert byte_level.decode(ids) == "a<think>"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<s>a<think></s>"


def test_ids_without_a_token_are_no_text(byte_level):
    assert byte_level.token_bytes(byte_level.vocab_size) == b""
    assert byte_level.decode([10**9]) == ""


def test_settings_decide_what_is_put_around_a_text(byte_level_folder):
    plain = load_tokenizer(byte_level_folder).encode("a")
    change_settings(byte_level_folder, add_bos_token=True)
    assert load_tokenizer(byte_level_folder).encode("a") == [264, *plain]
    assert load_tokenizer(byte_level_folder).encode("a", add_special_tokens=False) == plain
    change_settings(byte_level_folder, add_bos_token=True, add_eos_token=True)
    assert load_tokenizer(byte_level_folder).encode("a") == [264, *plain, 265]
    change_settings(byte_level_folder, add_bos_token=False, add_eos_token=False)
    assert load_tokenizer(byte_level_folder).encode("a") == plain


def test_without_settings_tokenizer_json_decides(byte_level, byte_level_folder):
    backend = byte_level.backend.from_file(str(byte_level_folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 264)])
    backend.enable_truncation(1)
    backend.enable_padding(length=7)
    backend.save(str(byte_level_folder / "tokenizer.json"))
    assert load_tokenizer(byte_level_folder).encode("ab.") == [264, *byte_level.encode("ab.")]


def test_settings_may_be_missing(byte_level_folder):
    (byte_level_folder / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(byte_level_folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
    with pytest.raises(RequestError) as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert caught.value.code == "no_chat_template"


HELLO = [{"role": "user", "content": "hi"}]


def test_a_template_is_a_string_a_list_or_a_file(byte_level_folder):
    change_settings(byte_level_folder, chat_template="{{ bos_token }}one")
    assert load_tokenizer(byte_level_folder).apply_chat_template(HELLO) == "<s>one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "tools"}]
    change_settings(byte_level_folder, chat_template=named)
    assert load_tokenizer(byte_level_folder).apply_chat_template(HELLO) == "two"
    (byte_level_folder / "chat_template.jinja").write_text("three")
    assert load_tokenizer(byte_level_folder).apply_chat_template(HELLO) == "three"


def test_unpaired_surrogates_are_refused(byte_level):
    with pytest.raises(RequestError) as caught:
        byte_level.encode("ab\ud800")
    assert caught.value.code == "invalid_unicode"
    assert caught.value.values == {"position": 2}


def test_threads_share_a_tokenizer(byte_level):
    texts = [f"{number} \u4e2d\U0001f600" * 20 for number in range(64)]
    expected = [byte_level.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(byte_level.encode, texts)) == expected
        assert list(pool.map(byte_level.decode, expected)) == texts


def test_the_largest_id_and_the_longest_token(byte_level, sentencepiece):
    assert byte_level.max_token_id == byte_level.vocab_size - 1 == 266
    assert byte_level.max_token_bytes == len("<think>")
    longest = max(range(sentencepiece.vocab_size), key=lambda t: len(sentencepiece.token_bytes(t)))
    assert sentencepiece.max_token_bytes == len(sentencepiece.token_bytes(longest))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"bos_token": '], ids=repr)
def test_broken_files_are_refused_by_path(byte_level_folder, name, content):
    (byte_level_folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(byte_level_folder)


@pytest.mark.parametrize("content", ["{}", '{"model": {"type": "None"}}'])
def test_json_that_is_no_tokenizer_is_refused(byte_level_folder, content):
    (byte_level_folder / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="describes a tokenizer"):
        load_tokenizer(byte_level_folder)


def test_a_cut_tokenizer_is_refused_wherever_it_ends(byte_level_folder):
    path = byte_level_folder / "tokenizer.json"
    whole = path.read_text(encoding="utf-8")
    for length in range(0, len(whole) - 1, len(whole) // 20):
        path.write_text(whole[:length], encoding="utf-8")
        with pytest.raises(CheckpointError):
            load_tokenizer(byte_level_folder)


def test_a_missing_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("template", [7, [{"name": "default"}], ["text"]])
def test_templates_of_another_form_are_refused(byte_level_folder, template):
    change_settings(byte_level_folder, chat_template=template)
    with pytest.raises(CheckpointError, match="chat_template"):
        load_tokenizer(byte_level_folder)


def test_a_special_token_must_be_in_the_vocabulary(byte_level_folder):
    change_settings(byte_level_folder, bos_token="<unheard>", add_bos_token=True)
    with pytest.raises(CheckpointError, match="<unheard>"):
        load_tokenizer(byte_level_folder)
