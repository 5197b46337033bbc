"""A stream of tokens gives the text of all its tokens, in whole characters, up to a stop string."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpjax.text import TextStream, Tokenizer
from dcpjax.text.stop import Match, StopFinder

# ASCII, two, three and four bytes, a combining accent, a joined family, a flag of two letters.
TEXTS = st.text(st.sampled_from("ab .\n\u00e9\u4e2d\u6587\u0301\U0001f600\u200d\U0001f1e9"))
FEW_LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(
    st.text("ab", min_size=1, max_size=4)
    | st.text(st.sampled_from("ab\u4e2d\U0001f600"), min_size=1, max_size=3),
    max_size=4,
)
NUM_IDS = 256 + 8 + 3 + 2  # bytes, torn pieces, added tokens, ids that no token has


def ids_of(tokenizer: Tokenizer, text: str, data: st.DataObject) -> list[int]:
    """Some way to spell ``text`` in tokens, torn characters included."""
    pieces = {tokenizer.token_bytes(token): token for token in range(256 + 8)}
    rest, ids = text.encode(), []
    while rest:
        fitting = sorted(piece for piece in pieces if rest.startswith(piece))
        piece = data.draw(st.sampled_from(fitting))
        ids.append(pieces[piece])
        rest = rest[len(piece) :]
    return ids


def pushes_of(ids: list[int], data: st.DataObject) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[start:stop] for start, stop in pairwise([0, *cuts, len(ids)])]


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(found)[0], min(found)[2]) if found else None


def run(stream: TextStream, pushes: list[list[int]]) -> tuple[list[str], list[int]]:
    texts, offsets = [], []
    for ids in pushes:
        delta = stream.push(ids)
        texts.append(delta.text)
        offsets += delta.offsets
        assert len(delta.offsets) == len(ids)
        assert delta.stopped == stream.stopped
    return [*texts, stream.finish()], offsets


@given(text=TEXTS, data=st.data())
def test_deltas_add_up_and_never_hold_half_a_character(byte_level, text, data):
    pushes = pushes_of(ids_of(byte_level, text, data), data)
    texts, _ = run(TextStream(byte_level), pushes)
    assert "".join(texts) == text
    assert not any("\ufffd" in part for part in texts)


@given(text=TEXTS, data=st.data())
def test_whole_characters_are_not_held_back(byte_level, text, data):
    ids = ids_of(byte_level, text, data)
    stream, shown, given_bytes = TextStream(byte_level), "", b""
    for token in ids:
        shown += stream.push([token]).text
        given_bytes += byte_level.token_bytes(token)
        assert shown == given_bytes.decode("utf-8", errors="ignore")


@given(text=TEXTS | FEW_LETTERS, stops=STOPS, include=st.booleans(), data=st.data())
def test_text_ends_at_the_first_stop_string(byte_level, text, stops, include, data):
    stream = TextStream(byte_level, stop=stops, include_stop=include)
    texts, _ = run(stream, pushes_of(ids_of(byte_level, text, data), data))
    found = first_stop(text, stops)
    if found is None:
        assert ("".join(texts), stream.stopped) == (text, None)
    else:
        start, stop = found
        expected = text[: start + len(stop) * include]
        assert ("".join(texts), stream.stopped) == (expected, stop)


@given(text=TEXTS, data=st.data())
def test_offsets_point_to_the_character_that_a_token_begins_or_continues(byte_level, text, data):
    ids = ids_of(byte_level, text, data)
    holding = [text + "\x00", "a\x00"]  # texts that wait for a stop string have offsets too
    stop = data.draw(st.sampled_from([[], holding]))
    _, offsets = run(TextStream(byte_level, stop=stop), pushes_of(ids, data))
    before = b""
    for token, offset in zip(ids, offsets, strict=True):
        assert offset == len(before.decode("utf-8", errors="ignore"))
        before += byte_level.token_bytes(token)


@given(ids=st.lists(st.integers(0, NUM_IDS - 1)), skip=st.booleans(), data=st.data())
def test_any_tokens_stream_to_what_they_decode_to(byte_level, ids, skip, data):
    stream = TextStream(byte_level, skip_special_tokens=skip)
    texts, _ = run(stream, pushes_of(ids, data))
    assert "".join(texts) == byte_level.decode(ids, skip_special_tokens=skip)


@given(text=TEXTS, data=st.data())
def test_sentencepiece_loses_one_space_at_the_front_only(sentencepiece, text, data):
    ids = sentencepiece.encode(text)
    texts, _ = run(TextStream(sentencepiece), pushes_of(ids, data))
    assert "".join(texts) == text == sentencepiece.decode(ids)


def test_the_law_would_catch_decoding_each_token_by_itself(byte_level):
    ids = byte_level.encode("\U0001f600")
    assert len(ids) > 1
    assert "".join(byte_level.decode([token]) for token in ids) != "\U0001f600"


def test_an_unfinished_character_comes_out_at_the_end_once(byte_level):
    stream = TextStream(byte_level)
    assert stream.push(byte_level.encode("a\u4e2d")[:-1]).text == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_nothing_in_nothing_out(byte_level):
    stream = TextStream(byte_level, stop=["a"])
    assert stream.push([]).text == ""
    assert stream.finish() == ""
    assert stream.stopped is None


@pytest.mark.parametrize(
    "stops, text, shown",
    [
        (["ab"], "a", ""),  # may become a stop string
        (["ab"], "b", "b"),
        (["ab"], "xa", "x"),
        (["aab"], "aaa", "a"),  # the last two may
        (["a", "ab"], "a", ""),  # found, but the longer one may follow
    ],
)
def test_what_may_become_a_stop_string_waits(byte_level, stops, text, shown):
    stream = TextStream(byte_level, stop=stops)
    delta = stream.push(byte_level.encode(text))
    assert (delta.text, delta.stopped) == (shown, None)


def test_a_stop_is_reported_by_the_push_that_settles_it(byte_level):
    stream = TextStream(byte_level, stop=["ab", "b."])
    assert stream.push(byte_level.encode("xa")).stopped is None
    delta = stream.push(byte_level.encode("b.rest"))
    assert (delta.text, delta.stopped) == ("", "ab")
    assert stream.push(byte_level.encode("more")).text == ""
    assert stream.finish() == ""


def test_a_stop_at_the_very_end_is_settled_by_finish(byte_level):
    stream = TextStream(byte_level, stop=["a", "ab"])
    stream.push(byte_level.encode("xa"))
    assert stream.finish() == ""
    assert stream.stopped == "a"


def test_special_tokens_are_text_where_they_are_not_skipped(byte_level):
    ids = [byte_level.bos_token_id, *byte_level.encode("a"), byte_level.eos_token_id]
    assert byte_level.decode(ids, skip_special_tokens=False) == "<s>a</s>"
    stream = TextStream(byte_level, stop=["</s>"], skip_special_tokens=False)
    assert stream.push(ids).text == "<s>a"


@given(text=st.text("ab", max_size=60), data=st.data())
@settings(max_examples=300)
def test_long_stop_strings_that_repeat_themselves_are_found(text, data):
    """Stop strings cut from the text itself, some with another end: near misses everywhere."""
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stops.append(text[start : start + 20] + data.draw(st.sampled_from(["", "a", "b"])) or "a")
    finder = StopFinder(stops)
    match = next(filter(None, map(finder.push, text)), None) or finder.finish()
    assert (match and (match.start, match.stop)) == first_stop(text, stops)


@pytest.mark.parametrize("stop, text", [("aabaaaab", "aabaaabaaaab"), ("ababac", "abababac")])
def test_a_near_miss_may_be_the_beginning_of_the_match(stop, text):
    assert StopFinder([stop]).push(text) == Match(len(text) - len(stop), stop)


def test_a_near_miss_is_no_match():
    finder = StopFinder(["aaabc"])
    assert finder.push("aaabaabc") is None
    assert finder.safe_length == len("aaabaabc")


class CountingText(str):
    """A stop string that counts how often it is looked at."""

    looks = 0

    def __getitem__(self, key):
        self.looks += 1
        return super().__getitem__(key)


@given(length=st.integers(1, 300), data=st.data())
def test_work_per_character_is_bounded(length, data):
    """The worst text for a stop string: it nearly matches everywhere."""
    stop = CountingText("a" * length + "b")
    text = data.draw(st.text("ac", max_size=3)) + "a" * 600
    StopFinder([stop]).push(text)
    assert len(text) <= stop.looks <= 8 * len(text)


@given(text=FEW_LETTERS, stops=STOPS, data=st.data())
def test_no_more_is_held_back_than_the_longest_stop_string(text, stops, data):
    finder, position = StopFinder(stops), 0
    for character in text:
        if finder.push(character):
            break
        position += 1
        longest = max(map(len, stops), default=0)
        assert position - finder.safe_length <= longest
