"""Requests with tools want calls read from their answers, in the words of each API."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.gateway.constraints import wants_calls

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
