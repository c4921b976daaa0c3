"""The state machine of one rollout: each action, each end, each save. No engine, no environment."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.common.streams.entries import saved_state, tokens_between
from gspo.generation.engine.api import Completion, Finish, Tokens
from gspo.generation.rollout.in_flight import Action, InFlightRollout, PlainAction, SampleAction, num_failed_deliveries
from gspo_proto import rollout_pb2
from gspo_proto.rollout_pb2 import GroupTask, Play, Prompt, Rollout, RolloutState, Sampling

TASK = GroupTask(group=7, prompt=Prompt(token_ids=[1, 2]), sampling=Sampling(max_tokens=10))
VERSION, NO_TOKENS = 1, Tokens([], [], [])


def in_flight(saved: bytes | None = None, task: GroupTask = TASK) -> InFlightRollout:
    return InFlightRollout(task, 3, "generation-0", saved)


def conversation(max_tokens: int = 10, **play: Any) -> InFlightRollout:
    """A rollout in an environment, whose episode has begun."""
    task = GroupTask(group=7, sampling=Sampling(max_tokens=max_tokens), environment="game", play=Play(**play))
    rollout = in_flight(task=task)
    rollout.on_reset("v1", "0")
    return rollout


def piece(ids: list[int], finish: Finish = "length", version: int = VERSION) -> Completion:
    return Completion(ids, [-0.5 * token for token in ids], [version] * len(ids), finish)


def cut_piece(ids: list[int], version: int = VERSION) -> Completion:
    """Each token from a set of itself and some of the next ones; every third one of unknown ones."""
    sets = [[token + place for place in range(token % 3)] for token in ids]
    kept_ids = [token for kept in sets for token in kept]
    return replace(piece(ids, version=version), kept_sizes=list(map(len, sets)), kept_ids=kept_ids)


def action(rollout: InFlightRollout, segment_tokens: int | None = None, *, after_s: float = 0.0) -> Action:
    return rollout.next_action(VERSION, segment_tokens, rollout.state.started_unix_s + after_s)


def outcome(rollout: InFlightRollout) -> str:
    return rollout_pb2.Outcome.Name(rollout.state.outcome).removeprefix("OUTCOME_")


@pytest.mark.parametrize(("finish", "expected"), [("stop", "EOS"), ("stop_string", "STOP_STRING")])
def test_a_rollout_samples_until_the_policy_ends_it(finish: Finish, expected: str) -> None:
    rollout = in_flight()
    assert action(rollout) == SampleAction(10)
    rollout.on_sampled(piece([10, 11, 12]))
    assert action(rollout) == SampleAction(7)
    rollout.on_sampled(piece([13], finish))
    assert (action(rollout), outcome(rollout)) == (PlainAction.FINISH, expected)


def test_a_rollout_of_all_its_tokens_is_truncated() -> None:
    rollout = in_flight()
    rollout.on_sampled(piece(list(range(10))))
    assert (action(rollout), outcome(rollout)) == (PlainAction.FINISH, "TRUNCATED")


def test_a_segment_counts_the_tokens_of_one_version_from_its_beginning() -> None:
    rollout = in_flight()
    rollout.begin_segment()
    assert action(rollout, 4) == SampleAction(4)
    rollout.on_sampled(piece([10, 11, 12]))
    assert action(rollout, 4) == SampleAction(1)
    # A new version is a new step.
    assert rollout.next_action(2, 4, 0.0) == SampleAction(4)
    rollout.on_sampled(piece([13]))
    assert action(rollout, 4) == PlainAction.PAUSE
    rollout.begin_segment()
    assert action(rollout, 4) == SampleAction(4)
    assert action(rollout, 8) == SampleAction(6)


def test_a_rollout_saved_under_a_larger_limit_ends_without_another_token() -> None:
    longer = in_flight(task=GroupTask(group=7, sampling=Sampling(max_tokens=20)))
    longer.on_sampled(piece(list(range(12))))
    rollout = in_flight(longer.snapshot(NO_TOKENS, num_deliveries=1).SerializeToString())
    assert (action(rollout, 4), outcome(rollout)) == (PlainAction.FINISH, "TRUNCATED")


def test_the_environment_begins_answers_each_turn_and_ends_the_episode() -> None:
    rollout = in_flight(task=GroupTask(group=7, sampling=Sampling(max_tokens=20), environment="game"))
    assert action(rollout) == PlainAction.RESET
    rollout.on_reset("v1", '"s0"')
    rollout.on_opening(Prompt(token_ids=[5, 6]))
    assert (action(rollout), rollout.context) == (SampleAction(20), [5, 6])
    rollout.on_sampled(piece([10, 11], "stop"))
    assert action(rollout) == PlainAction.STEP
    rollout.on_turn_read("guess")
    rollout.on_step('"s1"', 0.25, 1)
    rollout.on_observation([90, 91, 92], [{"role": "user", "content": "higher"}])
    # Of the limit of 20 tokens the policy has used 2 and the observation 3.
    assert (action(rollout), rollout.context) == (SampleAction(15), [5, 6, 10, 11, 90, 91, 92])
    rollout.on_sampled(piece([12], "stop", version=2))
    rollout.on_turn_read("again")
    rollout.on_step('"s2"', 0.5, 0)
    rollout.on_environment_done([])
    message = rollout.finished("again", 99.0)
    assert (action(rollout), outcome(rollout)) == (PlainAction.FINISH, "ENVIRONMENT_DONE")
    assert message.mask == b"\x01\x01\x00\x00\x00\x01"
    assert list(message.logp) == [-5.0, -5.5, 0.0, 0.0, 0.0, -6.0]
    assert list(message.version) == [1, 1, -1, -1, -1, 2]
    assert (message.num_turns, message.text, message.state_json, message.episode.reward) == (2, "again", '"s2"', 0.75)


def test_a_malformed_call_is_answered_without_the_environment() -> None:
    rollout = conversation()
    rollout.on_sampled(piece([10], "stop"))
    rollout.on_malformed_call("<tool_call>")
    rollout.on_observation([90], [{"role": "tool", "content": "error"}])
    assert (action(rollout), rollout.state.episode.num_malformed) == (SampleAction(8), 1)


def test_a_turn_of_all_its_tokens_is_cut_and_answered() -> None:
    rollout = conversation(turn_tokens=3)
    assert action(rollout) == SampleAction(3)
    rollout.on_sampled(piece([10, 11]))
    assert action(rollout) == SampleAction(1)
    rollout.on_sampled(piece([12]))
    assert (action(rollout), rollout.state.episode.num_cut_turns) == (PlainAction.STEP, 1)


@pytest.mark.parametrize(
    ("play", "sampled", "expected"),
    [
        ({"turn_tokens": 3, "end_long_turns": True}, piece([10, 11, 12]), "TURN_TOKEN_LIMIT"),
        ({}, piece(list(range(10))), "TRUNCATED"),
        ({"total_timeout_s": 5.0}, piece([10], "aborted"), "TIME_LIMIT"),
    ],
)
def test_each_limit_within_a_turn_ends_the_conversation(play: Any, sampled: Completion, expected: str) -> None:
    rollout = conversation(**play)
    rollout.on_sampled(sampled)
    assert (action(rollout), outcome(rollout)) == (PlainAction.FINISH, expected)
    # The environment has not seen this turn, but the conversation has it.
    assert '"cut off"' in rollout.finished("cut off", 9.0).episode.turns_json


@pytest.mark.parametrize(
    ("play", "num_observed", "expected"), [({"max_turns": 1}, 1, "TURN_LIMIT"), ({}, 9, "TRUNCATED")]
)
def test_an_observation_beyond_a_limit_ends_the_conversation(play: Any, num_observed: int, expected: str) -> None:
    rollout = conversation(**play)
    rollout.on_sampled(piece([10], "stop"))
    rollout.on_observation([90] * num_observed, [{"role": "user", "content": "higher"}])
    assert (action(rollout), outcome(rollout)) == (PlainAction.FINISH, expected)
    assert list(rollout.state.token_ids) == [10]
    assert "higher" in rollout.state.episode.turns_json


def test_the_time_limit_runs_from_the_start_and_only_in_conversations() -> None:
    rollout = conversation(total_timeout_s=5.0)
    assert action(rollout, after_s=2.0) == SampleAction(10, 3.0)
    assert (action(rollout, after_s=5.0), outcome(rollout)) == (PlainAction.FINISH, "TIME_LIMIT")
    assert in_flight(task=GroupTask(play=Play(total_timeout_s=5.0))).seconds_left(1e12) == math.inf


@pytest.mark.parametrize(("kind", "expected"), [("timeout", "STEP_TIME_LIMIT"), ("crash", "ENVIRONMENT_FAILED")])
def test_a_failed_environment_ends_the_conversation_with_the_kind(kind: str, expected: str) -> None:
    rollout = conversation()
    rollout.on_environment_failed(kind, "why")
    assert (action(rollout), outcome(rollout)) == (PlainAction.FINISH, expected)
    assert (rollout.state.episode.failure_kind, rollout.state.episode.failure) == (kind, "why")


def test_a_saved_rollout_continues_with_its_log_probs_and_versions() -> None:
    rollout = in_flight()
    rollout.on_sampled(piece([10, 11], version=4))
    saved = rollout.snapshot(piece([12], version=5), num_deliveries=2)
    # The running request reports its tokens itself when it ends, so they are not appended here.
    assert list(rollout.state.token_ids) == [10, 11]

    resumed = in_flight(saved.SerializeToString())
    assert resumed.context == [1, 2, 10, 11, 12]
    resumed.on_sampled(piece([13], version=6))
    state = resumed.state
    assert list(state.logp) == [-5.0, -5.5, -6.0, -6.5]
    assert list(state.version) == [4, 4, 5, 6]
    assert (state.mask, state.delivery) == (b"\x01" * 4, 2)
    assert state.started_unix_s == rollout.state.started_unix_s
    assert resumed.tokens_left == 6
    assert [resumed.is_outdated(version) for version in (4, 5)] == [False, True]


def test_a_restart_keeps_the_id_and_the_start_and_nothing_else() -> None:
    rollout = conversation()
    started = rollout.state.started_unix_s
    rollout.on_sampled(piece([10, 11], "stop"))
    rollout.on_observation([90], [])
    # The observation's token is of no version.
    assert rollout.restart() == 2
    assert rollout.state == RolloutState(schema=1, started_unix_s=started, num_turns=1, generator="generation-0")
    assert (rollout.rollout_key, rollout.is_outdated(99), action(rollout)) == ("7-3", False, PlainAction.RESET)


def test_a_finished_rollout_is_never_outdated() -> None:
    rollout = in_flight()
    rollout.on_sampled(piece([10], "stop"))
    assert not rollout.is_outdated(VERSION + 1)


class Saved:
    """The saved state of a rollout, as Redis has it."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.num_bytes = 0

    def write(self, part: bytes, place: int) -> None:
        assert place in (0, len(self.parts))
        self.parts = [*self.parts[:place], part]
        self.num_bytes += len(part)

    def read(self) -> bytes:
        return b"".join(self.parts)


