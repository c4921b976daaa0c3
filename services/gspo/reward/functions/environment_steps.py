"""The steps of a multi-turn environment: pure functions in a sandbox, counted like any other call.

Their state is a JSON value that the caller keeps, so any replica can take any step.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from gspo.common.chat_messages import is_observation
from gspo.common.score_numbers import NUMBER_RULE, bounded_number
from gspo.reward.functions.arguments import NotAskableError
from gspo.reward.functions.library import Function, counted
from gspo.reward.registry.usage import UsageCounter
from gspo.reward.sandbox.calls import CallError


@dataclass(frozen=True)
class Turn:
    """One turn of an episode: the state after reset (reward 0, not done) or after a step."""

    state_json: str
    observation_json: str
    reward: float
    done: bool
    output: str = field(default="", compare=False)


class EnvironmentSteps:
    """Answers resets and steps.

    Args:
        usage: Counts calls; None counts none, as in a trial.
        session: Calls of other sessions share no process with these; None: no other call does.
    """

    def __init__(self, usage: UsageCounter | None, *, session: str | None) -> None:
        self._usage, self._session = usage, session

    async def reset(self, function: Function, task_json: str) -> Turn:
        """The first turn of an episode with a task: `reset(task) -> state, observation`.

        Raises:
            CallError: The environment failed, or returned something else.
        """
        with counted(function, self._usage, num_answers=1):
            arguments = {"task": _read(task_json, "the task")}
            question = {"function": "reset", "arguments": arguments}
            answer = await function.callee.call(question, session=self._session)
            state, observation = _fields(answer.values, 2, "reset returned {}, not (state, observation)")
            return Turn(_dump(state), _observation(observation), 0.0, done=False, output=answer.output)

    async def step(self, function: Function, state_json: str, action: str, calls_json: str = "") -> Turn:
        """The turn of the episode that follows an action: `step(state, action) -> state, observation, reward, done`.

        Args:
            action: The policy's text of this turn.
            calls_json: The tool calls in it, if the policy has tools: the action is then {text, calls}.

        Raises:
            CallError: The environment failed, or returned something else.
        """
        with counted(function, self._usage, num_answers=1):
            action_value = {"text": action, "calls": _read(calls_json, "the calls")} if calls_json else action
            arguments = {"state": _read(state_json, "the state"), "action": action_value}
            question = {"function": "step", "arguments": arguments}
            answer = await function.callee.call(question, session=self._session)
            form = "step returned {}, not (state, observation, reward, done)"
            state, observation, reward, done = _fields(answer.values, 4, form)
            number = bounded_number(reward)
            if number is None:
                raise _invalid(f"step returned a reward that is not {NUMBER_RULE}: {_dump(reward)[:100]}")
            if not isinstance(done, bool):
                raise _invalid(f"step returned a done that is neither true nor false: {_dump(done)[:100]}")
            return Turn(_dump(state), _observation(observation), number, done, answer.output)


def _read(text: str, what: str) -> Any:
    try:
        return json.loads(text or "null")
    except (ValueError, RecursionError) as error:
        raise NotAskableError(f"{what} is not JSON: {error}") from error


def _dump(value: Any) -> str:
    try:
        return json.dumps(value)
    except RecursionError as error:
        raise _invalid("it returned a value that is nested too deeply") from error


def _fields(values: Any, count: int, otherwise: str) -> list[Any]:
    if not isinstance(values, list) or len(values) != count:
        was = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
        raise _invalid(otherwise.format(was))
    return values


def _observation(value: Any) -> str:
    """Text, or a list of chat messages, as JSON."""
    if not is_observation(value):
        raise _invalid("the observation is neither text nor a list of messages with role and content")
    return _dump(value)


def _invalid(text: str) -> CallError:
    return CallError("invalid_return", text, error_type="InvalidReturnError")
