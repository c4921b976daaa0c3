"""The environment's part of a rollout: its beginning, and what each turn of the policy leads to.

It samples nothing. A state is changed in one go after each answer, so that what is saved of a rollout is always before
or behind a step, and any generator goes on from it: steps are pure.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from gspo.common.streams.environment_task import task_json
from gspo.common.telemetry import metrics
from gspo.generation.rollout.chat_turns import ChatTurns, ObservationError, PlainTurns, as_messages
from gspo.generation.rollout.environment_client import EnvironmentClient
from gspo.generation.rollout.in_flight import InFlightRollout
from gspo_proto import rollout_pb2
from gspo_proto.reward_pb2 import EnvironmentReply, ResetRequest, StepRequest
from gspo_proto.rollout_pb2 import Episode, Play, RolloutState

if TYPE_CHECKING:
    from gspo.generation.rollout.tool_parser import ToolParser


class Episodes:
    """Begins episodes and answers turns.

    Args:
        environments: Where they are asked.
    """

    def __init__(self, environments: EnvironmentClient, tokenizer: PreTrainedTokenizerBase) -> None:
        self._environments, self._tokenizer = environments, tokenizer
        self._plain = PlainTurns(tokenizer)
        self._chats: dict[str, ChatTurns] = {}
        self._parsers: dict[tuple[str, str], ToolParser] = {}

    async def begin(self, rollout: InFlightRollout) -> None:
        """Reset the environment, and put what it says behind the prompt; ends the rollout where that fails."""
        task, play = rollout.task, rollout.task.play
        request = ResetRequest(environment=task.environment, version=play.version, task_json=task_json(task.prompt))
        reply = await self._in_time(rollout, self._environments.reset(request, play.step_timeout_s))
        if reply is None:
            return
        state = rollout.state
        state.episode.CopyFrom(Episode(version=reply.version))
        if _fails(state, reply):
            return
        state.state_json = reply.state_json
        observation = json.loads(reply.observation_json or '""')
        if not observation:
            return
        try:
            prompt = self._turns(rollout).opening(task.prompt, observation)
        except ObservationError as error:
            _fail(state, "invalid_return", f"reset: the observation {error}")
            return
        if play.prompt_length and len(prompt.token_ids) > play.prompt_length:
            said = f"with reset's observation the prompt has {len(prompt.token_ids)} tokens, and at most "
            _fail(state, "invalid_return", f"{said}{play.prompt_length} are allowed (algorithm.prompt_length)")
            return
        state.prompt.CopyFrom(prompt)

    async def respond(self, rollout: InFlightRollout) -> None:
        """What the turn that has ended leads to: an observation and a new turn, or the rollout's end."""
        state, play = rollout.state, rollout.task.play
        turn = list(state.token_ids[state.turn_start :])
        text = self._tokenizer.decode(turn, skip_special_tokens=True)
        calls, problem = self._calls(play, turn)
        if problem:
            malformed = f"error: the tool call {problem}"
            state.episode.num_malformed += 1
            metrics.TOOL_CALLS.labels("", "malformed").inc()
            _add_message(state, "assistant", text)
            self._continue(rollout, [{"role": "tool", "content": malformed}])
            return
        request = StepRequest(
            environment=rollout.task.environment,
            version=state.episode.version,
            state_json=state.state_json,
            action=text,
            calls_json=json.dumps(calls) if play.tools_json else "",
        )
        reply = await self._in_time(rollout, self._environments.step(request, play.step_timeout_s))
        _add_message(state, "assistant", text)
        if reply is None or _fails(state, reply):
            return
        for call in calls:
            metrics.TOOL_CALLS.labels(call["name"], "called").inc()
        state.episode.num_tool_calls += len(calls)
        state.state_json = reply.state_json
        state.episode.reward += reply.reward
        observation = json.loads(reply.observation_json or '""')
        if reply.done:
            _add_messages(state, as_messages(observation, "user") if observation else [])
            state.outcome = rollout_pb2.OUTCOME_ENVIRONMENT_DONE
            return
        self._continue(rollout, observation)

    async def _in_time(self, rollout: InFlightRollout, asked: Any) -> EnvironmentReply | None:
        """The reply; None where the rollout's time is over first, and its outcome says so."""
        try:
            left_s = seconds_left(rollout)
            async with asyncio.timeout(None if left_s == math.inf else left_s):
                reply: EnvironmentReply = await asked
                return reply
        except TimeoutError:
            rollout.state.outcome = rollout_pb2.OUTCOME_TIME_LIMIT
            return None

    def _continue(self, rollout: InFlightRollout, observation: Any) -> None:
        """Append what the policy sees next and begin its turn, unless a limit is reached."""
        state, play = rollout.state, rollout.task.play
        role = "tool" if play.tools_json else "user"
        try:
            last = state.token_ids[-1] if state.token_ids else None
            token_ids = self._turns(rollout).between(observation, role, last)
        except ObservationError as error:
            _fail(state, "invalid_return", f"step: the observation {error}")
            return
        _add_messages(state, as_messages(observation, role))
        if play.max_turns and state.num_turns >= play.max_turns:
            state.outcome = rollout_pb2.OUTCOME_TURN_LIMIT
        elif len(token_ids) >= rollout.tokens_left:
            state.outcome = rollout_pb2.OUTCOME_TRUNCATED
        else:
            rollout.begin_turn(token_ids)

    def _turns(self, rollout: InFlightRollout) -> ChatTurns | PlainTurns:
        task = rollout.task
        return self._chat(task.play.tools_json) if task.prompt.messages_json else self._plain

    def _chat(self, tools_json: str) -> ChatTurns:
        if tools_json not in self._chats:
            self._chats[tools_json] = ChatTurns(self._tokenizer, json.loads(tools_json or "[]"))
        return self._chats[tools_json]

    def _calls(self, play: Play, turn: Sequence[int]) -> tuple[list[dict[str, Any]], str]:
        """The calls in a turn, or what is wrong with them.

        The token that ended the turn is cut off; other special tokens stay: a call may be between two of them.
        """
        if not play.tools_json:
            return [], ""
        from gspo.generation.rollout.tool_parser import ToolParser  # here: only tools are worth vLLM's import

        key = (play.tool_format, play.tools_json)
        if key not in self._parsers:
            self._parsers[key] = ToolParser(self._tokenizer, play.tool_format, json.loads(play.tools_json))
        ended = bool(turn) and turn[-1] in self._tokenizer.all_special_ids
        found = self._parsers[key].read(self._tokenizer.decode(turn[:-1] if ended else turn))
        return found.calls, found.problem


