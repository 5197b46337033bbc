"""The offline interface over the count-up engine: what goes in, what comes out, how it ends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.engine.request import FinishReason, SamplingParams, TokenOutput
from dcpjax.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    RequestError,
)
from dcpjax.llm import LLM, offline
from dcpjax.llm.sequence import SequenceRecord, TextSide
from tests.fakes import EOS, CountUpEngine, byte_tokenizer
from tests.golden.tiny import write_tiny_model

_TOKENIZER = byte_tokenizer()
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture
def engine() -> CountUpEngine:
    return CountUpEngine()


@pytest.fixture
def llm(engine: CountUpEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(offline, "load_engine", lambda config, progress: (engine, _TOKENIZER))
    with LLM("fake") as llm:
        yield llm


def test_a_prompt_of_text_is_completed(llm: LLM) -> None:
    (result,) = llm.generate("a", GREEDY)
    (output,) = result.outputs
    assert (result.prompt, result.prompt_token_ids) == ("a", (97,))
    assert (output.text, output.token_ids, output.finish_reason) == (
        "bcde",
        tuple(b"bcde"),
        "length",
    )
    assert output.logprobs is None


@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ("a", ["bc"]),
        ([97], ["bc"]),
        (["a", "k"], ["bc", "lm"]),
        ([[97], [107, 108]], ["bc", "mn"]),
        (["a", [107]], ["bc", "lm"]),
        ([], []),
    ],
)
def test_prompts_come_in_many_forms(llm: LLM, prompts: Any, texts: list[str]) -> None:
    results = llm.generate(prompts, SamplingParams(max_tokens=2))
    assert [result.outputs[0].text for result in results] == texts


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    many = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)]
    assert [r.outputs[0].text for r in llm.generate(["a", "a"], many)] == ["b", "bcd"]
    with pytest.raises(RequestError, match="one for each"):
        llm.generate(["a"], many)


def test_the_end_of_sequence_has_an_id_and_no_text(llm: LLM) -> None:
    (result,) = llm.generate([[254]], SamplingParams(max_tokens=9, skip_special_tokens=False))
    output = result.outputs[0]
    assert (output.token_ids, output.finish_reason) == ((255, EOS), "stop")
    assert output.text == "\ufffd"
    assert output.stop_reason is None


def test_ignore_eos_goes_on_to_the_limit(llm: LLM) -> None:
    (result,) = llm.generate([[254]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert result.outputs[0].token_ids == (255, EOS, 0, 1)
    assert result.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(("include", "text"), [(False, "bc"), (True, "bcd")])
def test_a_stop_token_is_the_stop_reason(llm: LLM, include: bool, text: str) -> None:
    params = SamplingParams(stop_token_ids=(100,), include_stop_str_in_output=include)
    output = llm.generate("a", params)[0].outputs[0]
    assert (output.text, output.token_ids) == (text, (98, 99, 100))
    assert (output.finish_reason, output.stop_reason) == ("stop", 100)


@pytest.mark.parametrize(("include", "text"), [(False, "bc"), (True, "bcde")])
def test_a_stop_string_ends_the_request_in_the_engine(
    llm: LLM, engine: CountUpEngine, include: bool, text: str
) -> None:
    params = SamplingParams(stop=("de",), include_stop_str_in_output=include, max_tokens=50)
    output = llm.generate("a", params)[0].outputs[0]
    assert (output.text, output.token_ids) == (text, tuple(b"bcde"))
    assert (output.finish_reason, output.stop_reason) == ("stop", "de")
    assert len(engine.aborted) == 1


def test_text_that_only_began_a_stop_string_is_given_out_at_the_end(llm: LLM) -> None:
    output = llm.generate("a", SamplingParams(stop=("dez",), max_tokens=4))[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("bcde", "length", None)


def test_choices_have_consecutive_seeds(llm: LLM, engine: CountUpEngine) -> None:
    seeds: list[int | None] = []
    engine.gate = lambda: seeds.extend(r.params.seed for r in engine.open_requests)
    (result,) = llm.generate("a", SamplingParams(n=3, seed=7, max_tokens=1))
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert seeds == [7, 8, 9]


def test_logprobs_belong_to_the_tokens(llm: LLM) -> None:
    output = llm.generate("a", SamplingParams(logprobs=2, max_tokens=3))[0].outputs[0]
    assert output.logprobs is not None
    assert [token.token_id for token in output.logprobs] == list(output.token_ids)


def test_one_wrong_prompt_computes_none(llm: LLM, engine: CountUpEngine) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate(["a", "a" * 600], GREEDY)
    assert (engine.num_steps, engine.open_requests) == (0, [])
    assert llm.generate("a", GREEDY)[0].outputs[0].text == "bcde"


def test_leaving_a_stream_aborts_it(llm: LLM, engine: CountUpEngine) -> None:
    stream = llm.stream("a", SamplingParams(max_tokens=50))
    assert next(stream).text == "b"
    stream.close()
    assert len(engine.aborted) == 1
    assert llm.generate("k", GREEDY)[0].outputs[0].text == "lmno"


def test_a_stream_adds_up_to_the_whole(llm: LLM) -> None:
    record = SequenceRecord()
    for delta in llm.stream("a", GREEDY):
        record.add(delta)
    assert (record.text, record.finish_reason) == ("bcde", FinishReason.LENGTH)
    with pytest.raises(RequestError, match="one sequence"):
        next(llm.stream("a", SamplingParams(n=2)))


def texts_of(stream: Iterator[Any]) -> str:
    return "".join(delta.text for delta in stream)


def test_a_stream_goes_on_after_other_calls(llm: LLM, engine: CountUpEngine) -> None:
    """Both work on one engine: what one of them steps for the other is not lost."""
    stream = llm.stream("a", SamplingParams(max_tokens=6))
    assert next(stream).text == "b"
    assert llm.generate(["k", "A"], GREEDY)[1].outputs[0].text == "BCDE"
    assert next(stream).text == "c"
    assert (
        llm.generate("k", SamplingParams(max_tokens=50, stop=("p",)))[0].outputs[0].text == "lmno"
    )
    assert texts_of(stream) == "defg"
    assert engine.open_requests == []


def test_streams_take_turns(llm: LLM) -> None:
    streams = [llm.stream(chr(first), GREEDY) for first in b"ak"]
    assert [next(stream).text for stream in streams * 2] == ["b", "l", "c", "m"]
    streams[0].close()
    assert texts_of(streams[1]) == "no"


def test_a_stream_that_ended_meanwhile_still_stops_at_its_stop_string(
    llm: LLM, engine: CountUpEngine
) -> None:
    stream = llm.stream("a", SamplingParams(max_tokens=9, stop=("d",)))
    assert next(stream).text == "b"
    llm.generate("k", SamplingParams(max_tokens=50))
    *_, last = stream
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "d")
    assert engine.aborted == []


def test_an_engine_that_forgets_a_request_is_an_error_not_a_hang(
    llm: LLM, engine: CountUpEngine
) -> None:
    stream = llm.stream("a", GREEDY)
    next(stream)
    engine._open.clear()
    with pytest.raises(EngineDeadError):
        next(stream)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (np.array([97]), ["bc"]),
        (np.array([[97], [107]]), ["bc", "lm"]),
        ([np.array([97]), "k"], ["bc", "lm"]),
        (list(np.array([97])), ["bc"]),
        ((97,), ["bc"]),
    ],
)
def test_arrays_are_lists(llm: LLM, prompt: Any, texts: list[str]) -> None:
    results = llm.generate(prompt, SamplingParams(max_tokens=2))
    assert [result.outputs[0].text for result in results] == texts
    assert all(type(token) is int for result in results for token in result.prompt_token_ids)


@pytest.mark.parametrize("prompt", [[1.5], [[1.5]], [True], [[1, "a"]], 5, None, [None], [[None]]])
def test_what_is_no_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="a prompt is") as caught:
        llm.generate(prompt, GREEDY)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "self", "tools"])
def test_reserved_template_variables(llm: LLM, name: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match=name) as caught:
        llm.chat(messages, GREEDY, chat_template_kwargs={name: True})
    assert caught.value.param == "chat_template_kwargs"


def test_what_is_no_conversation(llm: LLM) -> None:
    for wrong in (["hi"], [{"content": "hi"}], [[1]]):
        with pytest.raises(RequestError, match="a message is an object with a role"):
            llm.chat(wrong, GREEDY)  # type: ignore[arg-type]


def test_a_text_that_cannot_fit_is_not_encoded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest token of the byte tokenizer is <end>, five bytes."""
    longest = "a" * (5 * 512)
    with pytest.raises(ContextLengthError, match="the prompt and max_tokens"):
        llm.generate(longest, GREEDY)
    monkeypatch.setattr(type(_TOKENIZER), "encode", lambda *args: 1 / 0)
    with pytest.raises(ContextLengthError, match="5 bytes at most"):
        llm.generate(longest + "a", GREEDY)
    with pytest.raises(ContextLengthError, match="5 bytes at most"):
        llm.chat([{"role": "user", "content": longest}], GREEDY)


