"""Answers of an environment's server: the form that is read, and the cause of each refusal."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.environments.session_server import ServerTroubleError, ServerTurn, read_json, read_reply, retry_after_s


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("2", 2.0), ("0", 0.1), ("-5", 0.1), ("1e9", 60.0), ("inf", 60.0), ("nan", 1.0), ("soon", 1.0), ("", 1.0)],
)
def test_a_full_server_is_asked_again_within_bounds(header: str, seconds: float) -> None:
    assert retry_after_s(header) == seconds
    assert retry_after_s(None) == 1.0


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ({"observation": "a", "reward": 1, "done": True}, ServerTurn("a", 1.0, done=True)),
        ({"observation": None, "reward": None, "done": False}, ServerTurn("")),
        (
            {"observation": [{"role": "tool", "content": "a"}], "reward": -0.5, "done": False, "info": {}},
            ServerTurn([{"role": "tool", "content": "a"}], -0.5),
        ),
    ],
)
def test_an_answer_is_read(reply: Any, expected: ServerTurn) -> None:
    assert read_reply(reply, "server") == expected


@pytest.mark.parametrize(
    ("reply", "rule"),
    [
        ([], "something else than an object"),
        ({}, "a done that is neither true nor false: null"),
        ({"done": 1}, "a done that is neither true nor false: 1"),
        ({"done": False, "reward": True}, "a reward that is not a number from -1e\\+30 to 1e\\+30: true"),
        ({"done": False, "reward": "1"}, "a reward that is not a number from"),
        ({"done": False, "reward": 1e308}, "a reward that is not a number from"),
        ({"done": False, "reward": 10**400}, "a reward that is not a number from"),
        ({"done": False, "observation": {"text": "a"}}, "neither text nor a list of messages"),
        ({"done": False, "observation": [{"role": "user"}]}, "neither text nor a list of messages"),
    ],
)
def test_another_form_is_refused(reply: Any, rule: str) -> None:
    with pytest.raises(ServerTroubleError, match=rule) as error:
        read_reply(reply, "server")
    assert error.value.kind == "invalid_return"


@pytest.mark.parametrize("text", ["", "{", "NaN", "[1e999]", "[" * 5000, "[" + "1," * 100_001 + "1]"])
def test_a_text_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ServerTroubleError, match="something else than JSON") as error:
        read_json(text, "server")
    assert len(str(error.value)) < 1000
