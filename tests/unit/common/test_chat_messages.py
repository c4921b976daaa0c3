"""Messages in every form that is taken, rendered as transformers renders the plain form; others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.common.chat_messages import MessageError, is_observation, read_messages, render_chat
from tests.support.chat_templates import IM, TOKENIZERS, tokenizer_of

# Shows calls, tools and a variable, as templates of models with tools do.
TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ c['function'] | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
SHOWING = tokenizer_of(TEMPLATE, IM, "<|im_end|>")
TEXTS = st.text("ab {}\n", min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(st.sampled_from("xy"), st.integers(0, 9) | TEXTS, max_size=2)
CALLS = st.lists(st.tuples(st.sampled_from(["add", "now"]), ARGUMENTS), min_size=1, max_size=2)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Any], list[Any]]:
    """A conversation in one of the forms that are taken, and in the plain form of templates."""
    written, plain = [], []
    for role in draw(st.lists(st.sampled_from(["system", "user", "tool", "assistant"]), min_size=1, max_size=4)):
        parts = draw(st.lists(TEXTS, min_size=1, max_size=2))
        message: dict[str, Any] = {"role": role, "content": "\n".join(parts)}
        other = draw(st.sampled_from([message["content"], [{"type": "text", "text": part} for part in parts], parts]))
        own: dict[str, Any] = {"role": role, "content": other, "name": None}
        if role == "assistant" and draw(st.booleans()):
            calls = draw(CALLS)
            message["tool_calls"] = [
                {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
            ]
            shape = draw(st.sampled_from(["text", "bare", "object"]))
            text_of: dict[str, Callable[[Any], Any]] = {"text": json.dumps, "object": dict}
            own["tool_calls"] = [
                {"name": name, "arguments": arguments}
                if shape == "bare"
                else {"type": "function", "function": {"name": name, "arguments": text_of[shape](arguments)}}
                for name, arguments in calls
            ]
            if draw(st.booleans()):
                message["content"], own["content"] = "", None
        written.append(own)
        plain.append(message)
    return [*written, {"role": "user", "content": "So?"}], [*plain, {"role": "user", "content": "So?"}]


@given(conversations())
def test_every_form_is_rendered_as_transformers_renders_the_plain_one(pair: tuple[list[Any], list[Any]]) -> None:
    written, plain = pair
    expected = SHOWING.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert read_messages(written) == plain
    assert render_chat(SHOWING, read_messages(written)) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_last_message_of_the_assistant_is_continued(name: str) -> None:
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "It is"}]
    expected = TOKENIZERS[name].apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert render_chat(TOKENIZERS[name], messages) == expected
    assert expected.endswith("It is")


def test_the_template_gets_its_variables() -> None:
    text = render_chat(
        SHOWING, [{"role": "user", "content": "a"}], {"enable_thinking": False, "tools": [{"name": "t"}]}
    )
    assert text.startswith('TOOLS [{"name": "t"}]')
    assert text.endswith("<think></think>")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("hello", "message 2 has no role"),
        ({"role": 3, "content": "a"}, "message 2 has no role"),
        ({"role": "user"}, "message 2 has no content"),
        ({"role": "user", "content": 7}, "message 2 has no content that is text: 7"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "a"}]},
            "image_url, and the policy reads",
        ),
        ({"role": "user", "content": [{"type": "thought"}]}, "a part that is not text: thought"),
        ({"role": "assistant", "content": None}, "message 2 has no content"),
        ({"role": "assistant", "tool_calls": {}, "content": None}, "message 2 has no content"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "message 2 has no function with a name"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]},
            "call 'f' in message 2 are not a JSON",
        ),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "are not a JSON object"),
    ],
)
def test_another_form_is_refused(message: Any, problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        read_messages([{"role": "user", "content": "a"}, message])
    assert not is_observation([message])
