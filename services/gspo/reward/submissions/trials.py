"""A function tried on rows that a user gives: scores, time and what it printed. Nothing of it reaches a run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo.reward.functions.arguments import arguments_for
from gspo.reward.functions.environment_steps import EnvironmentSteps, Turn
from gspo.reward.functions.library import Function, counted
from gspo.reward.sandbox.calls import CallError, values_of
from gspo.reward.sandbox.values import Failure, Value, read_value
from gspo_proto.rollout_pb2 import OUTCOME_EOS, Prompt, Rollout


@dataclass
class Trial:
    """The result of a trial.

    Attributes:
        results: One for each row.
        turns: Of an environment: the reset, then one for each action that it reached.
        output: The end of the function's printed output.
        seconds: Of all calls together.
    """

    results: list[Value | Failure] = field(default_factory=list)
    turns: list[Turn | Failure] = field(default_factory=list)
    output: str = ""
    seconds: float = 0.0

    @property
    def total(self) -> float | Failure:
        """Summed reward of an environment's turns, or the first failure."""
        for turn in self.turns:
            if isinstance(turn, Failure):
                return turn
        return sum(turn.reward for turn in self.turns if isinstance(turn, Turn))


async def try_rows(function: Function, rows: Sequence[dict[str, Any]]) -> Trial:
    """One call of a reward function for all rows, as a run makes one for a batch."""
    callee, trial, started = function.callee, Trial(), time.perf_counter()
    batch = [rollout_of(row) for row in rows]
    try:
        with counted(function, None, num_answers=len(rows)):
            question = arguments_for(callee.signature, batch, function.args)
            answer = await callee.call(question, session=None)
            trial.output = answer.output
            raw = values_of(answer, len(rows))
            trial.results = [read_value(value, callee.signature.convention) for value in raw]
    except CallError as error:
        trial.output = error.output or trial.output
        trial.results = [Failure(str(error), error.kind, error.traceback)] * len(rows)
    trial.seconds = time.perf_counter() - started
    return trial


async def try_actions(function: Function, task: Any, actions: Sequence[str]) -> Trial:
    """A reset and then the actions, until one fails or the environment is done."""
    trial, started, printed = Trial(), time.perf_counter(), []
    environments = EnvironmentSteps(None, session=None)
    try:
        turn = await environments.reset(function, json.dumps(task))
        trial.turns.append(turn)
        printed.append(turn.output)
        for action in actions:
            if turn.done:
                break
            turn = await environments.step(function, turn.state_json, action)
            trial.turns.append(turn)
            printed.append(turn.output)
    except CallError as error:
        trial.turns.append(Failure(str(error), error.kind, error.traceback))
        printed.append(error.output)
    trial.output, trial.seconds = "".join(printed), time.perf_counter() - started
    return trial


def rollout_of(row: dict[str, Any]) -> Rollout:
    """A row as a finished rollout: `prompt` and `completion`, and every other key a column."""
    prompt, text = row.get("prompt", ""), str(row.get("completion", ""))
    columns = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
    messages = "" if isinstance(prompt, str) else json.dumps(prompt)
    asked = Prompt(
        text=prompt if isinstance(prompt, str) else "", messages_json=messages, columns_json=json.dumps(columns)
    )
    return Rollout(prompt=asked, text=text, token_ids=[], outcome=OUTCOME_EOS)
