"""Messages become a prompt by the template, or the request is refused with the reason."""

import pytest

from dcpjax.errors import CheckpointError, RequestError
from dcpjax.text.template import RESERVED_VARIABLES, ChatTemplate

SIMPLE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]


def render(source, messages=HELLO, add_generation_prompt=False, **variables):
    template = ChatTemplate.compile(source, {"bos_token": "<s>"})
    return template.render(messages, add_generation_prompt, variables)


def test_messages_and_generation_prompt():
    assert render(SIMPLE) == "<s>[user]hi"
    assert render(SIMPLE, add_generation_prompt=True) == "<s>[user]hi[assistant]"
    assert render(SIMPLE, []) == "<s>"


def test_text_parts_are_joined_as_they_are():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert render(SIMPLE, [{"role": "user", "content": parts}]) == "<s>[user]one two"
    assert render(SIMPLE, [{"role": "user", "content": []}]) == "<s>[user]"


@pytest.mark.parametrize(
    "message, code",
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "unsupported_content",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "unsupported_content"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "unsupported_content"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]},
            "unsupported_content",
        ),
        ({"role": "user", "content": ["text"]}, "unsupported_content"),
        ({"role": "user", "content": 7}, "invalid_content"),
        ({"content": "hi"}, "invalid_message"),
        ("hi", "invalid_message"),
    ],
)
def test_malformed_messages_are_refused(message, code):
    with pytest.raises(RequestError) as caught:
        render(SIMPLE, [message])
    assert caught.value.code == code
    assert caught.value.param == "messages"


def test_blocks_leave_no_blank_lines():
    source = "{% for message in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}"
    assert render(source) == "x\n"


def test_json_is_not_escaped_for_html():
    assert render("{{ facts | tojson }}", facts=[{"a": "<\u00e9>"}]) == '[{"a": "<\u00e9>"}]'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": 2\n}'


def test_loop_controls_and_the_date():
    assert (
        render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_variables_reach_the_template():
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ tools is none }}") == "True"


@pytest.mark.parametrize("name", sorted(RESERVED_VARIABLES))
def test_what_a_template_is_given_by_us_is_no_variable_of_the_caller(name):
    with pytest.raises(RequestError, match=name) as caught:
        ChatTemplate.compile(SIMPLE, {}).render(HELLO, False, {"mine": 1, name: []})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source, reason",
    [
        ("{{ raise_exception('roles alternate') }}", "roles alternate"),
        ("{{ 'a' + 1 }}", "str"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages[5].role }}", "no element 5"),
        ("{{ missing | tojson }}", "serializable"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(10000000) | length }}", "range"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_what_fails_in_a_template_is_the_requests_error(source, reason):
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.code == "chat_template_error"
    assert reason.lower() in str(caught.value).lower()


def test_a_broken_template_is_the_checkpoints_error():
    with pytest.raises(CheckpointError, match="line=2"):
        ChatTemplate.compile("a\n{% for %}", {})


@pytest.mark.parametrize("source", [None, 5, ["a"], b"a"])
def test_a_template_is_a_text(source):
    with pytest.raises(CheckpointError, match="a chat template is a text"):
        ChatTemplate.compile(source, {})