def next_save(rollout: InFlightRollout, running: Tokens) -> tuple[bytes, int]:
    """The save while a request has sampled these tokens."""
    return rollout.next_save(len(running.token_ids), lambda first: Tokens(**tokens_between(running, first)), 1)


def test_saves_of_a_growing_answer_write_each_token_once() -> None:
    rollout, saved = in_flight(task=GroupTask(group=7, sampling=Sampling(max_tokens=40_000))), Saved()
    for turn in range(4):
        for num_running in range(0, 8000, 250):
            saved.write(*next_save(rollout, piece([100_000 + turn] * num_running, version=turn)))
        rollout.on_sampled(piece([100_000 + turn] * 8000, version=turn))
    saved.write(*next_save(rollout, NO_TOKENS))
    whole = rollout.snapshot(NO_TOKENS, 1).SerializeToString()
    assert saved_state(saved.read()) == saved_state(whole)
    assert saved.num_bytes < 1.1 * len(whole)


def test_the_sets_that_tokens_were_sampled_from_follow_them_through_saves_and_turns() -> None:
    sampling = Sampling(max_tokens=100, top_k=2, keep_sets=True)
    task = GroupTask(group=7, sampling=sampling, environment="game", play=Play())
    rollout, saved = in_flight(task=task), Saved()
    rollout.on_reset("v1", "0")
    for num in (2, 5, 6):
        saved.write(*next_save(rollout, cut_piece([10, 11, 12, 13, 14, 15][:num])))
    assert len(saved.parts) == 3
    taken_over = in_flight(saved.read(), task)
    taken_over.on_sampled(cut_piece([16, 17]))
    taken_over.on_observation([90, 91, 92], [])
    taken_over.on_sampled(cut_piece([18, 19, 20]))
    finished = taken_over.finished("", 0.0)
    whole = cut_piece([10, 11, 12, 13, 14, 15, 16, 17]), cut_piece([18, 19, 20])
    assert list(finished.kept_sizes) == [*whole[0].kept_sizes, 0, 0, 0, *whole[1].kept_sizes]
    assert list(finished.kept_ids) == [*whole[0].kept_ids, *whole[1].kept_ids]
    assert len(finished.kept_sizes) == len(finished.token_ids)


