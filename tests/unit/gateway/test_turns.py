"""Turns of an agent's rollout: any order of requests, retries and cancelled answers gives each sampled token once."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.gateway.sessions.agent_rollout import NO_TURN, TOO_LONG, agent_rollout
from gspo.gateway.sessions.session_store import Session
from gspo.gateway.sessions.turns import Conversation, message_digest, prefix_digests, stored_message
from gspo_proto import rollout_pb2
from gspo_proto.agent_pb2 import AgentResult, TurnBegin, TurnEnd, TurnEntry, TurnTokens
from gspo_proto.rollout_pb2 import GroupTask, Prompt, Rollout, Sampling

TASK = GroupTask(
    group=7,
    num_rollouts=2,
    prompt=Prompt(token_ids=[1], text="p"),
    sampling=Sampling(temperature=0.5, top_k=3, keep_sets=True),
)
SESSION = Session("7-1.secret", TASK, 1, 1, 0.0)


def begin(turn: str, continues: str, context: list[int], **more: Any) -> TurnEntry:
    more = {"messages_json": "[]"} | more
    return TurnEntry(turn=turn, begin=TurnBegin(continues=continues, context=context, **more))


def tokens(turn: str, *token_ids: int) -> TurnEntry:
    what = TurnTokens(token_ids=token_ids, logp=[-token / 1e4 for token in token_ids], version=[3] * len(token_ids))
    for token in token_ids:
        what.kept_sizes.append(len(kept(token)))
        what.kept_ids.extend(kept(token))
    return TurnEntry(turn=turn, tokens=what)


def kept(token: int) -> list[int]:
    """The tokens that one was sampled from; none where they were too many."""
    return [token + place for place in range(token % 3)]


def end(turn: str, finish: str = "stop", **more: Any) -> TurnEntry:
    return TurnEntry(turn=turn, end=TurnEnd(finish=finish, **{"message_json": '{"content": "a"}'} | more))


def played(*entries: TurnEntry, **result: Any) -> Rollout:
    return agent_rollout(SESSION, Conversation(entries), AgentResult(**{"reward": 0.5} | result), "worker", 10_000)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[TurnEntry], dict[str, list[int]], set[str]]:
    """Entries of requests that run side by side, the line of tokens of each, and the names of the finished ones."""
    numbers, lines = itertools.count(1), dict[str, list[int]]()
    waiting: dict[str, list[TurnEntry]] = {}
    before: dict[str, str] = {}
    finished: set[str] = set()
    for name in [f"t{number}" for number in range(draw(st.integers(1, 8)))]:
        before[name] = draw(st.sampled_from(["", *sorted(finished)]))
        context, *sampled = ([next(numbers) for _ in range(draw(st.integers(1, 3)))] for _ in range(3))
        lines[name] = [*lines.get(before[name], []), *context, *sampled[0], *sampled[1]]
        waiting[name] = [begin(name, before[name], context), *(tokens(name, *piece) for piece in sampled)]
        if draw(st.integers(0, 4)):  # one of five is cancelled
            waiting[name].append(end(name))
            finished.add(name)
    entries: list[TurnEntry] = []
    while any(waiting.values()):
        ready = [name for name, own in waiting.items() if own and not waiting.get(before[name])]
        entries.append(waiting[draw(st.sampled_from(ready))].pop(0))
    return entries, lines, finished


@given(requests())
def test_each_sampled_token_of_a_finished_turn_is_trained_once_behind_its_own_line(
    drawn: tuple[list[TurnEntry], dict[str, list[int]], set[str]],
) -> None:
    entries, lines, finished = drawn
    rollout = played(*entries)
    sampled = {
        token: lines[entry.turn][: lines[entry.turn].index(token)]
        for entry in entries
        if entry.turn in finished
        for token in entry.tokens.token_ids
    }
    if not finished:
        assert rollout.episode.failure_kind == NO_TURN
        assert not rollout.token_ids
        return
    trained = [token for token, counts in zip(rollout.token_ids, rollout.mask, strict=True) if counts]
    assert Counter(trained) == Counter(list(sampled))
    bounds = [0, *rollout.branch_starts, len(rollout.token_ids)]
    ids, sets = iter(rollout.kept_ids), list[list[int]]()
    for size in rollout.kept_sizes:
        sets.append([next(ids) for _ in range(size)])
    assert (len(sets), list(ids)) == (len(rollout.token_ids), [])
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        line = [*([] if number else rollout.prompt.token_ids), *rollout.token_ids[first:last]]
        assert rollout.mask[first] == (number == 0)
        for place in range(first, last):
            if rollout.mask[place]:
                token = rollout.token_ids[place]
                assert line[: line.index(token)] == sampled[token]
                assert rollout.logp[place] == pytest.approx(-token / 1e4)
                assert (rollout.version[place], sets[place]) == (3, kept(token))
            else:
                assert (rollout.logp[place], rollout.version[place], sets[place]) == (0.0, -1, [])


def test_the_first_branch_is_the_conversation_that_reward_functions_see() -> None:
    first, results = {"role": "assistant", "content": "one"}, [{"role": "tool", "content": "2"}]
    second = {"role": "assistant", "content": "two"}
    entries = [
        TurnEntry(turn="a", begin=TurnBegin(context=[1, 2], messages_json='[{"role": "user", "content": "q"}]')),
        tokens("a", 3),
        TurnEntry(turn="a", end=TurnEnd(finish="stop", message_json=json.dumps(first))),
        TurnEntry(turn="b", begin=TurnBegin(continues="a", context=[4], messages_json=json.dumps(results))),
        tokens("b", 5),
        TurnEntry(turn="b", end=TurnEnd(finish="length", message_json=json.dumps(second))),
    ]
    rollout = played(*entries)
    assert json.loads(rollout.episode.turns_json) == [first, *results, second]
    assert json.loads(rollout.prompt.messages_json) == [{"role": "user", "content": "q"}]
    assert list(rollout.prompt.token_ids) == [1, 2]
    assert (rollout.text, rollout.num_turns) == ("two", 2)
    assert rollout.outcome == rollout_pb2.OUTCOME_TRUNCATED
    assert bytes(rollout.mask) == b"\x01\x00\x01"


def test_the_first_branch_is_that_of_the_last_request() -> None:
    """A coding agent asks for a title first, and for a summary or a sub-agent's work between."""
    title, work, more = [begin("t", "", [1]), tokens("t", 2), end("t")], [begin("w", "", [3]), tokens("w", 4)], [5]
    rollout = played(*work, *title, end("w"), begin("m", "w", more), tokens("m", 6), end("m"))
    assert list(rollout.prompt.token_ids) == [3]
    assert list(rollout.token_ids) == [4, 5, 6, 1, 2]
    assert list(rollout.branch_starts) == [3]


