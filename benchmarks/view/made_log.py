"""A run directory with a long log of made-up rollouts, written by the learner's own StepLog.

Prompts are word problems. Answers are words of a Zipf distribution; their lengths are log-normal. No model is involved.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks import CACHE
from benchmarks.harness.workload import GROUP_SIZE, GROUPS, write_config
from gspo.common.config.loading import CONFIG_NAME, ENVIRONMENT_NAME
from gspo.learner.assembly.rows import Row
from gspo.learner.storage.step_log import StepLog

ROLLOUTS_A_STEP = GROUPS * GROUP_SIZE
# Of an answer: median, spread of the logarithm, and most.
_TOKENS, _SPREAD, _MAX_TOKENS = 90, 0.6, 512
_NUM_WORDS, _NUM_PROMPTS, _STEP_S = 20_000, 4096, 15.0
_SYLLABLES = ("ba", "ke", "lo", "mi", "nu", "per", "sta", "ter", "vi", "wen", "xo", "zar")
_THINGS = ("apples", "tickets", "stamps", "miles", "pages", "marbles", "boxes", "hours")


def made_run(num_steps: int) -> Path:
    """A run directory with that many logged steps; written at the first call, which takes a minute a hundred steps."""
    folder, unfinished = CACHE / f"view-{num_steps}", CACHE / f"view-{num_steps}.tmp"
    if not folder.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        (unfinished / "log").mkdir(parents=True)
        log = StepLog(unfinished / "log")
        for step in range(1, num_steps + 1):
            log.write(step, list(made_rows(step)))
        (unfinished / ENVIRONMENT_NAME).write_text("{}")
        config = write_config("view", "fixed", "float32")
        shutil.copy(config, unfinished / CONFIG_NAME)
        for name in ("prompts.jsonl", "reward.py"):
            shutil.copy(config.parent / name, unfinished / name)
        unfinished.rename(folder)
    return folder


def made_rows(step: int) -> Iterator[Row]:
    """The rollouts of a step, the same at every call."""
    random = np.random.default_rng(step)
    words = _words()
    for group in range((step - 1) * GROUPS, step * GROUPS):
        place = int(random.integers(_NUM_PROMPTS))
        prompt_tokens = random.integers(0, 150_000, 60).astype(np.int32)
        rewards = (random.random(GROUP_SIZE) < 0.2 + 0.6 * random.random()).astype(float)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for number in range(GROUP_SIZE):
            length = int(np.clip(random.lognormal(np.log(_TOKENS), _SPREAD), 1, _MAX_TOKENS))
            token_ids = np.minimum(random.zipf(1.3, length), _NUM_WORDS).astype(np.int32) - 1
            issued = step * _STEP_S + random.random()
            reward = float(rewards[number] + 0.1 * random.integers(0, 3))
            yield Row(
                step=step,
                group=group,
                number=number,
                attempt=1,
                prompt=_prompt(place),
                prompt_token_ids=prompt_tokens,
                messages_json=json.dumps([{"role": "user", "content": _prompt(place)}]),
                columns_json=json.dumps({"answer": str(place * 7)}),
                token_ids=token_ids,
                logp=-random.exponential(0.3, length).astype(np.float32),
                version=np.repeat([max(0, step - 2), step - 1], [length // 3, length - length // 3]).astype(np.int32),
                mask=np.ones(length, dtype=np.bool_),
                text=" ".join(words[i] for i in token_ids) + f" The answer is {place * 7 if reward >= 1 else place}.",
                outcome="truncated" if length == _MAX_TOKENS else "eos",
                stop="",
                reward=reward,
                failure=None,
                parts_json=json.dumps([{"name": "exact", "value": reward, "weight": 1.0, "version": "9f2c"}]),
                reward_version="9f2c",
                advantage=float(advantages[number]),
                skipped=None,
                mini_batch=number % 4,
                num_rollouts=GROUP_SIZE,
                temperature=1.0,
                generator=f"generation-{group % 3}",
                scorer="reward-0",
                issued_unix_s=issued,
                started_unix_s=issued + 0.5,
                finished_unix_s=issued + 0.5 + 0.02 * length,
                scored_unix_s=issued + 1.0 + 0.02 * length,
            )


@cache
def _words() -> list[str]:
    random = np.random.default_rng(0)
    return ["".join(random.choice(_SYLLABLES, 1 + place % 4)) for place in range(_NUM_WORDS)]


def _prompt(place: int) -> str:
    first, second, thing = place % 97 + 3, place // 97 + 2, _THINGS[place % len(_THINGS)]
    return (
        f"<|user|>\nPerson {place} has {first} {thing} and gets {second} more every day for a week. On Sunday a "
        f"third of them is given away to friends who had none, and {first % 7} are lost on the way home. How many "
        f"{thing} are left at the end of the week? Reason step by step, and end with the answer.\n<|assistant|>\n"
    )