def test_a_rollout_that_begins_anew_is_saved_whole() -> None:
    rollout, saved = in_flight(), Saved()
    for num in (2, 3):
        saved.write(*next_save(rollout, piece([10, 11, 12][:num])))
    assert len(saved.parts) == 2
    rollout.restart()
    saved.write(*next_save(rollout, piece([20])))
    assert [len(saved.parts), list(RolloutState.FromString(saved.read()).token_ids)] == [1, [20]]
    saved.write(*next_save(rollout, piece([20, 21])))
    assert (len(saved.parts), in_flight(saved.read()).context) == (2, [1, 2, 20, 21])


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(0, 4), st.integers(0, 3)), max_size=12),
    max_tokens=st.integers(1, 30),
    turn_tokens=st.integers(0, 8),
    max_turns=st.integers(0, 4),
    segment_tokens=st.none() | st.integers(1, 7),
    saves=st.sets(st.integers(0, 40)),
    kills=st.sets(st.integers(0, 40)),
)
def test_any_course_ends_within_its_limits_and_is_the_same_from_any_save(
    pieces: list[tuple[int, bool, int, int]],
    max_tokens: int,
    turn_tokens: int,
    max_turns: int,
    segment_tokens: int | None,
    saves: set[int],
    kills: set[int],
) -> None:
    """`pieces`: tokens that the engine gives, whether it stops there, tokens of the observation, version.

    At a tick of `saves` the rollout is saved, and at one of `kills` another generator takes it over too.
    """
    play = Play(turn_tokens=turn_tokens, max_turns=max_turns)
    task = GroupTask(group=7, sampling=Sampling(max_tokens=max_tokens), environment="game", play=play)

    def run(saves: set[int], kills: set[int]) -> Rollout:
        rollout, script, saved = in_flight(task=task), iter(pieces), Saved()
        rollout.begin_segment()
        version = num_observed = num_sampled = 0
        for tick in range(200):
            if tick in saves | kills:
                saved.write(*next_save(rollout, NO_TOKENS))
            if tick in kills:
                segment_start = rollout._segment_start
                rollout = in_flight(saved.read(), task)
                rollout._segment_start = segment_start
            match rollout.next_action(version, segment_tokens, 0.0):
                case PlainAction.RESET:
                    rollout.on_reset("v1", "0")
                case SampleAction(most):
                    assert 1 <= most <= min(rollout.tokens_left, rollout.turn_tokens_left, segment_tokens or most)
                    num, stops, num_observed, version = next(script, (most, True, 1, version))
                    num_sampled += min(num, most)
                    ids = [100 + version] * min(num, most)
                    rollout.on_sampled(piece(ids, "stop" if stops else "length", version))
                case PlainAction.STEP:
                    rollout.on_turn_read("turn")
                    if max_turns or num_observed:
                        rollout.on_step(str(rollout.state.num_turns), 0.5, 0)
                        rollout.on_observation([90] * num_observed, [{"role": "user", "content": "next"}])
                    else:
                        rollout.on_environment_done([])
                case PlainAction.PAUSE:
                    rollout.begin_segment()
                case PlainAction.FINISH:
                    state = rollout.state
                    assert len(state.token_ids) <= max_tokens
                    assert state.mask.count(1) == num_sampled
                    assert not max_turns or state.num_turns <= max_turns
                    for token, counts, logp, of in zip(
                        state.token_ids, state.mask, state.logp, state.version, strict=True
                    ):
                        expected = (100 + of, -0.5 * token) if counts else (90, 0.0)
                        assert (token, logp) == expected
                        assert (of >= 0) == bool(counts)
                    return rollout.finished("turn", 1.0)
        pytest.fail("the rollout did not end")

    straight, saved = run(set(), set()), run(saves, kills)
    straight.started_unix_s = saved.started_unix_s = 0.0
    assert saved == straight


def test_a_holder_that_saved_something_does_not_count_as_one_that_failed() -> None:
    fresh, second = in_flight(), in_flight(in_flight().snapshot(piece([10]), num_deliveries=2).SerializeToString())
    assert num_failed_deliveries(4, [fresh]) == 4
    assert num_failed_deliveries(4, [fresh, second]) == 2
    paused = in_flight(second.snapshot(NO_TOKENS, num_deliveries=0).SerializeToString())
    assert num_failed_deliveries(1, [paused]) == 1
