"""The section `teacher`: a frozen larger model whose log-probs of the sampled tokens train the policy.

On-policy distillation. gspo_core has the formulas, the learner loads the model.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, model_validator

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.fields import ModelPath, Section
from gspo.common.errors import ConfigError

# Keys of algorithm that only change rewards, and those that only change the use of advantages.
_OF_REWARDS = ["reward_norm", "reward_shift", "reward_scale", "reward_clip", "filter_zero_spread", "overlong_buffer"]
_OF_ADVANTAGES = [
    *("importance_sampling", "objective", "pg_clip", "pg_clip_low", "pg_clip_high", "dual_clip_loss"),
    *("pg_clip_reference_length", "gamma", "whiten_advantages", "advantage_clip"),
]


class TeacherConfig(Section):
    """A larger model that the policy learns from on its own answers; without a path there is none."""

    path: ModelPath | None = Field(
        None, description="Folder of the teacher, a Hugging Face model with the policy's tokens, or its name on a hub"
    )
    coef: PositiveFloat = Field(1.0, description="Factor of the KL to the teacher")
    kl_in: Literal["advantage", "loss"] = Field(
        "advantage",
        description="Place of that KL: subtracted from each token's reward, so that a token answers for later ones "
        "too (advantage), or a loss of each token alone (loss)",
    )
    alone: bool = Field(
        False, description="Train by the teacher alone: rewards are measured and have no part in the advantages"
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the teacher")
    allow_pickle: bool = Field(False, description="Load .bin weights of the teacher, which can run code")

    @property
    def used(self) -> bool:
        """Whether there is a teacher."""
        return self.path is not None

    @property
    def trains_by_loss_alone(self) -> bool:
        """Whether the KL is a loss, and rewards have no part in the advantages."""
        return self.alone and self.kl_in == "loss"

    @model_validator(mode="after")
    def _keys_are_of_a_teacher(self) -> TeacherConfig:
        if not self.used:
            self.check_defaults("belongs to a teacher, and there is none", "Set teacher.path")
        return self

    def check_rewards(self, algorithm: AlgorithmConfig) -> None:
        """Refuse keys of `algorithm` that have no effect where rewards, or all advantages, count for nothing.

        A value of the preset is accepted.

        Raises:
            ConfigError: Names the key.
        """
        if not self.alone:
            return
        untouched = AlgorithmConfig(preset=algorithm.preset)
        has_none = self.trains_by_loss_alone and not algorithm.add_token_level_kl
        for key in _OF_REWARDS + (_OF_ADVANTAGES if has_none else []):
            value = getattr(algorithm, key)
            if value in (getattr(untouched, key), None):
                continue
            rule = "has no effect under teacher.alone: true, where rewards have no part in the advantages"
            if key in _OF_ADVANTAGES:
                rule = "has no effect under teacher.alone: true with teacher.kl_in: loss, where every advantage is 0"
            raise ConfigError(f"algorithm.{key}", value, rule, "Leave it out, or set teacher.alone: false")
