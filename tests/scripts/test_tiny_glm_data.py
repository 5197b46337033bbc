"""Tokenizer and generated rows of the tiny GLM."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.text import load_tokenizer
from scripts.tiny_glm.tasks import KEY_IDS, TASKS, VALUE_IDS, Row, batch, single_question
from scripts.tiny_glm.tokenizer import (
    ASSISTANT,
    TOKEN_IDS,
    USER,
    VOCAB_SIZE,
    build_tokenizer,
    token_id,
    write_tokenizer,
)
from scripts.tiny_glm.words import KEYS, VALUES, WORDS

TOKENIZER = build_tokenizer()
LENGTHS = (32, 33, 64, 100, 512)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_every_text_survives_a_round_trip(text: str):
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert max(ids, default=0) < len(TOKEN_IDS) <= VOCAB_SIZE


@given(st.lists(st.sampled_from(WORDS), min_size=1))
def test_a_word_after_a_space_is_one_token(words: list[str]):
    text = "".join(f" {word}" for word in words)
    assert TOKENIZER.encode(text).ids == [token_id(word) for word in words]


def test_keys_and_values_are_apart_from_each_other_and_from_the_text():
    assert len({*KEYS, *VALUES}) == len(KEYS) + len(VALUES)
    stories = TASKS["prose"](np.random.default_rng(0), 4096)
    assert not set(stories.tokens.tolist()) & {*KEY_IDS.tolist(), *VALUE_IDS.tolist()}


def test_the_server_reads_the_tokenizer_and_its_chat_template(tmp_path: Path):
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "Caffè\n ruby seven; 12+34=46;<|user|> jade"
    assert tokenizer.encode(text) == TOKENIZER.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    messages = [{"role": "user", "content": "ruby seven; "}, {"role": "user", "content": "ruby"}]
    prompt = tokenizer.apply_chat_template(messages)
    assert prompt == "<|user|> ruby seven;<|user|> ruby<|assistant|>"
    last = [TOKEN_IDS[USER], token_id("ruby"), TOKEN_IDS[ASSISTANT]]
    assert tokenizer.encode(prompt)[-3:] == last
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", TASKS)
def test_a_row_has_its_length_and_depends_on_its_seed_only(name: str, length: int):
    row, same, other = (TASKS[name](np.random.default_rng(seed), length) for seed in (1, 1, 2))
    assert row.tokens.shape == row.weights.shape == (length,)
    assert row.weights.max() > 0 and row.weights.min() >= 0
    assert row.tokens.min() >= 0 and row.tokens.max() < len(TOKEN_IDS)
    np.testing.assert_array_equal(row.tokens, same.tokens)
    assert (row.tokens != other.tokens).any()


@pytest.mark.parametrize("name", ["pairs", "needles", "reminders", "dialogue"])
def test_a_value_counts_only_where_an_earlier_fact_tells_it(name: str):
    for seed in range(20):
        row = TASKS[name](np.random.default_rng(seed), 256)
        facts: dict[int, int] = {}
        told = 0
        for place in np.flatnonzero(np.isin(row.tokens, VALUE_IDS)).tolist():
            key, value = key_before(row, place), int(row.tokens[place])
            assert (row.weights[place] == 1) == (key in facts), (seed, place)
            assert facts.setdefault(key, value) == value
            told += row.weights[place] == 1
        assert told > 0


def key_before(row: Row, place: int) -> int:
    before = place - 2 if row.tokens[place - 1] == TOKEN_IDS[ASSISTANT] else place - 1
    assert row.tokens[before] in KEY_IDS
    return int(row.tokens[before])


@pytest.mark.parametrize("length", [40, 129, 512])
@pytest.mark.parametrize("is_dialogue", [False, True])
def test_a_single_question_is_about_one_fact_of_the_context(is_dialogue: bool, length: int):
    for seed in range(20):
        row, answer = single_question(np.random.default_rng(seed), length, is_dialogue)
        assert row.tokens.shape == (length,)
        key = row.tokens[-2 if is_dialogue else -1]
        (first, *more) = np.flatnonzero(row.tokens == key).tolist()
        assert len(more) == 1 and row.tokens[first + 1] == answer


def test_arithmetic_is_right():
    text = TOKENIZER.decode(TASKS["arithmetic"](np.random.default_rng(0), 2000).tokens.tolist())
    lines = text.split(";")[:-1]
    assert len(lines) > 100
    for line in lines:
        question, answer = line.split("=")
        left, right = map(int, question.replace("-", "+-").split("+"))
        assert left + right == int(answer), line


def test_copies_are_copies():
    row = TASKS["copying"](np.random.default_rng(0), 400)
    end = row.tokens.tolist().index(TOKEN_IDS["<|endoftext|>"])
    separators = np.flatnonzero(row.tokens[:end] == token_id(";"))
    size = int(separators[0]) + 1
    assert end == size * len(separators) and len(separators) >= 2
    np.testing.assert_array_equal(row.tokens[:end], np.tile(row.tokens[:size], len(separators)))
    assert not row.weights[:size].any() and row.weights[size : end + 1].all()


def test_a_batch_mixes_tasks_by_their_shares():
    rows = batch(np.random.default_rng(0), {"prose": 3, "arithmetic": 1}, 400, 32)
    assert rows.tokens.shape == rows.weights.shape == (400, 32)
    digits = [token_id(digit) for digit in "0123456789"]
    share = np.isin(rows.tokens, digits).any(axis=1).mean()
    assert 0.15 < share < 0.35  # four deviations of a sample of 400 around 1/4
