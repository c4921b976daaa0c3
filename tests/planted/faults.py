"""The planted faults: what each changes in the arithmetic example, and the finding that has to name it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Sections = Mapping[str, Mapping[str, Any]]
_REWARD = """def reward(prompts, completions, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return {}
"""
# It fails after its call, at seven of ten answers.
_AGENT = """import asyncio
import json
import urllib.request


def ask(task):
    body = json.dumps({"model": task.model, "messages": task.messages}).encode()
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


async def play(task):
    text = await asyncio.to_thread(ask, task)
    if task.columns["answer"][-1:] not in tuple("012"):
        raise RuntimeError("the tool is not there")
    return float(text == task.columns["answer"])
"""
_FAILS = (
    "[float(text == right) if text[-1:] in tuple('012') else float('nan') "
    "for text, right in zip(texts, columns['answer'])]"
)


@dataclass(frozen=True)
class PlantedFault:
    """One planted fault.

    Attributes:
        sections: Keys of the configuration.
        reward: Source of another reward function; empty keeps the example's.
        agent: Source of an agent that plays the rollouts, and gives their rewards.
        rules: The finding is one of these.
        change_model: Changes the copied folder of the model.
        steps: Steps of the run.
    """

    rules: tuple[str, ...]
    sections: Sections = field(default_factory=dict)
    reward: str = ""
    agent: str = ""
    change_model: Callable[[Path], None] | None = None
    steps: int = 10


def _end_elsewhere(model: Path) -> None:
    """The end token of tokenizer and engine is another one than the policy was trained to sample."""
    for name, key, value in (
        ("tokenizer_config.json", "eos_token", "<|pad|>"),
        ("generation_config.json", "eos_token_id", 258),
        ("config.json", "eos_token_id", 258),
    ):
        path = model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def _no_place_for_the_answer(model: Path) -> None:
    """The chat template ignores add_generation_prompt, so the policy continues the user's message."""
    path = model / "chat_template.jinja"
    path.write_text(path.read_text().split("{% if add_generation_prompt %}")[0].replace("<|im_end|>", ""))


FAULTS = {
    "dead_reward": PlantedFault(("no_signal",), reward=_REWARD.format("[0.0 for _ in texts]")),
    "reward_always_1": PlantedFault(("no_signal",), reward=_REWARD.format("[1.0 for _ in texts]")),
    "wrong_end_token": PlantedFault(("cut_off", "no_signal"), change_model=_end_elsewhere),
    "template_without_answer": PlantedFault(("no_signal", "weak_signal"), change_model=_no_place_for_the_answer),
    "limit_too_short": PlantedFault(("cut_off",), {"algorithm": {"response_length": 2}}),
    "learning_rate_30_times": PlantedFault(
        ("reward_falls", "entropy_collapses", "entropy_grows", "gradient_explodes", "updates_not_applied"),
        {"learner": {"learning_rate": 6e-3}},
    ),
    "reward_leaks_by_length": PlantedFault(
        ("length_pays",),
        {"sampling": {"temperature": 1.7}, "learner": {"learning_rate": 1e-3}},
        reward=_REWARD.format("[min(1.0, len(text) / 8) for text in texts]"),
    ),
    "held_out_in_training": PlantedFault(("held_out_in_training",), {"evaluation": {"prompts": "prompts.jsonl"}}),
    "lag_16": PlantedFault(("policy_is_stale",), {"staleness": {"max_lag": 16}}),
    "rewards_fail": PlantedFault(
        ("rollouts_fail",), {"reward": {"max_failure_share": 1.0}}, reward=_REWARD.format(_FAILS)
    ),
    "agent_fails": PlantedFault(
        ("rollouts_fail",),
        {
            "algorithm": {"rollout_batch_size": 8, "num_return_sequences_in_group": 4},
            "reward": {"max_failure_share": 1.0},
            "evaluation": {"limit": 4, "limit_between": 4},
        },
        agent=_AGENT,
    ),
    "healthy": PlantedFault((), steps=150),
}


def copied_model(model: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    """A copy of the model with a change."""
    copy = folder / "model"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(model, copy)
    change(copy)
    return copy
