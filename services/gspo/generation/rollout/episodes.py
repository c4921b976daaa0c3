"""The environment's part of a rollout: asks it for the episode's beginning and for the answer to each turn.

Each answer is reported to the rollout in one go, so that a save is always before or after a step. Steps are pure, so
any generator may continue from there; an environment on a server has the state itself, in a session that the generator
takes over. The policy's own tokens are never tokenised again.
"""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import structlog
from transformers import PreTrainedTokenizerBase

from gspo.common.streams.entries import task_json
from gspo.common.telemetry import metrics
from gspo.environments.environment import LOST_KINDS, Environment
from gspo.generation.rollout.chat_turns import ChatTurns, ObservationError, PlainTurns, as_messages
from gspo.generation.rollout.in_flight import InFlightRollout
from gspo_proto.reward_pb2 import EnvironmentReply, ResetRequest, StepRequest
from gspo_proto.rollout_pb2 import Play

if TYPE_CHECKING:
    from gspo.generation.rollout.tool_parser import ToolParser

log = structlog.get_logger()
_MOST_CHATS = 1000


class Episodes:
    """Carries out the actions RESET and STEP.

    Args:
        functions: The environment of every name that is not on a server.
        on_servers: The others by their names in tasks; none by default.
        max_attempts: Times that a rollout begins whose sessions on a server are lost.
    """

    def __init__(
        self,
        functions: Environment,
        tokenizer: PreTrainedTokenizerBase,
        on_servers: Mapping[str, Environment] | None = None,
        max_attempts: int = 1,
    ) -> None:
        self._functions, self._on_servers = functions, on_servers or {}
        self._tokenizer, self._max_attempts = tokenizer, max_attempts
        self._plain = PlainTurns(tokenizer)
        self._chats: dict[tuple[str, str], ChatTurns] = {}
        self._parsers: dict[tuple[str, str], ToolParser] = {}

    async def reset(self, rollout: InFlightRollout) -> None:
        """Begin the episode, and put the environment's first observation behind the prompt."""
        task, play, environment = rollout.task, rollout.task.play, self._environment(rollout)
        request = ResetRequest(environment=task.environment, version=play.version, task_json=task_json(task.prompt))
        begun = environment.begin(request, play.step_timeout_s)
        # With places it bounds the wait itself, and the conversation's time begins after that.
        reply = await (begun if environment.has_places else self._in_time(rollout, begun))
        if reply is None:
            rollout.on_time_over()
            return
        if self._begins_anew(rollout, reply):
            return
        rollout.on_reset(reply.version, reply.state_json, time.time() if environment.has_places else None)
        if reply.HasField("failure"):
            _fail(rollout, reply.failure.kind, reply.failure.text)
        elif observation := json.loads(reply.observation_json or '""'):
            self._open(rollout, observation)

    async def resume(self, rollout: InFlightRollout) -> None:
        """Take over the episode of a rollout that another generator began."""
        state_json = rollout.state.state_json
        if rollout.ended or not state_json:
            return
        reply = await self._environment(rollout).resume(state_json, task_json(rollout.task.prompt))
        if not reply.HasField("failure"):
            rollout.on_resumed(reply.state_json)
        elif not self._begins_anew(rollout, reply):
            _fail(rollout, reply.failure.kind, reply.failure.text)

    def end(self, rollout: InFlightRollout) -> None:
        """End the episode of a rollout that has ended, or begins anew."""
        if state_json := rollout.state.state_json:
            self._environment(rollout).end(state_json)

    def hand_over(self, rollout: InFlightRollout, is_needed: Callable[[], Awaitable[bool]] | None) -> None:
        """Leave the episode of an unfinished rollout to the next generator; arguments as in Environment."""
        if state_json := rollout.state.state_json:
            self._environment(rollout).hand_over(state_json, is_needed)

    def _environment(self, rollout: InFlightRollout) -> Environment:
        return self._on_servers.get(rollout.task.environment, self._functions)

    def _begins_anew(self, rollout: InFlightRollout, reply: EnvironmentReply) -> bool:
        """Whether the rollout's session is lost, and it begins another one as its next attempt."""
        if reply.failure.kind not in LOST_KINDS or rollout.num_lost + 1 >= self._max_attempts:
            return False
        rollout.num_lost += 1
        metrics.SESSIONS_LOST.labels(reply.failure.kind).inc()
        log.warning(reply.failure.kind, rollout=rollout.rollout_key, detail=f"it begins anew: {reply.failure.text}")
        self.end(rollout)
        rollout.restart()
        return True

    def _open(self, rollout: InFlightRollout, observation: Any) -> None:
        try:
            prompt = self._turns(rollout).opening(rollout.task.prompt, observation)
        except ObservationError as error:
            _fail(rollout, "invalid_return", f"reset: the observation {error}")
            return
        num_tokens, longest = len(prompt.token_ids), rollout.task.play.prompt_length
        if longest and num_tokens > longest:
            text = f"with reset's observation the prompt has {num_tokens} tokens, and at most {longest} are allowed"
            _fail(rollout, "invalid_return", f"{text} (algorithm.prompt_length)")
            return
        rollout.on_opening(prompt)

    async def step(self, rollout: InFlightRollout) -> None:
        """Ask the environment to answer the policy's turn: an observation and a new turn, or the rollout's end."""
        play = rollout.task.play
        text = self._tokenizer.decode(rollout.policy_turn, skip_special_tokens=True)
        calls, problem = self._calls(play, rollout.policy_turn)
        if problem:
            metrics.TOOL_CALLS.labels("", "malformed").inc()
            rollout.on_malformed_call(text)
            self._observe(rollout, [{"role": "tool", "content": f"error: the tool call {problem}"}])
            return
        if play.max_calls and rollout.state.episode.num_tool_calls + len(calls) > play.max_calls:
            metrics.TOOL_CALLS.labels("", "over_limit").inc()
            rollout.on_turn_read(text)
            self._observe(rollout, [{"role": "tool", "content": f"error: {play.max_calls} tool calls are allowed"}])
            return
        request = StepRequest(
            environment=rollout.task.environment,
            version=rollout.state.episode.version,
            state_json=rollout.state.state_json,
            action=text,
            calls_json=json.dumps(calls) if play.tools_json else "",
        )
        asked = self._environment(rollout).step(request, play.step_timeout_s, task_json(rollout.task.prompt))
        reply = await self._in_time(rollout, asked)
        if reply is not None and self._begins_anew(rollout, reply):
            return
        rollout.on_turn_read(text)
        if reply is None:
            rollout.on_time_over()
            return
        if reply.HasField("failure"):
            _fail(rollout, reply.failure.kind, reply.failure.text)
            return
        for call in calls:
            metrics.TOOL_CALLS.labels(call["name"], "called").inc()
        rollout.on_step(reply.state_json, reply.reward, len(calls))
        observation = json.loads(reply.observation_json or '""')
        if reply.done:
            rollout.on_environment_done(as_messages(observation, "user") if observation else [])
        else:
            self._observe(rollout, observation)

    def _observe(self, rollout: InFlightRollout, observation: Any) -> None:
        """Report an observation in the tokens of the chat template."""
        role = "tool" if rollout.task.play.tools_json else "user"
        last_token_id = rollout.state.token_ids[-1] if rollout.state.token_ids else None
        try:
            token_ids = self._turns(rollout).between(observation, role, last_token_id)
        except ObservationError as error:
            _fail(rollout, "invalid_return", f"step: the observation {error}")
            return
        rollout.on_observation(token_ids, as_messages(observation, role))

    @staticmethod
    async def _in_time(
        rollout: InFlightRollout, reply: Coroutine[Any, Any, EnvironmentReply]
    ) -> EnvironmentReply | None:
        """The environment's reply; None where the conversation's time is over first."""
        left_s = rollout.seconds_left(time.time())
        try:
            async with asyncio.timeout(None if left_s == math.inf else left_s):
                return await reply
        except TimeoutError:
            return None

    def _turns(self, rollout: InFlightRollout) -> ChatTurns | PlainTurns:
        """The renderer of observations: by the chat template where the prompt is messages."""
        if not rollout.task.prompt.messages_json:
            return self._plain
        parts = tools_json, template_json = rollout.task.play.tools_json, rollout.task.prompt.template_json
        if parts not in self._chats:
            if len(self._chats) >= _MOST_CHATS:  # rows may differ in their variables
                self._chats.clear()
            variables = json.loads(template_json or "{}")
            self._chats[parts] = ChatTurns(self._tokenizer, json.loads(tools_json or "[]"), variables)
        return self._chats[parts]

    def _calls(self, play: Play, turn_token_ids: Sequence[int]) -> tuple[list[dict[str, Any]], str]:
        """The tool calls in a turn of the policy, and the problem where they cannot be read.

        The end-of-sequence token is cut off. Other special tokens stay, since a call may be between two of them.
        """
        if not play.tools_json:
            return [], ""
        from gspo.generation.rollout.tool_parser import ToolParser  # here: only tools are worth vLLM's import

        key = (play.tool_format, play.tools_json)
        if key not in self._parsers:
            self._parsers[key] = ToolParser(self._tokenizer, play.tool_format, json.loads(play.tools_json))
        ends_special = bool(turn_token_ids) and turn_token_ids[-1] in self._tokenizer.all_special_ids
        text = self._tokenizer.decode(turn_token_ids[:-1] if ends_special else turn_token_ids)
        return self._parsers[key].read(text)


def _fail(rollout: InFlightRollout, kind: str, text: str) -> None:
    metrics.ENVIRONMENT_FAILURES.labels(kind).inc()
    rollout.on_environment_failed(kind, text)
