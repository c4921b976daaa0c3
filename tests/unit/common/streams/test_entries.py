"""Bytes of every kind against the reader of entries: a message of this version, or one refusal that says why."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from gspo.common.errors import MalformedEntryError
from gspo.common.streams import entries
from gspo.common.streams.entries import entry_kinds, read_entry, saved_state, scored_entry
from gspo.common.streams.keys import Keys, consumer_groups
from gspo_proto.rollout_pb2 import (
    DeadLetter,
    GroupFailure,
    GroupTask,
    Prompt,
    Rollout,
    RolloutState,
    Score,
    Scored,
    ScoredRollout,
)

ROLLOUT = Rollout(schema=1, group=3, number=1, num_rollouts=4, token_ids=[5, 6], logp=[-1.0, -2.0], text="an answer")
ENTRIES: dict[type[Message], Message] = {
    GroupTask: GroupTask(schema=1, group=3, num_rollouts=4, prompt=Prompt(token_ids=[1, 2], text="1+1=")),
    Rollout: ROLLOUT,
    Scored: Scored(schema=1, rollout=ScoredRollout(rollout=ROLLOUT)),
}
KINDS = st.sampled_from(sorted(ENTRIES, key=lambda kind: kind.DESCRIPTOR.name))


def test_every_stream_of_work_has_its_kind() -> None:
    keys = Keys("test")
    assert set(entry_kinds(keys)) == set(consumer_groups(keys))


@given(text=st.text(max_size=300), tokens=st.integers(0, 20_000))
def test_a_scored_entry_is_the_rollout_with_its_score(text: str, tokens: int) -> None:
    rollout = Rollout(schema=1, group=3, num_rollouts=4, text=text, mask=b"\1" * tokens)
    score = Score(reward=0.5, scorer="reward-0")
    whole = Scored(schema=1, rollout=ScoredRollout(rollout=rollout, score=score))
    assert read_entry(Scored, scored_entry(rollout.SerializeToString(), score)) == whole


@pytest.mark.parametrize("kind", ENTRIES)
def test_an_entry_of_this_version_is_read(kind: type) -> None:
    assert read_entry(kind, ENTRIES[kind].SerializeToString()) == ENTRIES[kind]


@given(KINDS, st.binary(max_size=200))
def test_any_bytes_are_a_message_or_one_refusal(kind: type, payload: bytes) -> None:
    try:
        assert read_entry(kind, payload).schema == 1
    except MalformedEntryError as error:
        assert str(error)


@given(KINDS, st.data())
def test_an_entry_that_was_cut_off_or_changed_is_a_message_or_one_refusal(kind: type, data: st.DataObject) -> None:
    payload = bytearray(ENTRIES[kind].SerializeToString())
    for place in data.draw(st.lists(st.integers(0, len(payload) - 1), max_size=4)):
        payload[place] ^= data.draw(st.integers(1, 255))
    cut = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    try:
        read_entry(kind, cut)
    except MalformedEntryError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (GroupTask(schema=2, num_rollouts=1, prompt=Prompt(token_ids=[1])), "schema 2, and this version reads 1"),
        (GroupTask(schema=1, prompt=Prompt(token_ids=[1])), "no rollouts"),
        (GroupTask(schema=1, num_rollouts=1), "no prompt"),
        (Scored(schema=1), "neither a rollout nor a failure"),
        (Scored(failure=GroupFailure(group=1)), "schema 0"),
    ],
)
def test_the_refusal_says_what_is_wrong(message: GroupTask | Scored, problem: str) -> None:
    with pytest.raises(MalformedEntryError, match=problem):
        read_entry(type(message), message.SerializeToString())


def test_an_entry_over_the_limit_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "MAX_ENTRY_BYTES", 10)
    with pytest.raises(MalformedEntryError, match="at most 10"):
        read_entry(Rollout, ROLLOUT.SerializeToString())


def test_of_an_entry_over_the_limit_a_letter_holds_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "MAX_ENTRY_BYTES", 10)
    monkeypatch.setattr(entries, "_KEPT_BYTES", 4)
    written = [
        entries.make_letter("scored", payload, None, reason="", by="", num_deliveries=1)
        for payload in (b"0" * 10, b"0" * 11)
    ]
    assert [len(DeadLetter.FromString(letter).payload) for letter in written] == [10, 4]


@given(st.binary(max_size=100))
def test_a_saved_state_is_a_state_or_none(payload: bytes) -> None:
    whole = RolloutState(schema=1, token_ids=[5], logp=[-1.0], version=[0], mask=b"\x01")
    assert saved_state(whole.SerializeToString()) == whole
    whole.logp.append(-1.0)
    assert saved_state(whole.SerializeToString()) is None
    state = saved_state(payload)
    assert state is None or state.schema == 1