def seconds_left(rollout: InFlightRollout) -> float:
    """Until the rollout's time is over; it runs on while another generator takes over. Infinity without a limit."""
    limit_s = rollout.task.play.total_timeout_s or math.inf
    return max(0.0, float(rollout.state.started_unix_s + limit_s - time.time()))


def end_conversation(state: RolloutState, last_turn: str) -> str:
    """Write a turn that a limit cut off behind the others; returns the policy's last one."""
    if not state.turn_ended and len(state.token_ids) > state.turn_start:
        _add_message(state, "assistant", last_turn)
    said = [turn["content"] for turn in json.loads(state.episode.turns_json or "[]") if turn["role"] == "assistant"]
    return said[-1] if said else ""


def _fails(state: RolloutState, reply: EnvironmentReply) -> bool:
    if reply.HasField("failure"):
        _fail(state, reply.failure.kind, reply.failure.text)
        return True
    return False


def _fail(state: RolloutState, kind: str, text: str) -> None:
    metrics.ENVIRONMENT_FAILURES.labels(kind).inc()
    state.episode.failure_kind, state.episode.failure = kind, text
    timed_out = kind == "timeout"
    state.outcome = rollout_pb2.OUTCOME_STEP_TIME_LIMIT if timed_out else rollout_pb2.OUTCOME_ENVIRONMENT_FAILED


def _add_message(state: RolloutState, role: str, content: str) -> None:
    _add_messages(state, [{"role": role, "content": content}])


def _add_messages(state: RolloutState, messages: list[dict[str, Any]]) -> None:
    turns = [*json.loads(state.episode.turns_json or "[]"), *messages]
    state.episode.turns_json = json.dumps(turns, ensure_ascii=False)
