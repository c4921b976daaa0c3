"""Calls in answers: streamed and whole ones are read alike by every parser, and malformed ones stay text."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.parser.abstract_parser import Parser
from vllm.tool_parsers import ToolParserManager

from gspo.gateway.whole_parser import whole_parser
from tests.support.tiny_model import make_tokenizer

# DeepSeek's tokens have a full-width bar.
DEEPSEEK = [f"<\uff5ctool▁{part}\uff5c>" for part in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")]
TOKENIZER = make_tokenizer()
# Some parsers look for tokens of their models.
TOKENIZER.add_tokens(
    [
        *DEEPSEEK,
        *("<tool_calls>", "</tool_calls>", "<tool_sep>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        *("<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"),
        *("<tool_call>", "</tool_call>"),
    ]
)
# They need a package or a file that is not here.
ABSENT = {"cohere_command3", "cohere_command4", "hf"}
NAMES = sorted(set(ToolParserManager.list_registered()) - ABSENT)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}}}
    for name in ("add", "now")
]
PIECES = [
    *("<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "</parameter>", "[TOOL_CALLS]"),
    *("<tool_calls>", "</tool_calls>", "<|python_tag|>", "[add(a=1)]", "add", "<tool_sep>"),
    *(*DEEPSEEK, "<|tool_call_start|>", "<|tool_call_end|>"),
    *('{"name": "add", "arguments": {"a": 1}}', '{"name": "now"}', '{"arguments": {"a": 1}, "name": "add"}'),
    *('{"name": "add", "arguments": "{\\"a\\": 1}"}', '{"name": "add", "arguments": {"a": }}', '"a"', "{", "}", "["),
    *("<arg_key>a</arg_key>", "<arg_value>1</arg_value>", "<think>", "</think>", "Let me see. ", "\n", "\ud7ff", "]"),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=9).map("".join)


@cache
def parser_named(name: str, reasoning: str = "") -> type[Parser]:
    return whole_parser(ParserManager.get_parser(name, reasoning, enable_auto_tools=True), {})


def request_with(tools: list[Any] | None) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], model="m", tools=tools)


def read_whole(parser: type[Parser], text: str) -> tuple[str, str, list[tuple[str, str]]]:
    request = request_with(TOOLS)
    thoughts, content, calls = parser(TOKENIZER, request.tools).parse(text, request, True, TOKENIZER.encode(text))
    return thoughts or "", content or "", [(call.name, call.arguments) for call in calls or ()]


def read_stream(parser: type[Parser], text: str, cuts: list[int]) -> tuple[str, str, list[tuple[str, str]]]:
    request, bounds = request_with(TOOLS), [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    reader, thoughts, content = parser(TOKENIZER, request.tools), "", ""
    calls: list[tuple[str, str]] = []
    for first, last in pairwise(bounds):
        tokens = TOKENIZER.encode(text) if last == len(text) else []
        delta = reader.parse_delta(text[first:last], tokens, request, [1], finished=last == len(text))
        if delta is not None:
            thoughts, content = thoughts + (delta.reasoning or ""), content + (delta.content or "")
            calls += [(call.function.name, call.function.arguments) for call in delta.tool_calls if call.function]
    return thoughts, content, calls


@given(st.sampled_from(NAMES), TEXTS, st.lists(st.integers(1, 60), max_size=4, unique=True))
def test_a_stream_has_the_calls_of_the_whole_answer(name: str, text: str, cuts: list[int]) -> None:
    parser = parser_named(name)
    thoughts, content, calls = whole = read_whole(parser, text)
    assert read_stream(parser, text, cuts if text else []) == whole
    assert all(isinstance(json.loads(arguments or "{}"), dict) for _, arguments in calls)
    assert calls or thoughts + content == text, "malformed calls stay the policy's text"


NO_OBJECT = '<tool_call>{"name": "add", "arguments": []}</tool_call>'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name": "now"}</tool_call>', []),
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>', []),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', []),
        ('<tool_call>{"name": "add", "arguments": {}}', [("add", "{}")]),
        (NO_OBJECT, []),
    ],
)
def test_calls_of_one_format(text: str, calls: list[Any]) -> None:
    assert read_whole(parser_named("hermes"), f"So. {text}") == ("", "So. " if calls else f"So. {text}", calls)


def test_thoughts_stay_apart_from_what_is_no_call() -> None:
    assert read_whole(parser_named("hermes", "qwen3"), f"<think>So</think>{NO_OBJECT}") == ("So", NO_OBJECT, [])
