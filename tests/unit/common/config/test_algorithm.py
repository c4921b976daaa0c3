"""Presets, what a key beside them does, the clip, and every contradiction by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.loading import parse_config
from gspo.common.config.presets import PRESETS, remarks
from gspo.common.errors import InputError
from gspo_core.correction import behavior_weights

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


TRUNCATE = {"old_logprobs": "recompute", "behavior_correction": "truncate"}

REPLAY = {"old_logprobs": "recompute", "routing_replay": "learner"}


def algorithm(**keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(keys)


def test_rolls_block_pasted_under_algorithm_loads(minimal: dict[str, Any]) -> None:
    minimal["algorithm"] = yaml.safe_load(ROLL_BLOCK)
    loaded = parse_config(minimal, Path()).algorithm
    assert {key: getattr(loaded, key) for key in ROLL_VALUES} == ROLL_VALUES
    assert loaded.clip == (3e-4, 4e-4)  # the block sets no clip, and the ratio is a sequence's
    assert loaded.dual_clip == 1.4


def test_the_example_for_users_of_roll_has_that_block_with_lengths_of_its_own() -> None:
    keys = yaml.safe_load((Path(__file__).parents[4] / "examples/arithmetic/roll.yaml").read_text())["algorithm"]
    lengths = {"prompt_length": 32, "response_length": 8}
    assert keys == ROLL_VALUES | lengths | {"pg_clip": 0.2}
    assert algorithm(**keys) == algorithm(preset="roll-gspo", **lengths).model_copy(update={"preset": "gspo"})


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
        ({"objective": "cispo"}, (1.0, 4.0)),
        ({"objective": "cispo", "importance_sampling": "token"}, (1.0, 4.0)),
        ({"objective": "cispo", "pg_clip_high": 0.5}, (1.0, 0.5)),
        ({"preset": "grpo", "objective": "dppo_tv"}, (0.15, 0.15)),
        ({"preset": "grpo", "objective": "dppo_kl"}, (0.05, 0.05)),
        ({"preset": "grpo", "objective": "dppo_kl", "pg_clip": 0.1}, (0.1, 0.1)),
        ({"preset": "roll-gspo", "objective": "cispo", "dual_clip_loss": False}, (1.0, 4.0)),
        ({"preset": "roll-gspo", "objective": "clip"}, (0.2, 0.2)),
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
    assert algorithm(adv_estimator="rloo").reward_norm == "leave_one_out"
    assert algorithm(preset="roll-gspo").reward_norm is None


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_key_written_out_loads_as_the_same(preset: str) -> None:
    """The run directory holds every key with its value, and a resume reads that."""
    cispo = {"objective": "cispo", "dual_clip_loss": False}
    own = {"loss": {"path": "mine.py", "entry": "pull", "reference": True}}
    for keys in ({}, {"pg_clip": 0.1}, {"pg_clip_low": 0.1}, {"importance_sampling": "token"}, cispo, own):
        written = algorithm(preset=preset, **keys)
        assert AlgorithmConfig.model_validate(written.model_dump(mode="json")) == written


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_loss_of_ones_own_replaces_the_objective_of_a_preset_and_no_other_key(preset: str) -> None:
    plain, own = algorithm(preset=preset), algorithm(preset=preset, loss={"path": "mine.py"})
    assert own.has_own_loss and not own.clips_ratio
    assert (own.importance_sampling, own.objective, own.pg_clip, own.dual_clip) == ("seq", "clip", None, None)
    assert (own.loss_agg_mode, own.reward_norm, own.use_kl_loss) == (
        *(plain.loss_agg_mode, plain.reward_norm),
        plain.use_kl_loss,
    )


def test_the_file_of_a_loss_is_beside_the_configuration(minimal: dict[str, Any], tmp_path: Path) -> None:
    minimal["algorithm"] = {"loss": {"path": "mine.py"}}
    assert parse_config(minimal, tmp_path).algorithm.loss.path == tmp_path / "mine.py"


def test_preset_dr_grpo_divides_neither_by_a_deviation_nor_by_a_length() -> None:
    preset = algorithm(preset="dr-grpo")
    assert (preset.reward_norm, preset.reward_shift, preset.clip) == ("group", True, (0.2, 0.2))
    assert (preset.importance_sampling, preset.loss_agg_mode) == ("token", "seq-mean-token-sum-norm")


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
        ({"adv_estimator": "rloo", "reward_norm": "group"}, "algorithm.reward_norm: group contradicts adv_estimator"),
        ({"adv_estimator": "rloo", "reward_shift": True}, "algorithm.reward_shift: true changes the meaning"),
        ({"preset": "dr-grpo", "adv_estimator": "rloo"}, "algorithm.reward_shift: true changes the meaning"),
        ({"adv_estimator": "rloo", "num_return_sequences_in_group": 1}, "algorithm.num_return_sequences_in_group: 1"),
        ({"behavior_correction": "truncate"}, "algorithm.behavior_correction: truncate"),
        ({"behavior_correction": "truncate", "behavior_level": "token"}, "algorithm.behavior_correction: truncate"),
        *(({**TRUNCATE, "behavior_correction": kind, "behavior_level": "product", key: value}, named)
          for kind in ("truncate", "mask")
          for key, value, named in (("behavior_low", 0, "algorithm.behavior_low: 0.0 is below 0.01"),
                                    ("behavior_low", 0.0099, "algorithm.behavior_low: 0.0099 is below 0.01"),
                                    ("behavior_high", 101, "algorithm.behavior_high: 101.0 is above 100"))),
        ({"mask_truncated": True, "mask_truncated_completions": True},
         "algorithm.mask_truncated_completions: true keeps the rewards"),
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
        ({"objective": "cispo", "dual_clip_loss": True}, "algorithm.dual_clip_loss: true bounds the clipped ratio"),
        ({"objective": "dppo_tv"}, "algorithm.objective: dppo_tv bounds how far single tokens move"),
        ({"objective": "dppo_kl", "importance_sampling": "token", "old_logprobs": "recompute"},
         "algorithm.objective: dppo_kl measures from the policy that sampled"),
        ({"rollout_length": 6143}, "algorithm.rollout_length: 6143 is less than one branch may have"),
        ({"routing_replay": "engine", "old_logprobs": "recompute"},
         "algorithm.routing_replay: engine needs the engine's experts"),
        ({"routing_replay": "learner"}, "algorithm.routing_replay: learner replays the experts behind the old"),
        ({**REPLAY, "num_mini_batches": 1}, "algorithm.routing_replay: learner has no effect with one update a step"),
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
        {**TRUNCATE, "behavior_level": "product", "behavior_low": 0.01, "behavior_high": 100},
        {"behavior_correction": "mask", "behavior_low": 0, "behavior_high": 1e9},
        {"behavior_correction": "mask", "behavior_low": 0.999, "behavior_high": 1.001},
        {"behavior_correction": "mask", "behavior_level": "token", "behavior_low": 0.5, "behavior_high": 2.0},
        {"behavior_correction": "mask", "behavior_level": "product", "behavior_low": 0.5, "behavior_high": 2.0},
        {**TRUNCATE, "behavior_low": None, "behavior_high": 1.001},
        {**TRUNCATE, "behavior_level": "product", "behavior_low": 0.5, "behavior_high": 2.0},
    ],
)
def test_a_correction_has_bounds_that_count_by_default_those_of_its_level(keys: dict[str, Any]) -> None:
    for written in (keys, {key: value for key, value in keys.items() if not key.endswith(("low", "high"))}):
        loaded = algorithm(**written)
        assert {key: getattr(loaded, key) for key in written} == written
    if keys.get("behavior_high") in (1.001, 2.0):
        assert {key: getattr(loaded, key) for key in keys} == keys


def test_each_level_of_a_correction_masks_a_drift_by_default() -> None:
    """A drift of 0.002 for each of 400 tokens, in one of which it is 1."""
    old_BT, behavior_BT, mask_BT = torch.full((1, 400), 0.002), torch.zeros(1, 400), torch.ones(1, 400)
    old_BT[0, 0] = 1.0
    for level, num_masked in (("geometric", 400), ("token", 1), ("product", 400)):
        bounds = algorithm(behavior_correction="mask", behavior_level=level).behavior_bounds
        assert bounds is not None
        options: dict[str, Any] = {"behavior_correction": "mask", "behavior_level": level, "bounds": bounds}
        _, keep_BT = behavior_weights(old_BT, behavior_BT, mask_BT, **options)
        assert int((~keep_BT).sum()) == num_masked


@pytest.mark.parametrize(
    ("key", "before", "now", "fix"),
    [
        ("behavior_level", "sequence", "geometric", "Set geometric, which it was here, or product, which they mean"),
        ("loss_agg_mode", "seq-mean-turn-mean", "seq-mean-token-sum-turn-norm", "or seq-mean-turn-mean-token-mean"),
    ],
)
def test_a_misleading_name_is_refused_with_both_others_and_read_in_stored_runs(
    minimal: dict[str, Any], key: str, before: str, now: str, fix: str
) -> None:
    minimal["algorithm"] = {"behavior_correction": "mask", "behavior_low": 0.5, "behavior_high": 2.0, key: before}
    minimal["environment"] = {"path": "game.py"}
    with pytest.raises(InputError) as error:
        parse_config(minimal, Path())
    assert error.value.where == f"algorithm.{key}" and fix in error.value.fix and now in error.value.fix
    stored = parse_config(minimal, Path(), is_stored=True).algorithm
    assert getattr(stored, key) == now and stored.behavior_bounds == (0.5, 2.0)


REMARKED: list[tuple[dict[str, Any], str]] = [
    ({"objective": "cispo"}, "algorithm.preset: cispo"),
    ({"objective": "cispo", "importance_sampling": "token"}, "algorithm.preset: cispo"),
    ({"adv_estimator": "rloo"}, "algorithm.preset: rloo"),
    ({"adv_estimator": "rloo", "loss_agg_mode": "seq-mean-token-sum"}, "algorithm.preset: rloo"),
    (ROLL_VALUES, "ROLL's is 0.2"),
    ({"preset": "cispo"}, ""),
    ({"preset": "rloo"}, ""),
    ({"preset": "roll-gspo"}, ""),
    ({**ROLL_VALUES, "pg_clip": 0.2}, ""),
    ({**ROLL_VALUES, "reward_clip": 5}, ""),
    ({"objective": "cispo", "importance_sampling": "token", "loss_agg_mode": "token-mean"}, ""),
    ({}, ""),
]


@pytest.mark.parametrize(("keys", "line"), REMARKED, ids=str)
def test_a_name_without_its_definition_gets_one_line(keys: dict[str, Any], line: str) -> None:
    loaded = algorithm(**keys)
    lines = remarks(loaded.model_dump(), loaded.clip)
    assert len(lines) == bool(line)
    assert all(line in it for it in lines)


def test_the_presets_of_papers_have_their_objectives() -> None:
    dapo = algorithm(preset="dapo", response_length=20480)
    assert (dapo.clip, dapo.importance_sampling, dapo.loss_agg_mode) == ((0.2, 0.28), "token", "token-mean")
    assert (dapo.filter_zero_spread, dapo.overlong_buffer, dapo.num_mini_batches) == (True, 4096, 16)
    assert algorithm(preset="dapo", overlong_buffer=None).overlong_buffer is None
    assert algorithm(preset="dapo", response_length=8).overlong_buffer == 1
    cispo = algorithm(preset="cispo")
    assert (cispo.objective, cispo.clip, cispo.importance_sampling) == ("cispo", (1.0, 4.0), "token")
    assert (cispo.loss_agg_mode, cispo.reward_norm) == ("token-mean", "group")
    rloo = algorithm(preset="rloo")
    assert (rloo.reward_norm, rloo.loss_agg_mode, rloo.num_mini_batches) == ("leave_one_out", "seq-mean-token-sum", 1)


@pytest.mark.parametrize(
    ("keys", "learner"),
    [
        ({"num_mini_batches": 2}, {}),
        ({"num_mini_batches": 1, "ppo_epochs": 2}, {}),
        # A pass with dropout has other states before the routers.
        ({"num_mini_batches": 1}, {"lora": {"rank": 4, "dropout": 0.1}}),
        ({"num_mini_batches": 1}, {"model_dropout": True}),
    ],
)
def test_experts_are_replayed_where_they_could_be_others(
    minimal: dict[str, Any], keys: dict[str, Any], learner: dict[str, Any]
) -> None:
    parse_config({**minimal, "algorithm": {**REPLAY, **keys}, "learner": learner}, Path())
    with pytest.raises(InputError, match="has no effect with one update a step"):
        parse_config({**minimal, "algorithm": {**REPLAY, "num_mini_batches": 1}}, Path())


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
