"""A program that scores logged rollouts with one function in its sandbox: JSON in, JSON out. No run sees the scores.

services/gspo/view/log_trial.py starts it, with the source from a run's log or a file.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from gspo.common.config.loading import read_config
from gspo.common.errors import InputError, exit_bad_input
from gspo.common.reward_uses import reward_uses
from gspo.reward.functions.library import Function, Library
from gspo.reward.sandbox.calls import CallError, CallLimits, Code
from gspo.reward.sandbox.levels import find_level
from gspo.reward.scoring.scorer import NOT_SCORED, Scorer
from gspo_proto.rollout_pb2 import Episode, Outcome, Prompt, RewardUse, Rollout


def main() -> None:
    """Read the question, and print a score for each rollout: `reward` or null, `failure` or null.

    Both are null where the function does not apply to the rollout.
    """
    question = json.load(sys.stdin)
    # Logs go to the standard output, which is for the answer alone.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        with answer:
            json.dump(asyncio.run(_scores(question)), answer)
    except InputError as error:
        exit_bad_input(error)


async def _scores(question: dict[str, Any]) -> list[dict[str, Any]]:
    """Scores with the function's weights in the configuration; weight 1 for a function that it has not.

    Raises:
        InputError: The function cannot be loaded.
    """
    config, name = read_config(Path(question["config"])), question["name"]
    uses = [use for source in config.sources for use in reward_uses(source) if use.name == name]
    reward = config.reward
    library = Library(
        CallLimits(reward.timeout_s, reward.memory_mb, reward.cpu_s),
        confinement=await find_level(reward.sandbox_minimum),
        num_workers=reward.workers,
        model=config.model,
    )
    paths = tuple(Path(path) for path in question["reads"])
    entry, modules = question["entry"] or None, question["modules"]
    code = Code(name, question["source"], "", question["filename"], entry, reads=paths, modules=modules)
    function = Function(code, library.sandbox(code, library.limits), question["args"])
    library.configured[name] = function
    try:
        await function.callee.load()
        scorer = Scorer(library, uses[:1] or [RewardUse(name=name, weight=1.0)], batch_size=reward.batch_size, name="")
        scores = await scorer.score([_rollout(row) for row in question["rows"]], session="")
    except CallError as error:
        raise InputError(question["filename"], str(error), "Correct the function") from error
    finally:
        await library.close()
    unscored = f"{name}: {NOT_SCORED}"
    return [
        {
            "reward": score.reward if score.HasField("reward") else None,
            "failure": score.failure if score.HasField("failure") and score.failure != unscored else None,
        }
        for score in scores
    ]


def _rollout(row: dict[str, Any]) -> Rollout:
    """A row of a step file, as far as a function sees it."""
    prompt = Prompt(text=row["prompt"], messages_json=row["messages_json"], columns_json=row["columns_json"])
    prompt.token_ids.extend(row["prompt_token_ids"])
    return Rollout(
        group=row["group"],
        number=row["number"],
        prompt=prompt,
        token_ids=row["token_ids"],
        version=row["version"],
        text=row["text"],
        outcome=Outcome.Value(f"OUTCOME_{row['outcome'].upper()}"),
        stop=row["stop"],
        episode=Episode(turns_json=row["turns_json"]),
    )


if __name__ == "__main__":
    main()
