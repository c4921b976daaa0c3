"""An environment tried before a run: resets with tasks of the data set, and a step with a made-up action."""

from __future__ import annotations

from collections.abc import Sequence

from gspo.common.errors import InputError, warn
from gspo.reward.functions.environments import EnvironmentSteps
from gspo.reward.functions.library import Function
from gspo.reward.sandbox.calls import CallError

TRIAL_ACTION = "42"
# An environment that raises one of these cannot work with any task or action; others may come from what it was given.
NEVER_THE_ACTION = ("ImportError", "ModuleNotFoundError", "NameError", "UnfitError", "InvalidReturnError")


async def try_environment(function: Function, tasks_json: Sequence[str], has_tools: bool) -> None:
    """Begin with each task, and take one step.

    Raises:
        InputError: The environment cannot work: a reset failed, a reset's second result differs from its first, or a
            step failed in a way that no action explains.
    """
    environments, where = EnvironmentSteps(None, session=None), "environment"
    name = f"of {function.source.path}"
    calls_json = "[]" if has_tools else ""
    for task_json in tasks_json:
        try:
            turn = await environments.reset(function, task_json)
            again = await environments.reset(function, task_json)
        except CallError as error:
            may_be_the_task = error.error_type not in NEVER_THE_ACTION
            fix = ", or give the data set the columns that it reads: they are in the task, beside `prompt`"
            rule = f"reset {name}, given {task_json[:200]}: {error}"
            raise InputError(where, rule, f"Mend it{fix if may_be_the_task else ''}") from error
        if turn != again:
            raise InputError(
                where,
                f"reset {name} gave another state or observation the second time, for {task_json[:200]}",
                "Draw what is random from a seed in the task: the rollouts of a group begin alike",
            )
        try:
            await environments.step(function, turn.state_json, TRIAL_ACTION, calls_json)
        except CallError as error:
            if error.error_type in NEVER_THE_ACTION:
                raise InputError(where, f"step {name}: {error}", "Mend it") from error
            warn(f"{where}: step {name}, tried on the action '{TRIAL_ACTION}', {error}")
