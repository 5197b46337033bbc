"""What the model learns, as rows of tokens with a weight for each: 0 where nobody could guess it.

Everything comes from a NumPy generator, so a row is a function of its seed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from scripts.tiny_glm.story import story
from scripts.tiny_glm.tokenizer import (
    ASSISTANT,
    END,
    SYSTEM,
    USER,
    token_id,
    token_ids,
)
from scripts.tiny_glm.words import KEYS, VALUES, WORDS

KEY_IDS = np.asarray(token_ids(KEYS))
VALUE_IDS = np.asarray(token_ids(VALUES))
WORD_IDS = np.asarray(token_ids(WORDS))
_SEPARATOR, _STOP, _END = token_id(";"), token_id("."), token_id(END)
_USER, _ASSISTANT, _SYSTEM = token_id(USER), token_id(ASSISTANT), token_id(SYSTEM)
_TEXT_WEIGHT = 0.5
"""Text is most of a row, and less is to be learnt from each of its tokens."""


@dataclass(frozen=True)
class Row:
    """Token ids and how much it counts to predict each of them, both [T]."""

    tokens: np.ndarray
    weights: np.ndarray


Task = Callable[[np.random.Generator, int], Row]
"""A row of a given length."""


def pairs(random: np.random.Generator, length: int) -> Row:
    """Facts that are repeated in any order: `` ruby seven; comet red; ruby seven;``."""
    count = min(max(2, length // 9), len(KEYS))
    keys = random.permutation(KEY_IDS)[:count]
    values = random.choice(VALUE_IDS, count)
    order = random.integers(0, count, length // 3 + 1)
    order[:count] = np.where(random.random(count) < 0.7, np.arange(count), order[:count])
    first = _is_first(order)
    tokens = np.stack([keys[order], values[order], np.full(order.shape, _SEPARATOR)], axis=1)
    weights = np.stack([0 * first, ~first, 0 * first + 0.05], axis=1)
    return Row(tokens.ravel()[:length], weights.ravel()[:length].astype(np.float32))


def needles(random: np.random.Generator, length: int) -> Row:
    """Facts strewn over stories, and at the end some of them again."""
    count = max(1, min(length // 16, len(KEYS)))
    asked = max(1, min(count // 2, length // 24))
    body = length - 3 * asked
    return _with_facts(random, body, count, asked, _plain_question)


def reminders(random: np.random.Generator, length: int) -> Row:
    """Facts strewn over stories, half of them twice, and at the end one more of them again.

    Here questions come after sentences, the last one amid a sentence; all but the first of
    ``needles`` come after another question.
    """
    count = max(1, min(length // 16, len(KEYS)))
    return _with_facts(random, length - 3, count, 1, _plain_question, repeated=count // 2)


def dialogue(random: np.random.Generator, length: int) -> Row:
    """Facts strewn over a user's stories; a key alone is asked, its value is the answer."""
    count = max(1, min(length // 16, len(KEYS)))
    asked = max(1, min(count // 2, length // 32))
    row = _with_facts(random, length - 4 * asked - 1, count, asked, _dialogue_question)
    return _after(_SYSTEM if random.random() < 0.2 else _USER, row)


def single_question(random: np.random.Generator, length: int, is_dialogue: bool) -> tuple[Row, int]:
    """A row that ends where the value of a fact is wanted, and that value."""
    count = max(1, min(length // 16, len(KEYS)))
    if is_dialogue:
        row = _after(_USER, _with_facts(random, length - 4, count, 1, _dialogue_question))
    else:
        row = _with_facts(random, length - 1, count, 1, _plain_question)
    answer = int(row.tokens[length])
    return Row(row.tokens[:length], row.weights[:length]), answer


def copying(random: np.random.Generator, length: int) -> Row:
    """Lists of random words, each written again once or more."""
    tokens, weights = [], []
    while len(tokens) < length:
        size = int(random.integers(3, max(4, min(48, length // 3)) + 1))
        times = int(random.integers(2, 4))
        words = random.choice(WORD_IDS, size).tolist()
        tokens += [*(times * [*words, _SEPARATOR]), _END]
        weights += [*([0.0] * (size + 1)), *([1.0] * ((times - 1) * (size + 1) + 1))]
    return _row(tokens, weights, length)


def arithmetic(random: np.random.Generator, length: int) -> Row:
    """Sums and differences of numbers below a hundred: ``12+34=46;``."""
    tokens, weights = [], []
    while len(tokens) < length:
        a, b = (int(number) for number in random.integers(0, 100, 2))
        if random.random() < 0.5:
            question, answer = f"{a}+{b}=", f"{a + b};"
        else:
            question, answer = f"{max(a, b)}-{min(a, b)}=", f"{abs(a - b)};"
        tokens += token_ids(question) + token_ids(answer)
        weights += [0.02] * len(question) + [1.0] * len(answer)
    return _row(tokens, weights, length)


def prose(random: np.random.Generator, length: int) -> Row:
    return _row(story(random, length), [_TEXT_WEIGHT] * length, length)


TASKS: Mapping[str, Task] = {
    "pairs": pairs,
    "needles": needles,
    "reminders": reminders,
    "dialogue": dialogue,
    "copying": copying,
    "arithmetic": arithmetic,
    "prose": prose,
}


def batch(random: np.random.Generator, mixture: Mapping[str, float], rows: int, length: int) -> Row:
    """Rows of all tasks of the mixture by their shares, [rows, length]."""
    names = list(mixture)
    shares = np.asarray([mixture[name] for name in names])
    chosen = random.choice(len(names), rows, p=shares / shares.sum())
    made = [TASKS[names[index]](random, length) for index in chosen]
    return Row(np.stack([row.tokens for row in made]), np.stack([row.weights for row in made]))


def _with_facts(
    random: np.random.Generator,
    body: int,
    count: int,
    asked: int,
    question: Callable[[int, int], tuple[list[int], list[float]]],
    repeated: int = 0,
) -> Row:
    """``body`` tokens of stories with facts between sentences, then questions.

    Of the ``count`` facts the first ``repeated`` ones stand twice.
    """
    keys = random.permutation(KEY_IDS)[:count].tolist()
    values = random.choice(VALUE_IDS, count).tolist()
    told = np.arange(count)
    if repeated:
        told = random.permutation(np.concatenate([told, told[:repeated]]))
    text = story(random, body - 3 * len(told))
    places = np.sort(random.choice(_sentence_ends(text), len(told))).tolist()
    tokens: list[int] = []
    weights: list[float] = []
    before = 0
    for place, fact, is_new in zip(places, told.tolist(), _is_first(told).tolist(), strict=True):
        tokens += [*text[before:place], keys[fact], values[fact], _SEPARATOR]
        weights += [*([0.2] * (place - before)), 0.0, 0.0 if is_new else 1.0, 0.05]
        before = place
    tokens += text[before:]
    weights += [0.2] * (len(text) - before)
    for index in random.permutation(count)[:asked].tolist():
        more, counted = question(keys[index], values[index])
        tokens += more
        weights += counted
    return _row(tokens, weights, len(tokens))


def _after(token: int, row: Row) -> Row:
    """The row behind one token more, which does not count."""
    return Row(np.append(token, row.tokens), np.append(np.float32(0), row.weights))


def _sentence_ends(text: list[int]) -> np.ndarray:
    """Where a fact may be put: at the start, and after each full stop."""
    return np.asarray([0, *(index + 1 for index, token in enumerate(text) if token == _STOP)])


def _plain_question(key: int, value: int) -> tuple[list[int], list[float]]:
    return [key, value, _SEPARATOR], [0.0, 1.0, 0.05]


def _dialogue_question(key: int, value: int) -> tuple[list[int], list[float]]:
    return [_USER, key, _ASSISTANT, value], [0.1, 0.0, 0.05, 1.0]


def _is_first(order: np.ndarray) -> np.ndarray:
    """True where a value occurs for the first time."""
    first = np.zeros(order.shape, bool)
    first[np.unique(order, return_index=True)[1]] = True
    return first


def _row(tokens: list[int], weights: list[float], length: int) -> Row:
    return Row(np.asarray(tokens[:length]), np.asarray(weights[:length], np.float32))
