"""One rollout in flight, as a state machine: its tokens so far, and the action that comes next.

The machine asks no engine and no environment, writes to no stream, counts no metric, and gets the time as an argument.
`driver.py` carries out its actions and reports their results back by these methods:

SampleAction: on_sampled.
RESET: on_reset, then on_opening if the environment shows an observation.
STEP: on_malformed_call or on_step, then on_observation or on_environment_done.
PAUSE and FINISH: none, since the driver stops.

An environment that fails or is too slow is reported by on_environment_failed or on_time_over.

Between two actions the state is whole: a rollout that is saved then, on any generator, continues with the same action.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

from gspo.common.streams.entries import SAMPLED, SCHEMA, append_context, append_sampled, saved_state, tokens_between
from gspo.common.streams.keys import rollout_key
from gspo.common.streams.token_counts import RolloutTokens, num_sampled
from gspo.generation.engine.api import Completion, Finish, Tokens
from gspo_proto import rollout_pb2
from gspo_proto.rollout_pb2 import Episode, GroupTask, Prompt, Rollout, RolloutState

_OUTCOMES = {
    "stop": rollout_pb2.OUTCOME_EOS,
    "stop_string": rollout_pb2.OUTCOME_STOP_STRING,
    "length": rollout_pb2.OUTCOME_TRUNCATED,
}


@dataclass(frozen=True)
class SampleAction:
    """Sample at most `max_tokens` tokens after the context, within `timeout_s` seconds (infinity: no limit)."""

    max_tokens: int
    timeout_s: float = math.inf


class PlainAction(Enum):
    """The actions without arguments."""

    RESET = auto()  # begin the episode: ask the environment for its first state and observation
    STEP = auto()  # a turn of the policy has ended: ask the environment for its answer
    PAUSE = auto()  # the segment is used up: other tasks may take its place
    FINISH = auto()  # the outcome is known: write the rollout


Action: TypeAlias = SampleAction | PlainAction


class InFlightRollout:
    """A rollout that is not finished.

    Args:
        saved: The bytes of the RolloutState that an earlier generator saved. Its tokens keep their log-probs and
            versions.

    Attributes:
        state: The saved part of the rollout.
        request_id: The engine's request that samples for it now; empty while there is none.
        num_lost: Times that it began anew here, because its session on an environment's server was lost.
        num_sampled: Tokens that were sampled here, with those that were dropped since.
        num_kept: Sampled tokens in `state`.
        num_reported: `num_sampled` of the last write that Redis answered.
        num_saved: Tokens in the newest save.
        saved_s: Time of the newest save, by the monotonic clock.
        num_pieces: Pieces behind the whole state that this generator has saved; -1 before that.
    """

    def __init__(self, task: GroupTask, number: int, generator: str, saved: bytes | None = None) -> None:
        self.task, self.number = task, number
        self.rollout_key = rollout_key(task.group, number, task.evaluation)
        self.state = saved_state(saved) or _new_state(time.time())
        self.state.generator = generator
        self.request_id, self.num_lost = "", 0
        self.num_sampled = self.num_reported = 0
        self.num_kept = num_sampled(self.state.version)
        self.num_saved, self.saved_s = len(self.state.token_ids), time.monotonic()
        self.num_pieces, self._saved_head = -1, b""
        self._segment_start = 0

    @property
    def ended(self) -> bool:
        """Whether its outcome is known."""
        return self.state.outcome != rollout_pb2.OUTCOME_UNSPECIFIED

    @property
    def prompt(self) -> Prompt:
        """The task's prompt, or the prompt with the environment's first observation."""
        return self.state.prompt if self.state.HasField("prompt") else self.task.prompt

    @property
    def context(self) -> list[int]:
        """The prompt and every token after it: the engine samples behind them."""
        return [*self.prompt.token_ids, *self.state.token_ids]

    @property
    def policy_turn(self) -> list[int]:
        """The tokens of the policy's current turn."""
        return list(self.state.token_ids[self.state.turn_start :])

    @property
    def tokens_left(self) -> int:
        """Tokens until the answer is as long as it may be."""
        return max(0, self.task.sampling.max_tokens - len(self.state.token_ids))

    @property
    def turn_tokens_left(self) -> int:
        """Tokens until the policy's turn is as long as it may be."""
        longest = self.task.play.turn_tokens or self.task.sampling.max_tokens
        return max(0, longest - (len(self.state.token_ids) - self.state.turn_start))

    def seconds_left(self, now_unix_s: float) -> float:
        """Seconds of the conversation's time limit; infinity without a limit.

        The time also runs while the rollout waits for another generator.
        """
        limit_s = self.task.play.total_timeout_s if self.task.environment else 0.0
        return max(0.0, float(self.state.started_unix_s + limit_s - now_unix_s)) if limit_s else math.inf

    def is_outdated(self, version: int) -> bool:
        """Whether it is unfinished and has a token that weights older than `version` sampled."""
        return not self.ended and any(0 <= sampled_by < version for sampled_by in self.state.version)

    def begin_segment(self) -> None:
        """Begin a segment: its tokens count from here on."""
        self._segment_start = len(self.state.token_ids)

    def next_action(self, version: int, segment_tokens: int | None, now_unix_s: float) -> Action:
        """Decide what happens next. A limit that is reached is written into the state.

        Args:
            version: The policy version that the engine serves.
            segment_tokens: Tokens that `version` may sample in this segment; None for any number.
        """
        if self.ended:
            return PlainAction.FINISH
        if self.task.environment and not self.state.HasField("episode"):
            return PlainAction.RESET
        if self.task.environment and self.state.turn_ended:
            return PlainAction.STEP
        max_tokens = min(self.tokens_left, self.turn_tokens_left)
        if max_tokens and segment_tokens is not None:
            used = sum(sampled_by == version for sampled_by in self.state.version[self._segment_start :])
            max_tokens = min(max_tokens, segment_tokens - used)
            if max_tokens <= 0:
                return PlainAction.PAUSE
        timeout_s = self.seconds_left(now_unix_s)
        if not timeout_s:
            self.on_time_over()
        elif not max_tokens:  # it was saved under a larger limit
            self._end_piece("length", "")
        else:
            return SampleAction(max_tokens, timeout_s)
        return self.next_action(version, segment_tokens, now_unix_s)

    def on_sampled(self, piece: Completion) -> None:
        """Append the tokens that the policy sampled; `aborted` means that the conversation's time is over."""
        append_sampled(self.state, piece)
        self.num_kept += len(piece.token_ids)
        self._end_piece(piece.finish, piece.stop_string or "")

    def _end_piece(self, finish: Finish, stop_string: str) -> None:
        """The end of a sampled piece may end the rollout, the policy's turn, or neither."""
        state, is_cut = self.state, finish == "length"
        if is_cut and self.tokens_left and self.turn_tokens_left:
            return
        if not self.task.environment:
            state.outcome, state.stop = _OUTCOMES[finish], stop_string
        elif finish == "aborted":
            self.on_time_over()
        elif is_cut and not self.tokens_left:
            state.outcome = rollout_pb2.OUTCOME_TRUNCATED
        elif is_cut and self.task.play.end_long_turns:
            state.outcome = rollout_pb2.OUTCOME_TURN_TOKEN_LIMIT
        else:
            state.episode.num_cut_turns += is_cut
            state.turn_ended, state.stop = True, stop_string

    def on_time_over(self) -> None:
        """The conversation's time limit has passed."""
        self.state.outcome = rollout_pb2.OUTCOME_TIME_LIMIT

    def on_environment_failed(self, kind: str, text: str) -> None:
        """The environment gave no usable answer; `kind` is the bounded name of the reason."""
        self.state.episode.failure_kind, self.state.episode.failure = kind, text
        self.state.outcome = (
            rollout_pb2.OUTCOME_STEP_TIME_LIMIT if kind == "timeout" else rollout_pb2.OUTCOME_ENVIRONMENT_FAILED
        )

    def on_reset(self, environment_version: str, state_json: str, began_unix_s: float | None = None) -> None:
        """The environment has begun the episode; its time limit starts anew where it had to wait for a place."""
        self.state.started_unix_s = self.state.started_unix_s if began_unix_s is None else began_unix_s
        self.state.episode.CopyFrom(Episode(version=environment_version))
        self.state.state_json = state_json

    def on_resumed(self, state_json: str) -> None:
        """The environment continues the episode, maybe in another session."""
        self.state.state_json = state_json

    def on_opening(self, prompt: Prompt) -> None:
        """The environment's first observation has extended the prompt."""
        self.state.prompt.CopyFrom(prompt)

    def on_turn_read(self, text: str) -> None:
        """Write the text of the policy's last turn to the conversation."""
        self._add_messages([{"role": "assistant", "content": text}])

    def on_malformed_call(self, text: str) -> None:
        """The policy's turn, `text`, has a tool call that cannot be read: the environment is not asked."""
        self.state.episode.num_malformed += 1
        self.on_turn_read(text)

    def on_step(self, state_json: str, reward: float, num_tool_calls: int) -> None:
        """The environment has answered the turn."""
        self.state.state_json = state_json
        self.state.episode.reward += reward
        self.state.episode.num_tool_calls += num_tool_calls

    def on_environment_done(self, messages: Sequence[dict[str, Any]]) -> None:
        """The environment has ended the episode, with `messages` as its last words."""
        self._add_messages(messages)
        self.state.outcome = rollout_pb2.OUTCOME_ENVIRONMENT_DONE

    def on_observation(self, token_ids: Sequence[int], messages: Sequence[dict[str, Any]]) -> None:
        """Append what the policy sees next and begin its turn, unless a limit is reached.

        Args:
            token_ids: The observation's tokens.
            messages: The same observation as chat messages.
        """
        state = self.state
        self._add_messages(messages)
        if self.task.play.max_turns and state.num_turns >= self.task.play.max_turns:
            state.outcome = rollout_pb2.OUTCOME_TURN_LIMIT
            return
        if len(token_ids) >= self.tokens_left:
            state.outcome = rollout_pb2.OUTCOME_TRUNCATED
            return
        append_context(state, token_ids, keep_sets=self.task.sampling.keep_sets)
        state.turn_start, state.turn_ended = len(state.token_ids), False
        state.num_turns += 1

    def restart(self) -> int:
        """Drop every token and begin anew under the same id.

        Returns:
            The number of sampled tokens that were dropped.
        """
        num_dropped, self.num_kept = self.num_kept, 0
        generator = self.state.generator
        self.state = _new_state(self.state.started_unix_s)
        self.state.generator = generator
        self.num_saved = self._segment_start = 0
        self.num_pieces = -1
        return num_dropped

    def tokens(self, num_running: int = 0) -> RolloutTokens:
        """The counts for the token ledger.

        Args:
            num_running: Tokens of the running request.
        """
        return RolloutTokens(self.num_kept + num_running, self.num_sampled + num_running, self.num_reported)

    def snapshot(self, running: Tokens, num_deliveries: int) -> RolloutState:
        """The state with the tokens of the running request on top. The rollout itself does not change.

        Args:
            num_deliveries: How often the task had been handed out; 0 where this generator pauses it.
        """
        state = RolloutState()
        state.CopyFrom(self.state)
        state.delivery = num_deliveries
        append_sampled(state, running)
        return state

    def next_save(self, num_running: int, read: Callable[[int], Tokens], num_deliveries: int) -> tuple[bytes, int]:
        """The next save and its place: a piece of new tokens where nothing else has changed since the last one.

        The caller sets `num_pieces` to -1 if it was not saved.

        Args:
            num_running: Tokens of the running request.
            read: Reads them from a place on.
            num_deliveries: As of `snapshot`.

        Returns:
            The bytes of a piece and its place behind the whole state, from 1; or of a whole state, and 0.
        """
        num_kept, num_before = len(self.state.token_ids), self.num_saved
        self.num_saved, self.saved_s = num_kept + num_running, time.monotonic()
        head = self._without_tokens(num_deliveries)
        follows = self.num_pieces >= 0 and head == self._saved_head and num_before <= self.num_saved
        self.num_pieces, self._saved_head = self.num_pieces + 1 if follows else 0, head
        if not follows:
            return self.snapshot(read(0), num_deliveries).SerializeToString(), 0
        piece = RolloutState(**tokens_between(self.state, num_before))
        sampled = read(max(0, num_before - num_kept))
        for name in SAMPLED:
            getattr(piece, name).extend(getattr(sampled, name))
        return piece.SerializeToString(), self.num_pieces

    def _without_tokens(self, num_deliveries: int) -> bytes:
        """All of a snapshot but its tokens."""
        state = self.snapshot(Tokens([], [], []), num_deliveries)
        state.ClearField("mask")
        for name in SAMPLED:
            state.ClearField(name)
        return state.SerializeToString()

    def finished(self, last_turn_text: str, now_unix_s: float) -> Rollout:
        """The message for the stream `rollouts`.

        Args:
            last_turn_text: The text of `policy_turn`, without special tokens.
        """
        task, state = self.task, self.state
        return Rollout(
            schema=SCHEMA,
            group=task.group,
            number=self.number,
            attempt=task.attempt,
            num_rollouts=task.num_rollouts,
            prompt=self.prompt,
            token_ids=state.token_ids,
            logp=state.logp,
            version=state.version,
            mask=state.mask,
            kept_sizes=state.kept_sizes,
            kept_ids=state.kept_ids,
            text=self._end_conversation(last_turn_text) if task.environment else last_turn_text,
            outcome=state.outcome,
            stop=state.stop,
            rewards=task.rewards,
            environment=task.environment,
            state_json=state.state_json,
            num_turns=state.num_turns,
            generator=state.generator,
            evaluation=task.evaluation,
            issued_unix_s=task.issued_unix_s,
            started_unix_s=state.started_unix_s,
            finished_unix_s=now_unix_s,
            temperature=task.sampling.temperature,
            episode=state.episode if task.environment else None,
        )

    def _end_conversation(self, last_turn_text: str) -> str:
        """Write a turn that a limit cut off to the conversation; returns the text of the policy's last turn."""
        if not self.state.turn_ended and len(self.state.token_ids) > self.state.turn_start:
            self.on_turn_read(last_turn_text)
        texts = [message["content"] for message in self._messages() if message["role"] == "assistant"]
        return texts[-1] if texts else ""

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = json.loads(self.state.episode.turns_json or "[]")
        return messages

    def _add_messages(self, messages: Sequence[dict[str, Any]]) -> None:
        self.state.episode.turns_json = json.dumps([*self._messages(), *messages], ensure_ascii=False)


def num_failed_deliveries(num_deliveries: int, unfinished: Iterable[InFlightRollout]) -> int:
    """Times that a task was handed out since a generator last saved a part of it: one that did has not failed."""
    return num_deliveries - max((rollout.state.delivery for rollout in unfinished), default=0)


def _new_state(started_unix_s: float) -> RolloutState:
    return RolloutState(schema=SCHEMA, started_unix_s=started_unix_s, num_turns=1)
