"""Requests with tools want calls read from their answers, in the words of each API."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.gateway.constraints import media_part, wants_calls

TOOL = {"name": "add"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, False),
        ({"tools": []}, False),
        ({"tools": [TOOL]}, True),
        ({"tools": [TOOL], "tool_choice": "auto"}, True),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, True),
        ({"tools": [TOOL], "tool_choice": "none"}, False),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, False),
    ],
)
def test_tools_want_calls_unless_the_client_says_none(body: dict[str, Any], expected: bool) -> None:
    assert wants_calls(body) is expected


TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [{"role": "user", "content": "an image"}, {"role": "user", "content": [TEXT]}]}, ("", "")),
        ({"messages": [{"content": [TEXT, {"type": "image_url", "image_url": {}}]}]}, ("messages", "image_url")),
        ({"messages": [{"content": [{"type": "input_audio"}]}]}, ("messages", "input_audio")),
        ({"input": [{"content": [{"type": "input_text"}, {"type": "input_image"}]}]}, ("input", "input_image")),
        ({"messages": [{"content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]}, ("messages", "image")),
        ({"input": "text", "messages": 7}, ("", "")),
    ],
)
def test_the_first_part_that_is_no_text_is_named(body: dict[str, Any], expected: tuple[str, str]) -> None:
    assert media_part(body) == expected
