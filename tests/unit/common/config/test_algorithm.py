"""Presets, what a key beside them does, the clip, and every contradiction by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.loading import parse_config
from gspo.common.errors import InputError

# Copied from the documentation of ROLL's GSPO settings, with comments and headings.
ROLL_BLOCK = """
# GSPO related
adv_estimator: "reinforce"
importance_sampling: seq
rollout_batch_size: 64 # prompt
num_return_sequences_in_group: 8
prompt_length: 2048
response_length: 4096
# ppo related
ppo_epochs: 1
use_kl_loss: true
kl_loss_coef: 0.001
loss_agg_mode: "seq-mean-token-sum"
# advantage
whiten_advantages: true
advantage_clip: 2.0
dual_clip_loss: true
# clip
reward_clip: 10
# normalize
reward_norm: null
reward_shift: false
reward_scale: false
# reward
add_token_level_kl: false
"""
ROLL_VALUES = {
    "adv_estimator": "reinforce",
    "importance_sampling": "seq",
    "rollout_batch_size": 64,
    "num_return_sequences_in_group": 8,
    "prompt_length": 2048,
    "response_length": 4096,
    "ppo_epochs": 1,
    "use_kl_loss": True,
    "kl_loss_coef": 0.001,
    "loss_agg_mode": "seq-mean-token-sum",
    "whiten_advantages": True,
    "advantage_clip": 2.0,
    "dual_clip_loss": True,
    "reward_clip": 10,
    "reward_norm": None,
    "reward_shift": False,
    "reward_scale": False,
    "add_token_level_kl": False,
}


def algorithm(**keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(keys)


def test_rolls_block_pasted_under_algorithm_loads(minimal: dict[str, Any]) -> None:
    minimal["algorithm"] = yaml.safe_load(ROLL_BLOCK)
    loaded = parse_config(minimal, Path()).algorithm
    assert {key: getattr(loaded, key) for key in ROLL_VALUES} == ROLL_VALUES
    assert loaded.clip == (3e-4, 4e-4)  # the block sets no clip, and the ratio is a sequence's
    assert loaded.dual_clip == 1.4


def test_preset_roll_gspo_is_that_block_with_rolls_clip() -> None:
    preset = algorithm(preset="roll-gspo")
    assert {key: getattr(preset, key) for key in ROLL_VALUES} == ROLL_VALUES
    assert preset.clip == (0.2, 0.2)
    assert preset.needs_reference


def test_preset_gspo_is_the_papers_and_the_default() -> None:
    assert algorithm(preset="gspo") == algorithm()
    preset = algorithm()
    assert preset.model_dump(include={"adv_estimator", "importance_sampling", "loss_agg_mode", "num_mini_batches"}) == {
        "adv_estimator": "grpo",
        "importance_sampling": "seq",
        "loss_agg_mode": "seq-mean-token-mean",
        "num_mini_batches": 4,
    }
    assert (preset.reward_norm, preset.clip, preset.dual_clip) == ("group", (3e-4, 4e-4), None)
    assert not preset.needs_reference


def test_preset_grpo_is_the_baseline() -> None:
    preset = algorithm(preset="grpo")
    assert (preset.importance_sampling, preset.loss_agg_mode, preset.clip) == ("token", "token-mean", (0.2, 0.27))
    assert preset.reward_norm == "group"


@pytest.mark.parametrize(
    ("keys", "clip"),
    [
        ({"importance_sampling": "seq_token"}, (3e-4, 4e-4)),
        ({"importance_sampling": "token"}, (0.2, 0.27)),
        ({"preset": "grpo", "importance_sampling": "seq"}, (3e-4, 4e-4)),
        ({"pg_clip": 0.05}, (0.05, 0.05)),
        ({"pg_clip_high": 0.1}, (3e-4, 0.1)),
        ({"preset": "grpo", "pg_clip_low": 0.1}, (0.1, 0.27)),
        ({"preset": "roll-gspo", "pg_clip_low": 0.1, "pg_clip_high": 0.3}, (0.1, 0.3)),
        ({"preset": "roll-gspo", "pg_clip_low": 0.1}, (0.1, 0.2)),
        ({"preset": "roll-gspo", "importance_sampling": "token"}, (0.2, 0.2)),
    ],
)
def test_the_clip_follows_the_kind_of_ratio_unless_it_is_set(keys: dict[str, Any], clip: tuple[float, float]) -> None:
    assert algorithm(**keys).clip == clip


@pytest.mark.parametrize(("given_as", "bound"), [(False, None), (True, 1.4), (3.0, 3.0)])
def test_dual_clip(given_as: bool | float, bound: float | None) -> None:
    assert algorithm(dual_clip_loss=given_as).dual_clip == bound


def test_a_key_beside_a_preset_overrides_it() -> None:
    changed = algorithm(preset="roll-gspo", use_kl_loss=False, reward_norm="batch")
    assert (changed.use_kl_loss, changed.reward_norm, changed.advantage_clip) == (False, "batch", 2.0)


def test_the_estimator_brings_its_norm_whatever_the_preset() -> None:
    assert algorithm(preset="roll-gspo", adv_estimator="grpo").reward_norm == "group"
    assert algorithm(preset="grpo", adv_estimator="reinforce").reward_norm is None
    assert algorithm(preset="roll-gspo").reward_norm is None


@pytest.mark.parametrize("preset", ["gspo", "roll-gspo", "grpo"])
def test_every_key_written_out_loads_as_the_same(preset: str) -> None:
    """The run directory holds every key with its value, and a resume reads that."""
    for keys in ({}, {"pg_clip": 0.1}, {"pg_clip_low": 0.1}, {"importance_sampling": "token"}):
        written = algorithm(preset=preset, **keys)
        assert AlgorithmConfig.model_validate(written.model_dump(mode="json")) == written


def test_reinforce_has_no_norm_of_its_own() -> None:
    assert algorithm(adv_estimator="reinforce").reward_norm is None


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"pg_clip": 0.1, "pg_clip_low": 0.1}, "algorithm.pg_clip: 0.1"),
        ({"adv_estimator": "reinforce", "reward_norm": "batch", "reward_shift": True, "reward_scale": True},
         "algorithm.reward_shift: true with reward_scale"),
        ({"adv_estimator": "reinforce", "reward_shift": True}, "algorithm.reward_shift: true needs moments"),
        ({"adv_estimator": "reinforce", "reward_scale": True}, "algorithm.reward_scale: true needs moments"),
        ({"reward_norm": "batch"}, "algorithm.reward_norm: batch contradicts adv_estimator"),
        ({"reward_norm": None}, "algorithm.reward_norm: null contradicts adv_estimator"),
        ({"behavior_correction": "mask"}, "algorithm.behavior_correction: mask"),
        ({"behavior_correction": "truncate", "behavior_level": "token"}, "algorithm.behavior_correction: truncate"),
        ({"gamma": 0.9}, "algorithm.gamma: 0.9"),
        ({"overlong_buffer": 4097}, "algorithm.overlong_buffer: 4097"),
        ({"response_length": 100, "overlong_buffer": 101}, "algorithm.overlong_buffer: 101"),
        ({"adv_estimator": "reinforce", "num_return_sequences_in_group": 1, "filter_zero_spread": True},
         "algorithm.filter_zero_spread: true"),
        ({"adv_estimator": "reinforce", "reward_norm": "group", "num_return_sequences_in_group": 1},
         "algorithm.num_return_sequences_in_group: 1"),
        ({"pg_clip": 0.1, "pg_clip_high": 0.1}, "algorithm.pg_clip: 0.1"),
        ({"preset": "roll-gspo", "pg_clip": 0.1, "pg_clip_high": 0.1}, "algorithm.pg_clip: 0.1"),
        ({"dual_clip_loss": 0}, "algorithm.dual_clip_loss: 0"),
        ({"dual_clip_loss": -3.0}, "algorithm.dual_clip_loss: -3.0"),
        ({"dual_clip_loss": 1.0}, "algorithm.dual_clip_loss: 1.0"),
        ({"num_return_sequences_in_group": 1}, "algorithm.num_return_sequences_in_group: 1"),
        ({"rollout_batch_size": 1, "num_return_sequences_in_group": 2, "num_mini_batches": 3},
         "algorithm.num_mini_batches: 3"),
    ],
)  # fmt: skip
def test_a_contradiction_names_key_value_and_fix(minimal: dict[str, Any], keys: dict[str, Any], named: str) -> None:
    minimal["algorithm"] = keys
    with pytest.raises(InputError) as error:
        parse_config(minimal, Path())
    assert str(error.value).startswith(named)
    assert error.value.rule
    assert error.value.fix


@pytest.mark.parametrize(
    "keys",
    [
        {"pg_clip": 0},
        {"pg_clip_low": 1.5},
        {"gamma": 0},
        {"gamma": 1.1},
        {"rollout_batch_size": 0},
        {"kl_loss_coef": -1},
        {"pg_clip_high": math.inf},
        {"dual_clip_loss": math.inf},
        {"reward_clip": math.nan},
        {"behavior_low": 1.1},
        {"behavior_high": 0.9},
        {"overlong_buffer": 0},
        {"overlong_penalty": 0},
        {"max_refill": 0},
    ],
)
def test_a_value_out_of_bounds_names_its_key(minimal: dict[str, Any], keys: dict[str, Any]) -> None:
    minimal["algorithm"] = keys
    with pytest.raises(InputError) as error:
        parse_config(minimal, Path())
    assert error.value.where.startswith(f"algorithm.{next(iter(keys))}")


@pytest.mark.parametrize(
    ("unknown", "known"),
    [
        ("pg_clip_hi", "pg_clip_high"),
        ("importance_samplin", "importance_sampling"),
        ("loss_aggregation_mode", "loss_agg_mode"),
        ("num_return_sequences", "num_return_sequences_in_group"),
        ("whiten_advantage", "whiten_advantages"),
    ],
)
def test_an_unknown_key_names_the_nearest(minimal: dict[str, Any], unknown: str, known: str) -> None:
    minimal["algorithm"] = {unknown: 1}
    with pytest.raises(InputError) as error:
        parse_config(minimal, Path())
    assert error.value.where == f"algorithm.{unknown}"
    assert known in error.value.fix
