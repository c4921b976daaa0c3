"""The page on migration against TRL's own configuration, and against the GSPO scripts of three trainers.

tests/integration/other_venvs/test_trainer_wheels.py has verl and OpenRLHF, whose wheels are not installed.
"""

from __future__ import annotations

import dataclasses
import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo.common.config.loading import parse_config
from gspo.common.config.schema import Config
from gspo.learner.training.trainer_api import learning_rate
from tests.support.documents.trainer_keys import PAGE, TRAINERS, TrainerKey, expected_keys, full_name, named_keys
from tests.support.documents.trainer_scripts import SCRIPTS

# Of each script, its keys with the same value here.
SAME = {
    "trl": {
        "learning_rate": "learner.learning_rate",
        "max_completion_length": "algorithm.response_length",
        "num_generations": "algorithm.num_return_sequences_in_group",
        "epsilon": "algorithm.pg_clip_low",
        "epsilon_high": "algorithm.pg_clip_high",
    },
    "verl": {
        "data.train_batch_size": "algorithm.rollout_batch_size",
        "data.max_prompt_length": "algorithm.prompt_length",
        "data.max_response_length": "algorithm.response_length",
        "rollout.n": "algorithm.num_return_sequences_in_group",
        "actor.clip_ratio_low": "algorithm.pg_clip_low",
        "actor.clip_ratio_high": "algorithm.pg_clip_high",
        "actor.loss_agg_mode": "algorithm.loss_agg_mode",
        "actor.optim.lr": "learner.learning_rate",
        "actor.use_kl_loss": "algorithm.use_kl_loss",
        "actor.entropy_coeff": "algorithm.entropy_coef",
        "actor.ppo_max_token_len_per_gpu": "learner.micro_batch_tokens",
        "trainer.save_freq": "run.checkpoint_every",
        "trainer.test_freq": "evaluation.every",
        "trainer.total_epochs": "run.total_epochs",
        "algorithm.adv_estimator": "algorithm.adv_estimator",
    },
    "openrlhf": {
        "--rollout.batch_size": "algorithm.rollout_batch_size",
        "--rollout.n_samples_per_prompt": "algorithm.num_return_sequences_in_group",
        "--rollout.max_new_tokens": "algorithm.response_length",
        "--train.max_epochs": "algorithm.ppo_epochs",
        "--actor.adam.lr": "learner.learning_rate",
        "--algo.advantage.gamma": "algorithm.gamma",
        "--ds.zero_stage": "learner.zero_stage",
    },
}


@pytest.fixture(scope="module")
def trl_keys() -> dict[str, TrainerKey]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("trl.import_utils"), "is_vllm_available", lambda *args, **kwargs: False)
        configs = [
            import_module("trl.trainer.grpo_config").GRPOConfig,
            import_module("trl.trainer.model_config").ModelConfig,
        ]
    return {
        field.name: TrainerKey(
            None if field.default is dataclasses.MISSING else getattr(field.default, "value", field.default),
            field.metadata.get("help", ""),
        )
        for config in configs
        for field in dataclasses.fields(config)
    }


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_key_that_the_page_names_is_checked(trainer: str) -> None:
    assert named_keys(trainer) == set(expected_keys(trainer))


def test_keys_of_trl_have_the_names_defaults_and_meanings_of_the_installed_version(
    trl_keys: dict[str, TrainerKey],
) -> None:
    for name, (default, word) in expected_keys("trl").items():
        assert trl_keys[name].default == default, name
        assert word and word in trl_keys[name].description, (name, trl_keys[name].description)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_key_of_a_script_has_a_row_or_a_reason(trainer: str) -> None:
    keys = {full_name(trainer, key) for key in SCRIPTS[trainer]}
    assert keys - named_keys(trainer) == set()


def silent_differences() -> list[list[str]]:
    section = PAGE.read_text().partition("## Silent differences")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| 1"
            or re.match(r"\| \d", line)]  # fmt: skip


def test_the_silent_differences_are_counted_and_have_the_defaults_of_all() -> None:
    rows = silent_differences()
    assert [row[0] for row in rows] == [str(number) for number in range(1, 16)]
    assert "These fifteen defaults differ" in PAGE.read_text()
    config = parse_config(
        {"name": "a", "model": {"path": "m"}, "data": {"prompts": "p"}, "run": {"total_steps": 1},
         "reward": {"functions": [{"path": "r.py"}]}}, Path())  # fmt: skip
    for _, keys, here, *others in rows:
        values = [attrgetter(key)(config) for key in re.findall(r"`([^`]+)`", keys)]
        flat = [it for value in values for it in (value if isinstance(value, tuple) else (value,))]
        assert all(shown(value) in {shown(it) for it in re.split(r"[,:] ", here)} for value in flat) or (
            flat == [None]
        ), (keys, flat, here)
        for trainer, cell in zip(TRAINERS, others, strict=True):
            for name, value in re.findall(r"`([^`]+)` ([\w.,\- ]+)", cell):
                default = expected_keys(trainer)[full_name(trainer, name)][0]
                parts = default if isinstance(default, list) else [default]
                words = [it.strip() for it in value.split(",")][: len(parts)]
                assert [shown(it) for it in words] == [shown(it) for it in parts], (trainer, name)


def shown(value: Any) -> str:
    """A value as the page has it: numbers in one way."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        return f"{float(value):g}"
    except ValueError:
        return str(value)


def worked_examples() -> dict[str, Config]:
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return {
        trainer: parse_config(yaml.safe_load(block), Path()) for trainer, block in zip(TRAINERS, blocks, strict=True)
    }


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_worked_example_has_the_values_of_the_script(trainer: str) -> None:
    config, script = worked_examples()[trainer], SCRIPTS[trainer]
    for key, ours in SAME[trainer].items():
        assert attrgetter(ours)(config) == pytest.approx(script[key]), key
    algorithm = config.algorithm
    assert (algorithm.importance_sampling, algorithm.adv_estimator) == ("seq", "grpo")
    assert (algorithm.loss_agg_mode, algorithm.old_logprobs) == ("seq-mean-token-mean", "recompute")
    assert config.staleness.max_lag == 0
    updates = {
        "trl": lambda: script["steps_per_generation"] / script["gradient_accumulation_steps"],
        "verl": lambda: script["data.train_batch_size"] / script["actor.ppo_mini_batch_size"],
        "openrlhf": lambda: algorithm.num_rollouts / script["--train.batch_size"],
    }[trainer]()
    assert algorithm.num_mini_batches == updates
    if trainer == "trl":
        rollouts = script["per_device_train_batch_size"] * script["steps_per_generation"]
        assert algorithm.num_rollouts == rollouts


def test_the_linear_decay_is_that_of_trl_for_one_update_a_step() -> None:
    """transformers' schedule, TRL's default: the rate of update k, from 0, of N is peak (N - k) / N."""
    torch = import_module("torch")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-5)
    schedule = import_module("transformers").get_linear_schedule_with_warmup(optimizer, 0, 10)
    learner = parse_config(
        {"name": "a", "model": {"path": "m"}, "data": {"prompts": "p"}, "run": {"total_steps": 10},
         "reward": {"functions": [{"path": "r.py"}]}, "learner": {"schedule": "linear", "learning_rate": 1e-5}},
        Path(),
    ).learner  # fmt: skip
    for step in range(1, 11):
        assert learning_rate(learner, step, 10) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
