"""The section `algorithm`: the objective under the names that the field uses, and its presets.

A preset fills the keys that the user has left out; the user's own keys override it. gspo_core computes the objective,
from plain numbers that the learner reads here.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from gspo.common.config.fields import Section

RewardNorm = Literal["group", "batch", "running"]

# Clip sides by kind of ratio: GSPO's own, and those of its GRPO baseline (arXiv 2507.18071, section 5).
CLIP_DEFAULTS = {"seq": (3e-4, 4e-4), "seq_token": (3e-4, 4e-4), "token": (0.2, 0.27)}
# ROLL's 1 + 2 * pg_clip at its default clip of 0.2; at 4e-4 that formula would cut off every negative sequence.
DUAL_CLIP_DEFAULT = 1.4

PRESETS: dict[str, dict[str, Any]] = {
    "gspo": {
        "adv_estimator": "grpo",
        "importance_sampling": "seq",
        "loss_agg_mode": "seq-mean-token-mean",
        "pg_clip_low": 3e-4,
        "pg_clip_high": 4e-4,
        "num_mini_batches": 4,
        "ppo_epochs": 1,
        "use_kl_loss": False,
        "dual_clip_loss": False,
    },
    "roll-gspo": {
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
        "reward_clip": 10.0,
        "reward_norm": None,
        "reward_shift": False,
        "reward_scale": False,
        "add_token_level_kl": False,
        "pg_clip": 0.2,
    },
    "grpo": {
        "adv_estimator": "grpo",
        "importance_sampling": "token",
        "loss_agg_mode": "token-mean",
        "pg_clip_low": 0.2,
        "pg_clip_high": 0.27,
    },
}


# Length of an answer, in tokens, for which we take the paper's clip to be meant.
_CLIP_TOKENS = 4096


def fitting_clip(num_tokens: int) -> tuple[float, float]:
    """(low, high) sides of a sequence clip for answers of about so many tokens, with two digits.

    log s is a mean over the tokens. If the tokens move independently, it spreads by 1 / sqrt(length), and sides that
    grow by the same factor clip the same share of sequences. A rule of thumb: a run reports the share that it clips.
    """
    factor = math.sqrt(_CLIP_TOKENS / num_tokens)
    low, high = (float(f"{side * factor:.2g}") for side in CLIP_DEFAULTS["seq"])
    return low, high


class AlgorithmConfig(Section):
    """Group Sequence Policy Optimization and its relatives."""

    preset: Literal["gspo", "roll-gspo", "grpo"] = Field(
        "gspo", description="Preset of the keys below; explicit keys override it"
    )
    adv_estimator: Literal["grpo", "reinforce"] = Field(
        "grpo", description="grpo: rewards normalised in their group; reinforce: return-to-go without a group baseline"
    )
    importance_sampling: Literal["seq", "seq_token", "token"] = Field(
        "seq", description="Ratio of the sequence (GSPO), of the sequence with token gradients, or of each token (GRPO)"
    )
    rollout_batch_size: PositiveInt = Field(64, description="Groups (prompts) in a step")
    num_return_sequences_in_group: PositiveInt = Field(8, description="Rollouts of one prompt")
    prompt_length: PositiveInt = Field(2048, description="Longest prompt, in tokens")
    response_length: PositiveInt = Field(4096, description="Longest answer, in tokens")
    num_mini_batches: PositiveInt = Field(4, description="Optimizer steps that a batch is cut into")
    ppo_epochs: PositiveInt = Field(1, description="Passes over a batch")
    pg_clip: PositiveFloat | None = Field(None, le=1, description="Both sides of the clip at once")
    pg_clip_low: PositiveFloat | None = Field(
        None, le=1, description="Ratios below 1 - pg_clip_low are clipped; 3e-4 for seq, 0.2 for token"
    )
    pg_clip_high: PositiveFloat | None = Field(
        None, description="Ratios above 1 + pg_clip_high are clipped; 4e-4 for seq, 0.27 for token"
    )
    dual_clip_loss: bool | float = Field(
        False, description="Bound the loss of negative advantages at c times the advantage; true: c = 1.4"
    )
    loss_agg_mode: Literal["seq-mean-token-mean", "seq-mean-token-sum", "token-mean", "seq-mean-token-sum-norm"] = (
        Field("seq-mean-token-mean", description="Aggregation of token losses")
    )
    old_logprobs: Literal["inference", "recompute"] = Field(
        "inference",
        description="Denominator of the ratio: the engine's log-probs, or a forward pass at the step's first weights",
    )
    behavior_correction: Literal["none", "truncate", "mask"] = Field(
        "none", description="Under recompute: weight advantages by old over behavior, truncated or masked"
    )
    behavior_level: Literal["sequence", "token"] = Field(
        "sequence", description="Weight of each sequence, by its mean log-ratio, or of each token"
    )
    behavior_low: float = Field(0.5, ge=0, le=1, description="Lower bound of that weight (mask)")
    behavior_high: float = Field(2.0, ge=1, description="Upper bound of that weight (mask and truncate)")
    use_kl_loss: bool = Field(False, description="Add a KL term to the original model to the loss")
    kl_loss_coef: NonNegativeFloat = Field(0.001, description="Factor of that term")
    kl_kind: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator of that term")
    add_token_level_kl: bool = Field(
        False, description="Subtract kl_coef times k1 to the reference from each token's reward"
    )
    kl_coef: NonNegativeFloat = Field(0.001, description="Factor of that subtraction")
    reward_norm: RewardNorm | None = Field(
        None, description="Moments that rewards are normalised with; group under adv_estimator: grpo"
    )
    reward_shift: bool = Field(False, description="Only subtract the mean")
    reward_scale: bool = Field(False, description="Only divide by the standard deviation")
    reward_clip: PositiveFloat | None = Field(None, description="Bound of a normalised reward")
    gamma: float = Field(1.0, gt=0, le=1, description="Discount of the return-to-go; under reinforce alone")
    whiten_advantages: bool = Field(False, description="Normalise advantages over all tokens of the batch")
    advantage_clip: PositiveFloat | None = Field(None, description="Bound of an advantage")
    mask_truncated: bool = Field(False, description="Leave truncated answers out")
    overlong_buffer: PositiveInt | None = Field(
        None, description="Tokens before response_length in which the reward decreases; null: no penalty"
    )
    overlong_penalty: PositiveFloat = Field(
        1.0, description="Penalty at response_length; it grows linearly over the buffer"
    )
    filter_zero_spread: bool = Field(False, description="Replace groups with equal rewards")
    max_refill: PositiveInt = Field(
        10,
        description="Batches of groups that may fail or be filtered for one step. Then the step uses the existing "
        "groups, or the run ends if there are none",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, keys: Any) -> Any:
        if not isinstance(keys, dict) or keys.get("preset", "gspo") not in PRESETS:
            return keys
        preset = PRESETS[keys.get("preset", "gspo")]
        return {
            **{key: value for key, value in preset.items() if key not in _replaced(keys, preset)},
            **_implied(keys, preset),
            **keys,
        }

    @model_validator(mode="after")
    def _clip_is_set_one_way(self) -> AlgorithmConfig:
        if self.pg_clip is not None and (self.pg_clip_low is not None or self.pg_clip_high is not None):
            raise self.wrong(
                "pg_clip", "sets both sides, and pg_clip_low or pg_clip_high is set too", "Keep one of the two ways"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise self.wrong("dual_clip_loss", "as c must be above 1", "Set a larger one, true or false")
        return self

    @model_validator(mode="after")
    def _rewards_have_one_norm(self) -> AlgorithmConfig:
        if self.reward_shift and self.reward_scale:
            raise self.wrong(
                "reward_shift", "with reward_scale: true is both 'only'", "Leave both out to shift and scale"
            )
        if self.adv_estimator == "grpo" and self.reward_norm != "group":
            raise self.wrong(
                "reward_norm",
                "contradicts adv_estimator: grpo, which means group",
                "Leave reward_norm out, or set adv_estimator: reinforce",
            )
        if (self.reward_shift or self.reward_scale) and self.reward_norm is None:
            key = "reward_shift" if self.reward_shift else "reward_scale"
            raise self.wrong(key, "needs moments, and reward_norm is null", "Set it to group, batch or running")
        if self.adv_estimator == "grpo" and self.gamma != 1:
            raise self.wrong(
                "gamma",
                "discounts the return of reinforce; under adv_estimator: grpo every token has its answer's advantage",
                "Leave gamma out, or set adv_estimator: reinforce",
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> AlgorithmConfig:
        if self.num_return_sequences_in_group > 1:
            return self
        if self.reward_norm == "group":
            raise self.wrong(
                "num_return_sequences_in_group",
                "leaves nothing to compare within a group: every advantage would be 0",
                "Set at least 2, or adv_estimator: reinforce with another reward_norm",
            )
        if self.filter_zero_spread:
            raise self.wrong(
                "filter_zero_spread",
                "drops every group where num_return_sequences_in_group is 1, since one reward has no spread",
                "Set at least 2, or leave filter_zero_spread out",
            )
        return self

    @model_validator(mode="after")
    def _correction_has_something_to_correct(self) -> AlgorithmConfig:
        if self.behavior_correction != "none" and self.old_logprobs != "recompute":
            raise self.wrong(
                "behavior_correction",
                "compares recomputed log-probs with the engine's",
                "Set old_logprobs: recompute, or behavior_correction: none",
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> AlgorithmConfig:
        if self.num_rollouts < self.num_mini_batches:
            raise self.wrong(
                "num_mini_batches",
                f"is more than the {self.num_rollouts} rollouts of a step, and each needs one",
                "Lower it",
            )
        if self.overlong_buffer is not None and self.overlong_buffer > self.response_length:
            raise self.wrong(
                "overlong_buffer",
                f"is longer than response_length {self.response_length}, at whose end it lies",
                "Lower it",
            )
        return self

    @property
    def clip(self) -> tuple[float, float]:
        """(low, high) sides of the clip, below and above a ratio of 1."""
        if self.pg_clip is not None:
            return self.pg_clip, self.pg_clip
        low, high = CLIP_DEFAULTS[self.importance_sampling]
        return self.pg_clip_low or low, self.pg_clip_high or high

    @property
    def dual_clip(self) -> float | None:
        """The bound c of dual clip, None where it is off."""
        if isinstance(self.dual_clip_loss, bool):
            return DUAL_CLIP_DEFAULT if self.dual_clip_loss else None
        return float(self.dual_clip_loss)

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the first policy is needed."""
        return self.use_kl_loss or self.add_token_level_kl

    @property
    def num_rollouts(self) -> int:
        """Rollouts of a step."""
        return self.rollout_batch_size * self.num_return_sequences_in_group


def _replaced(keys: dict[str, Any], preset: dict[str, Any]) -> set[str]:
    """Keys of a preset that another key of the user replaces."""
    replaced = set()
    if "pg_clip" in keys:
        replaced |= {"pg_clip_low", "pg_clip_high"}
    if {"pg_clip_low", "pg_clip_high"} & keys.keys():
        replaced.add("pg_clip")
    if "importance_sampling" in keys and "pg_clip" not in preset:
        # The clip follows the ratio's kind: 3e-4 on token ratios would clip nearly everything.
        replaced |= {"pg_clip_low", "pg_clip_high"}
    if "adv_estimator" in keys:
        replaced.add("reward_norm")
    return replaced


def _implied(keys: dict[str, Any], preset: dict[str, Any]) -> dict[str, Any]:
    """Keys whose value follows from another one's."""
    implied: dict[str, Any] = {}
    if keys.get("adv_estimator", preset["adv_estimator"]) == "grpo":
        implied["reward_norm"] = "group"
    sides = {"pg_clip_low", "pg_clip_high"}
    if "pg_clip" in preset and "pg_clip" not in keys and sides & keys.keys():
        implied |= dict.fromkeys(sides, preset["pg_clip"])
    return implied