@pytest.mark.parametrize(("include", "text"), [(False, "bc"), (True, "bcd")])
def test_an_end_of_sequence_that_is_no_special_token_is_no_text(include: bool, text: str) -> None:
    """The engine names no stop token for it; the last token is hidden all the same."""
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=False)
    state = TextSide(_TOKENIZER, frozenset({100}), 512).state(params)
    record = SequenceRecord()
    for token in b"bc":
        record.add(state.push(TokenOutput("r", (token,))))
    record.add(state.push(TokenOutput("r", (100,), FinishReason.STOP)))
    assert (record.text, record.token_ids) == (text, [*b"bcd"])
    assert record.stop_reason is None


@pytest.mark.parametrize(
    ("min_tokens", "stop", "text"),
    [
        (0, "d", "bc"),
        (2, "d", "bc"),
        (3, "d", "bcdefghij"),  # d is the third token, after which it may end
        (2, "cd", "b"),  # begins before, is complete after
        (3, "cd", "bcdefghij"),
        (9, "j", "bcdefghij"),
        (8, "j", "bcdefghi"),
    ],
)
def test_stop_strings_count_after_min_tokens(
    llm: LLM, min_tokens: int, stop: str, text: str
) -> None:
    params = SamplingParams(min_tokens=min_tokens, stop=(stop,), max_tokens=9)
    assert llm.generate("a", params)[0].outputs[0].text == text


