"""Bodies to sampling parameters: every field arrives, null means the default."""

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from dcpjax.engine.request import SamplingParams
from dcpjax.errors import RequestError
from dcpjax.server.protocol import ChatCall, CompletionCall, parse
from dcpjax.server.unsupported import NEUTRAL_VALUES

MESSAGES = [{"role": "user", "content": "hi"}]
FIELDS: dict[str, Any] = {
    "max_tokens": 9,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.0,
    "frequency_penalty": 2.0,
    "seed": -5,
    "n": 3,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
}


def completion(**fields: Any) -> CompletionCall:
    return parse(msgspec.json.encode({"prompt": "a", **fields}), CompletionCall)


def chat(**fields: Any) -> ChatCall:
    return parse(msgspec.json.encode({"messages": MESSAGES, **fields}), ChatCall)


@pytest.mark.parametrize("name", sorted(FIELDS))
@pytest.mark.parametrize("call", [completion, chat])
def test_a_field_is_the_parameter_of_its_name(call: Any, name: str) -> None:
    """Alone, so that none can stand for another."""
    value = FIELDS[name]
    params = call(**{name: value}).sampling_params()
    assert getattr(params, name) == value != getattr(call().sampling_params(), name)


def test_no_sampling_parameter_is_forgotten() -> None:
    others = {"stop", "stop_token_ids", "logit_bias", "logprobs"}
    assert set(FIELDS) | others == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize("call", [completion, chat])
def test_null_is_the_default(call: Any) -> None:
    others = ("stop", "stop_token_ids", "logit_bias", "logprobs", "stream", "stream_options")
    nulls = dict.fromkeys([*FIELDS, *others])
    assert call(**nulls).sampling_params() == call().sampling_params()


def test_defaults() -> None:
    assert completion().sampling_params() == SamplingParams()
    assert chat().sampling_params() == SamplingParams(max_tokens=None)


def test_fields_that_change_their_form() -> None:
    assert completion(stop="x").sampling_params().stop == ("x",)
    assert completion(stop=["x", "y"]).sampling_params().stop == ("x", "y")
    assert completion(stop=[]).sampling_params().stop == ()
    assert completion(stop_token_ids=[1, 2]).sampling_params().stop_token_ids == (1, 2)
    bias = completion(logit_bias={"5": 1, "7": -100}).sampling_params().logit_bias
    assert bias == ((5, 1.0), (7, -100.0))
    assert completion(logprobs=0).sampling_params().logprobs == 0
    assert completion(logprobs=5).sampling_params().logprobs == 5


def test_chat_has_two_names_for_the_limit_and_two_fields_for_logprobs() -> None:
    assert chat(max_completion_tokens=5).sampling_params().max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).sampling_params().max_tokens == 5
    assert chat(logprobs=True).sampling_params().logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling_params().logprobs == 3
    assert chat(logprobs=False, top_logprobs=0).sampling_params().logprobs is None


def test_prompts() -> None:
    assert completion(prompt="").prompts() == [""]
    assert completion(prompt=[1, 2]).prompts() == [[1, 2]]
    assert completion(prompt=[[1], []]).prompts() == [[1], []]
    assert completion(prompt=["a", "b"]).prompts() == ["a", "b"]
    for mixed in ([], [1, "a"], ["a", [1]], [[1], 1]):
        with pytest.raises(RequestError, match="prompt is"):
            completion(prompt=mixed).prompts()


def test_messages_for_the_template() -> None:
    (message,) = chat(messages=[{"role": "developer", "content": "x", "name": "n"}]).messages
    assert message.for_template() == {"role": "system", "content": "x", "name": "n"}
    parts = [{"type": "text", "text": "x"}]
    (message,) = chat(messages=[{"role": "user", "content": parts}]).messages
    assert message.for_template() == {"role": "user", "content": parts}  # the template joins them


def test_each_unsupported_field_belongs_to_some_call() -> None:
    """A name that no call has would be refused as unknown, and the table would be wrong."""
    message = type(chat().messages[0])
    known = {*CompletionCall.__struct_fields__, *ChatCall.__struct_fields__}
    assert set(NEUTRAL_VALUES) <= known | set(message.__struct_fields__)


@pytest.mark.parametrize("call", [completion, chat])
def test_a_cache_salt_is_a_short_text(call: Any) -> None:
    assert call(cache_salt="s").cache_salt == "s"
    assert call(cache_salt=None).cache_salt is None
    for wrong in (1, "x" * 257):
        with pytest.raises(RequestError) as caught:
            call(cache_salt=wrong)
        assert caught.value.param == "cache_salt"


def test_one_is_not_true() -> None:
    assert completion(best_of=1).best_of == 1
    for name, value in (("best_of", True), ("echo", 0), ("priority", False)):
        with pytest.raises(RequestError, match=f"{name} is not supported"):
            completion(**{name: value})


def test_messages_to_the_client_are_short() -> None:
    with pytest.raises(RequestError) as caught:
        chat(messages=[{"role": "x" * 10_000, "content": ""}])
    assert len(str(caught.value)) < 1000
    assert caught.value.param == "messages"


def test_reading_a_call_needs_no_jax() -> None:
    code = "import sys, dcpjax.server.protocol; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
