"""English-like stories with a memory and with habits, from a seed.

A story stays with its people and its thing, and each word has favourite words to follow it: text
that can be guessed about as well as simple prose, so that a draft is worth checking.
"""

from collections.abc import Sequence

import numpy as np

from scripts.tiny_glm.tokenizer import token_ids
from scripts.tiny_glm.words import ADJECTIVES, NAMES, NOUNS, PLACES, VERBS, WEATHER

_FAVOUR = 0.55
"""Probability of a word's first favourite; each further one is as much less likely."""
_CAST_SIZE = 3

_TEMPLATES = (
    "A V the J N in the P .",
    "The N was J and very K .",
    "Then A went to the P with B .",
    "B said that the N was J .",
    "A and B were at the P .",
    "A asked where the N was .",
    "B smiled and came home .",
    "They went to the P but the N was not there .",
    "A wanted the J N so B V it .",
    "Then they all went home together .",
)
_OPENINGS = (
    "The day was W and A was at the P .",
    "The morning was W and A went to the P with B .",
    "The evening was W so A and B were at home .",
)


def story(random: np.random.Generator, length: int) -> list[int]:
    """Token ids of stories, one after another, cut to ``length``."""
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += _one_story(random)
    return tokens[:length]


def _one_story(random: np.random.Generator) -> list[int]:
    names = random.permutation(len(NAMES))[:_CAST_SIZE]
    noun = int(random.integers(len(NOUNS)))
    cast = [NAMES[index] for index in names]
    lines = [_OPENINGS[_favoured(random, noun, len(_OPENINGS))]]
    last = 0
    for _ in range(int(random.integers(4, 9))):
        last = _favoured(random, 3 * last + noun % 3, len(_TEMPLATES))
        lines.append(_TEMPLATES[last])
    return [token for line in lines for token in token_ids(_fill(random, line, cast, noun))]


def _fill(random: np.random.Generator, line: str, cast: Sequence[str], noun: int) -> list[str]:
    """The line's words; capital letters stand for a choice that depends on the story's thing."""
    first = _favoured(random, 0, len(cast))
    people = {"A": cast[first], "B": cast[(first + 1) % len(cast)], "N": NOUNS[noun]}
    classes = {"V": VERBS, "J": ADJECTIVES, "K": ADJECTIVES[::-1], "P": PLACES, "W": WEATHER}
    words = []
    for place, word in enumerate(line.split()):
        if word in people:
            words.append(people[word])
        elif word in classes:
            choices = classes[word]
            words.append(choices[_favoured(random, noun + place, len(choices))])
        else:
            words.append(word)
    return words


def _favoured(random: np.random.Generator, habit: int, count: int) -> int:
    """One of ``count``: with probability ``_FAVOUR`` the favourite that goes with ``habit``."""
    rank = int(random.geometric(_FAVOUR)) - 1
    return (7 * habit + rank) % count
