"""A function tried on rows that a user gives: scores, time and what it printed. Nothing of it reaches a run."""

import json
import time
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field

from gspo.reward.functions.environment_steps import EnvironmentSteps
from gspo.reward.functions.library import Function, counted
from gspo.reward.sandbox.calls import CallError
from gspo.reward.sandbox.values import Failure, Result
from gspo_proto.rollout_pb2 import OUTCOME_EOS, Prompt, Rollout


class FailureView(BaseModel):
    """Why there is no number."""

    kind: str = Field(description="timeout, memory, crash, forbidden, output_too_large, invalid_return or exception")
    text: str
    traceback: str = Field("", description="Of the function's own code")


class TryResult(BaseModel):
    """One row's score, or one turn of an environment. A failure has no reward."""

    reward: float | None = None
    parts: dict[str, float] = {}
    extras: dict[str, float] = Field({}, description="Reported beside the reward and not counted")
    columns: dict[str, Any] = Field({}, description="Values of the answer that the function logged")
    failure: FailureView | None = None
    observation: Any = Field(None, description="Of an environment's turn: text or chat messages")
    done: bool | None = Field(None, description="Of an environment's turn")


class TrialView(BaseModel):
    """The result of a trial; no run sees it."""

    name: str
    version: str
    results: list[TryResult]
    seconds: float
    output: str = Field(description="The end of the function's output")


async def try_rows(function: Function, rows: Sequence[dict[str, Any]]) -> TrialView:
    """One call of a reward function for all rows, as a run makes one for a batch; a result for each row."""
    started = time.perf_counter()
    try:
        with counted(function, None, num_answers=len(rows)):
            values, output = await function.score([rollout_of(row) for row in rows], session=None)
            results = [_result_of(value) for value in values]
    except CallError as error:
        output, results = error.output, [_failed(error)] * len(rows)
    return _trial_view(function, results, time.perf_counter() - started, output)


async def try_actions(function: Function, task: Any, actions: Sequence[str]) -> TrialView:
    """A reset and then the actions, until one fails or the environment is done; a result for each turn."""
    started, results, output = time.perf_counter(), list[TryResult](), ""
    steps, remaining = EnvironmentSteps(None, session=None), iter(actions)
    try:
        turn = await steps.reset(function, json.dumps(task))
        while True:
            observation = json.loads(turn.observation_json)
            results.append(TryResult(reward=turn.reward, observation=observation, done=turn.done))
            output += turn.output
            if turn.done or (action := next(remaining, None)) is None:
                break
            turn = await steps.step(function, turn.state_json, action)
    except CallError as error:
        results.append(_failed(error))
        output += error.output
    return _trial_view(function, results, time.perf_counter() - started, output)


def _trial_view(function: Function, results: list[TryResult], seconds: float, output: str) -> TrialView:
    code = function.code
    return TrialView(name=code.name, version=code.version, results=results, seconds=seconds, output=output)


def _result_of(value: Result) -> TryResult:
    if value is None:
        return TryResult(failure=FailureView(kind="invalid_return", text="returned None: it does not apply here"))
    if isinstance(value, Failure):
        return TryResult(failure=FailureView(kind=value.kind, text=value.reason, traceback=value.traceback))
    return TryResult(reward=value.reward, parts=value.parts, extras=value.extras, columns=value.columns)


def _failed(error: CallError) -> TryResult:
    return TryResult(failure=FailureView(kind=error.kind, text=str(error), traceback=error.traceback))


def rollout_of(row: dict[str, Any]) -> Rollout:
    """A row as a finished rollout: `prompt` and `completion`, and every other key a column."""
    columns = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
    prompt = prompt_of(row.get("prompt", ""), columns)
    return Rollout(prompt=prompt, text=str(row.get("completion", "")), token_ids=[], outcome=OUTCOME_EOS)


def prompt_of(prompt: Any, columns: dict[str, Any]) -> Prompt:
    """Text or chat messages as a prompt without token ids."""
    is_text = isinstance(prompt, str)
    return Prompt(
        text=prompt if is_text else "",
        messages_json="" if is_text else json.dumps(prompt, default=str),
        columns_json=json.dumps(columns, default=str),
    )