def test_a_rollout_of_too_many_tokens_has_a_failure_in_their_place() -> None:
    turns = Conversation(
        [begin("a", "", [1, 2]), tokens("a", 3), end("a"), begin("b", "", [4]), tokens("b", 5), end("b")]
    )
    assert len(agent_rollout(SESSION, turns, AgentResult(reward=1.0), "worker", 5).token_ids) == 4
    rollout = agent_rollout(SESSION, turns, AgentResult(reward=1.0), "worker", 4)
    assert rollout.episode.failure_kind == TOO_LONG
    assert not (rollout.token_ids or rollout.mask or rollout.branch_starts)


def test_a_failure_has_its_kind_and_no_reward() -> None:
    rollout = played(begin("a", "", [1]), tokens("a", 2), end("a"), failure="no disk", failure_kind="crash")
    assert (rollout.episode.failure_kind, rollout.episode.failure) == ("crash", "no disk")
    assert rollout.outcome == rollout_pb2.OUTCOME_ENVIRONMENT_FAILED


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}


@pytest.mark.parametrize(
    ("message", "other"),
    [
        ({"content": "x"}, {"content": " x\n"}),
        ({"content": "x"}, {"content": [{"type": "text", "text": "x"}]}),
        ({"content": None, "tool_calls": [CALL]}, {"tool_calls": [{**CALL, "id": "call-1"}]}),
        (
            {"tool_calls": [CALL]},
            {"tool_calls": [{"function": {"name": "add", "arguments": {"b": [2], "a": 1}}}]},
        ),
        ({"content": "x", "reasoning_content": "hm"}, {"content": "x"}),
    ],
)
def test_clients_send_one_message_in_several_forms(message: dict[str, Any], other: dict[str, Any]) -> None:
    assert message_digest({"role": "assistant", **message}) == message_digest({"role": "assistant", **other})


