"""Any bytes of a worker are a reply of the right types, or none; its content is a value or a failure."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gspo.common.plain_json import MAX_JSON_MEMBERS, plain_json
from gspo.reward.functions.environment_steps import EnvironmentSteps
from gspo.reward.functions.library import Function
from gspo.reward.sandbox.calls import Answer, CallError, Code, Signature
from gspo.reward.sandbox.inside.frames import HEAD_BYTES, FrameError, body_size, frame, read
from gspo.reward.sandbox.values import (
    MAX_VALUES_BYTES,
    Failure,
    Reply,
    TooLargeError,
    read_reply,
    read_value,
    reply_error,
    values_in,
)
from gspo_proto.rollout_pb2 import Rollout, Score, ScorePart

TEXTS = st.text(st.characters(), max_size=8)  # halves of surrogate pairs too
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
FINITE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
JSONS = st.recursive(FINITE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))
ANY = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3))
NAMES = st.sampled_from(
    ["id", "values", "values_json", "signature", "error", "threads_left", "kind", "type", "text", "parts", "line"]
)
REPLIES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5))


def use(reply: Reply) -> None:
    """All that the service does with a reply, up to the messages that leave it."""
    questions: list[dict[str, Any]] = [{"arguments": {}}, {"function": "step"}]
    for question in questions:
        try:
            values = values_in(reply, question)
        except CallError:
            continue
        json.dumps(values, allow_nan=True, default=str)
        for convention in ("trl", "verl"):
            for value in values if isinstance(values, list) else []:
                check_value(read_value(value, convention))
    if reply.error is not None:
        failure = reply_error(reply.error, reply.output)
        Score(failure=str(failure), failure_kind=failure.kind)


def check_value(value: Any) -> None:
    if isinstance(value, Failure):
        Score(failure=value.reason, failure_kind=value.kind)
    else:
        Score(reward=value.reward, parts=[ScorePart(name=name, value=part) for name, part in value.parts.items()])


@given(st.binary(max_size=64))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x81\xa2id\xa3\xed\xa0\x80")
@example(b"\x91" * 5000)
def test_any_bytes_are_a_reply_or_no_frame(body: bytes) -> None:
    for kind in (0, 1, 2):
        head = bytes([kind]) + len(body).to_bytes(HEAD_BYTES - 1, "big")
        try:
            use(read_reply(head, body))
        except FrameError:
            continue


@given(REPLIES | st.dictionaries(NAMES, ANY, max_size=4))
@example({"id": "a", "error": {"kind": {}}})
@example({"id": "a", "values": [{"error": {"kind": []}}, {"parts": {(): 1.0}}, {"type": [[]]}, 10**400]})
@example({"id": "a", "values": [{"parts": {"a": 1e308, "b": 1e308}}]})
@example({"id": "a", "values_json": '[{}, "\\ud800", 1, false]'})
@example({"id": "a", "values_json": "[1e999]"})
@example({"id": "a", "values_json": "[" * 10**5})
def test_any_value_is_a_reply_that_can_be_used_or_no_frame(value: Any) -> None:
    try:
        sent = frame(value)
    except (TypeError, ValueError, RecursionError):
        return
    try:
        use(read_reply(sent[:HEAD_BYTES], sent[HEAD_BYTES:]))
    except FrameError:
        return


@pytest.mark.parametrize("value", [[], {}, [[]], "\ud800"])
def test_values_without_end_are_not_read(value: Any) -> None:
    sent = frame({"id": "a", "values": [value] * MAX_VALUES_BYTES})
    with pytest.raises(TooLargeError):
        read_reply(sent[:HEAD_BYTES], sent[HEAD_BYTES:])


def test_unknown_fields_of_a_reply_make_no_objects() -> None:
    members = {
        "id": "a",
        "more": [[]] * 2**20,
        "error": {"kind": "exception", "type": "T", "text": "t", "more": [[]] * 2**20},
    }
    sent = frame(members)
    assert read_reply(sent[:HEAD_BYTES], sent[HEAD_BYTES:]).id == "a"


def test_the_longest_failures_of_a_batch_are_read() -> None:
    error = {"kind": "exception", "type": "T" * 100, "text": "t" * 2000, "place": "p" * 300, "traceback": "b" * 4000}
    sent = frame({"id": "a", "values": [{"error": error}] * 64})
    assert len(read_reply(sent[:HEAD_BYTES], sent[HEAD_BYTES:]).values or ()) == 64


def test_json_of_more_members_than_are_read_is_refused() -> None:
    assert len(plain_json("[" + "1," * (MAX_JSON_MEMBERS - 2) + "1]")) == MAX_JSON_MEMBERS - 1
    with pytest.raises(ValueError, match="more than 100000"):
        plain_json("[" + "1," * MAX_JSON_MEMBERS + "1]")


@given(st.dictionaries(TEXTS, JSONS, max_size=3))
def test_a_question_arrives_as_it_was_sent(question: dict[str, Any]) -> None:
    sent = frame(question)
    assert body_size(sent) == len(sent) - HEAD_BYTES
    assert read(sent[:HEAD_BYTES], sent[HEAD_BYTES:]) == question


@pytest.mark.parametrize(
    "change",
    [
        {"entry": 5},
        {"entry": "x" * 101},
        {"entry": "\x1b[31m"},
        {"convention": "nosuch"},
        {"convention": ["trl"]},
        {"takes": "abc"},
        {"takes": ["a"] * 101},
        {"takes": ["a b"]},
        {"required": [1]},
        {"takes_any": 1},
    ],
)
def test_a_signature_is_of_the_known_form(change: dict[str, Any]) -> None:
    good = {"entry": "r", "convention": "trl", "takes": ["completions"], "required": [], "takes_any": True}
    assert msgspec.convert(good, Signature).entry == "r"
    sent = frame({"id": "a", "signature": good | change})
    with pytest.raises(FrameError):
        read_reply(sent[:HEAD_BYTES], sent[HEAD_BYTES:])


class ScriptedCallee:
    """A callee that returns scripted values."""

    signature = Signature("reward", "trl", frozenset({"completions"}), (), takes_any=False)

    def __init__(self, values: Any) -> None:
        self.values = values

    async def call(self, question: Any, *, session: str | None = "") -> Answer:
        return Answer(self.values)


@pytest.mark.parametrize(
    "values",
    [[{}, "x", 10**400, False], [{}, "x", 1e308 * 10, False], [{}, {}, 1.0, False], [{}, "x", 1.0, None], [], None, 5],
)
def test_a_step_of_other_values_fails_by_name(values: Any) -> None:
    function = Function(Code("game", "", "0" * 64, "game.py"), ScriptedCallee(values))  # type: ignore[arg-type]
    with pytest.raises(CallError) as failed:
        asyncio.run(EnvironmentSteps(None, session=None).step(function, "{}", "a"))
    assert failed.value.kind == "invalid_return"
    with pytest.raises(CallError):
        asyncio.run(function.score([Rollout()] * 3, session=None))