def test_offsets_are_of_characters(llm: LLM) -> None:
    """Of two bytes of one character, of what is held back, and of an end without text."""
    state = TextSide(_TOKENIZER, frozenset({EOS}), 512).state(SamplingParams(stop=("xyz",)))
    record = SequenceRecord()
    for token in "\u00e9xa\u4e2d".encode():
        record.add(state.push(TokenOutput("r", (token,))))
    record.add(state.push(TokenOutput("r", (EOS,), FinishReason.STOP)))
    assert record.text == "\u00e9xa\u4e2d"
    assert record.offsets == [0, 0, 1, 2, 3, 3, 3, 4]


def test_without_a_tokenizer_all_offsets_are_zero() -> None:
    state = TextSide(None, frozenset(), 512).state(SamplingParams())
    assert state.push(TokenOutput("r", (1, 2), FinishReason.LENGTH)).offsets == (0, 0)


def test_a_conversation_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    one = llm.chat(messages, GREEDY)
    assert one[0].prompt_token_ids == tuple(b"u:hi\na:")
    assert [r.outputs[0].text for r in llm.chat([messages, messages], GREEDY)] == [";<=>"] * 2
    bare = llm.chat(messages, GREEDY, add_generation_prompt=False)
    assert bare[0].prompt_token_ids == tuple(b"u:hi\n")


def test_without_a_tokenizer_ids_go_in_and_out(
    engine: CountUpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "load_engine", lambda config, progress: (engine, None))
    with LLM("fake", skip_tokenizer_init=True) as llm:
        output = llm.generate([97], GREEDY)[0].outputs[0]
        assert (output.text, output.token_ids) == ("", tuple(b"bcde"))
        with pytest.raises(RequestError, match="needs a tokenizer"):
            llm.generate("a", GREEDY)
        with pytest.raises(RequestError, match="needs a tokenizer"):
            llm.generate([97], SamplingParams(stop=("x",)))
    assert engine.is_closed


def test_an_unknown_setting_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="blok_size"):
        LLM("fake", blok_size=16)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    tmp_path: Path, load_format: str
) -> None:
    """257 tokens, 131 embeddings. Without the tokenizer nothing is wrong with the model."""
    folder = write_tiny_model(tmp_path / "model", "gqa")
    _TOKENIZER.backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="largest_token_id=256, vocab_size=131"):
        LLM(str(folder), load_format=load_format)


def test_progress_changes_nothing(llm: LLM) -> None:
    assert llm.generate("a", GREEDY, use_progress=True)[0].outputs[0].text == "bcde"
    assert llm.stats()["generation_tokens"] == 4


@given(
    data=st.binary(max_size=40) | st.lists(st.sampled_from(b"ab\xc3\xa9"), max_size=40).map(bytes),
    cuts=st.lists(st.integers(0, 40), max_size=8),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=2),
)
def test_text_does_not_depend_on_how_tokens_arrive(
    data: bytes, cuts: list[int], stop: list[str]
) -> None:
    """One token per step, or several (as speculation yields them): the same text and ending."""
    text = TextSide(_TOKENIZER, frozenset({EOS}), 512)
    params = SamplingParams(stop=tuple(stop))
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    results = []
    for parts in (pieces, [bytes([byte]) for byte in data]):
        record, state = SequenceRecord(), text.state(params)
        for part in (*parts, b""):
            reason = None if part else FinishReason.LENGTH
            record.add(state.push(TokenOutput("r", tuple(part), reason)))
            if record.finish_reason is not None:
                break
        results.append(record)
    first, second = results
    assert first.text == second.text
    assert first.token_ids == second.token_ids
    assert (first.finish_reason, first.stop_reason) == (second.finish_reason, second.stop_reason)
    if not stop:
        assert first.text == data.decode(errors="replace")
