"""The tokenizer of a real model, live against transformers."""

import pytest

from dcpjax.text import load_tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   three\t\ttabs\n\n\nlines  \n ",
    "def f(x: int) -> str:\n    return f\"{x:>10}\" if x != 0 else 'zero'  # why?\n",
    "1234567890 3.14159 1,000,000 0x1F",
    "na\u00efve caf\u00e9 e\u0301 \u00c5ngstr\u00f6m \u00df",
    "\u4e2d\u6587\u5b57\u7b26\uff0c\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
    "\ud55c\uad6d\uc5b4",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2603",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "I'll we've THEY'RE don't it's",
    "\x00\x07 \u200b\ufeff\u00a0x",
]
CHATS = [
    [{"role": "user", "content": "What is 2+2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " \u4e2d\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
]


@pytest.fixture(scope="module")
def ours(smollm2):
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def theirs(smollm2):
    pytest.importorskip("torch", reason="the oracle is transformers on torch")
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
    return transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


@pytest.fixture(scope="module")
def ours_from_folder(theirs, tmp_path_factory):
    """What transformers saves of the tokenizer, opened as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("folder")
    theirs.save_pretrained(folder)
    return load_tokenizer(folder)


def test_text_comes_back(ours):
    for text in TEXTS:
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


def test_known_ids(ours):
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_id) == (49152, 1, 2)
    assert ours.encode("<|im_start|>user") == [1, 4093]


@pytest.mark.oracle
@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(ours, theirs, text):
    assert ours.encode(text) == theirs.encode(text)


@pytest.mark.oracle
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_text_is_that_of_transformers(ours, theirs, text, skip):
    ids = [1, *ours.encode(text), 2]
    assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
        ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )


@pytest.mark.oracle
def test_a_saved_folder_is_the_same_tokenizer(ours, ours_from_folder, theirs):
    assert ours_from_folder.vocab_size == ours.vocab_size
    assert ours_from_folder.special_ids >= {ours.bos_token_id, ours.eos_token_id}
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours_from_folder.encode(text) == ids
        assert ours_from_folder.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    for chat in CHATS:
        prompt = ours_from_folder.apply_chat_template(chat)
        assert prompt == theirs.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )


@pytest.mark.oracle
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generates", [True, False])
def test_prompts_are_those_of_transformers(ours, theirs, chat, generates):
    expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=generates)
    assert ours.apply_chat_template(chat, add_generation_prompt=generates) == expected