@pytest.mark.parametrize(
    "other",
    [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "assistant", "content": "x", "tool_calls": [CALL]},
    ],
)
def test_other_messages_are_other_messages(other: dict[str, Any]) -> None:
    assert message_digest({"role": "assistant", "content": "x"}) != message_digest(other)


def test_a_request_continues_the_longest_turn_whose_messages_it_repeats() -> None:
    user, answer, more = (
        {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("user", "m"))
    )
    template: dict[str, Any] = {"tools": None}
    replies: dict[str, Any] = {"replies": [message_digest(answer)], "shown": ["a"]}
    first = prefix_digests([user], template)[-1]
    second = prefix_digests([user, answer, more], template)[-1]
    turns = Conversation(
        [
            begin("a", "", [1], asked=first),
            tokens("a", 2),
            end("a", **replies),
            begin("b", "a", [3], asked=second),
            tokens("b", 4),
            end("b", **replies),
        ]
    )

    def continued(messages: list[dict[str, Any]], shown: str = "q a m", **keys: Any) -> tuple[str, int] | None:
        place = turns.continued(messages, prefix_digests(messages, template | keys), shown)
        return (place[0].name, place[1]) if place else None

    assert continued([user, answer, more]) == ("a", 1)
    assert continued([user, answer, more, answer, more]) == ("b", 3)
    assert continued([user]) is None
    assert continued([user, {"role": "assistant", "content": "other"}, more]) is None
    assert continued([{"role": "user", "content": "other"}, answer, more]) is None
    assert continued([user, answer, more], tools=["x"]) is None, "the tools are in the prompt"
    assert continued([user, answer, more], shown="q m") is None, "the template hides the answer"


def test_of_turns_that_differ_in_white_space_a_request_continues_the_one_with_its_own_text() -> None:
    user, more = {"role": "user", "content": "q"}, {"role": "user", "content": "m"}
    answers = {name: {"role": "assistant", "content": text} for name, text in (("a", " "), ("b", ""), ("c", "\n"))}
    entries: list[TurnEntry] = []
    for name, answer in answers.items():
        asked = {"asked": prefix_digests([user], None)[-1], "messages_json": json.dumps([user])}
        reply: dict[str, Any] = {"replies": [message_digest(answer)], "message_json": json.dumps(answer)}
        later = {"asked": prefix_digests([user, answer, more], None)[-1], "messages_json": json.dumps([more])}
        entries += [begin(name, "", [1], **asked), end(name, **reply)]
        entries += [begin(f"{name}-later", name, [2], **later), end(f"{name}-later", **reply)]
    turns = Conversation(entries)

    def continued(*messages: dict[str, Any]) -> str:
        continued = turns.continued(messages, prefix_digests(messages, None), "")
        return continued[0].name if continued else ""

    for name, answer in answers.items():
        assert continued(user, answer, more) == name
        assert continued(user, answer, more, answer, more) == f"{name}-later"
    assert continued(user, {"role": "assistant", "content": "  "}, more) == "c"


def test_a_message_is_stored_with_the_fields_that_anybody_reads() -> None:
    """A client may send any others: they cost no token, and Redis would hold them."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}", "extra": 1}, "extra": 2}
    message: dict[str, Any] = {
        "role": "assistant",
        "content": [{"type": "text", "text": "hi", "extra": "A" * 99}, "no part"],
        "name": "bob",
        "tool_call_id": {"no": "text"},
        "tool_calls": [call],
        "reasoning": "because",
        "extra": "A" * 99,
    }
    assert stored_message(message) == {
        "role": "assistant",
        "content": [{"type": "text", "text": "hi"}],
        "name": "bob",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        "reasoning": "because",
    }
    assert message_digest(stored_message(message)) == message_digest(message | {"content": message["content"][:1]})
    assert stored_message({"role": "assistant", "content": None}) == {"role": "assistant", "content": None}


def test_a_rollout_beyond_the_bound_of_an_entry_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.gateway.sessions.agent_rollout.MAX_ENTRY_BYTES", 2000)
    chat = json.dumps([{"role": "user", "content": "x" * 3000}])
    rollout = played(begin("a", "", [1], messages_json=chat), tokens("a", 2), end("a"))
    assert rollout.episode.failure_kind == TOO_LONG and "an entry of a stream at most 2000" in rollout.episode.failure
    assert rollout.ByteSize() < 2000
