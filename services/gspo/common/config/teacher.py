"""The section `teacher`: a frozen larger model whose log-probs of the sampled tokens train the policy.

On-policy distillation. gspo_core has the formulas; the learner loads the model, or the reward service asks a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.fields import ON_RESUME, HttpAddress, ModelPath, Owner, Section, no_password, of_kind
from gspo.common.errors import NO_VALUE, ConfigError

# Keys of algorithm that only change rewards, and those that only change the use of advantages.
_OF_REWARDS = ["reward_norm", "reward_shift", "reward_scale", "reward_clip", "filter_zero_spread", "overlong_buffer"]
_OF_ADVANTAGES = [
    *("importance_sampling", "ratio_of", "objective", "pg_clip", "pg_clip_low", "pg_clip_high", "dual_clip_loss"),
    *("pg_clip_reference_length", "gamma", "whiten_advantages", "advantage_clip"),
]
_FILES, _SERVER = of_kind("teacher.path", "path"), of_kind("teacher.address", "address")


class TeacherConfig(Section):
    """A larger model that the policy learns from on its own answers; without path and address there is none."""

    KINDS = ("path", "address")
    OWNER = Owner("teacher.path or teacher.address", attrgetter("used"), KINDS)
    path: ModelPath | None = Field(
        None, description="Folder of the teacher, a Hugging Face model with the policy's tokens, or its name on a hub"
    )
    address: Annotated[HttpAddress, no_password("GSPO_TEACHER_API_KEY")] | None = Field(
        None,
        description="URL of a vLLM server (`vllm serve TEACHER`), such as http://teacher:8000, in place of path. The "
        "reward service asks it; the key is in GSPO_TEACHER_API_KEY, if it wants one",
        json_schema_extra=ON_RESUME,
    )
    model: Annotated[str | None, _SERVER] = Field(
        None, description="Name of the teacher at its address, as `/v1/models` lists it"
    )
    timeout_s: Annotated[PositiveFloat, _SERVER] = Field(
        600.0,
        description="Longest that the address may take for one answer's log-probs, all tries together; then the run "
        "ends, and can be resumed",
        json_schema_extra=ON_RESUME,
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
    trust_remote_code: Annotated[bool, _FILES] = Field(False, description="Run Python code that comes with the teacher")
    allow_pickle: Annotated[bool, _FILES] = Field(
        False, description="Load .bin weights of the teacher, which can run code"
    )

    @property
    def trains_by_loss_alone(self) -> bool:
        """Whether the KL is a loss, and rewards have no part in the advantages."""
        return self.alone and self.kl_in == "loss"

    @model_validator(mode="after")
    def _server_has_a_name(self) -> TeacherConfig:
        if self.address is not None and self.model is None:
            rule = "is missing: a server that serves another model must not teach"
            raise ConfigError("model", NO_VALUE, rule, "Set it to the name that `vllm serve` was given")
        return self

    def check_temperature(self, temperature: float, key: str) -> None:
        """Refuse another temperature than 1 beside an address.

        A server gives log-probs of the logits as they are. Those of another temperature need every logit.

        Raises:
            ConfigError: Names the key.
        """
        if self.address is not None and temperature != 1:
            raise ConfigError(
                key,
                temperature,
                "needs the teacher's log-probs at that temperature, and a vLLM server (teacher.address) gives those of "
                "a prompt at temperature 1 alone",
                "Set it to 1, or teacher.path: the learner then scores at the sampling's temperature",
            )

    def check_rewards(self, algorithm: AlgorithmConfig) -> None:
        """Refuse keys of `algorithm` that have no effect where rewards, or all advantages, count for nothing.

        A value of the preset is accepted.

        Raises:
            ConfigError: Names the key.
        """
        if not self.alone:
            return
        _refuse_set(
            _idle_without_rewards(algorithm),
            algorithm,
            "has no effect under teacher.alone: true, where rewards have no part in the advantages",
        )
        if self.trains_by_loss_alone and not algorithm.add_token_level_kl:
            _refuse_set(
                _idle_without_advantages(algorithm),
                algorithm,
                "has no effect under teacher.alone: true with teacher.kl_in: loss, where every advantage is 0",
            )


def _idle_without_rewards(algorithm: AlgorithmConfig) -> list[str]:
    """Keys that have no effect where rewards have no part; the estimator comes before the norm that it implies."""
    # reinforce alone has a discount, and one rollout of a prompt.
    allows = algorithm.gamma != 1 or algorithm.num_return_sequences_in_group == 1
    is_needed = algorithm.adv_estimator == "reinforce" and allows
    return [*_OF_REWARDS] if is_needed else ["adv_estimator", *_OF_REWARDS]


def _idle_without_advantages(algorithm: AlgorithmConfig) -> list[str]:
    """Keys that have no effect where every advantage is 0."""
    masks = algorithm.behavior_correction == "mask" and algorithm.old_logprobs == "recompute"
    if masks:  # takes tokens out of every loss
        return _OF_ADVANTAGES
    needs_old = algorithm.has_own_loss or algorithm.routing_replay == "learner"
    return [*_OF_ADVANTAGES, "behavior_correction", *([] if needs_old else ["old_logprobs"])]


def _refuse_set(keys: Sequence[str], algorithm: AlgorithmConfig, rule: str) -> None:
    """Refuse another value of these keys than that of the preset."""
    preset = AlgorithmConfig(preset=algorithm.preset)
    for key in keys:
        value = getattr(algorithm, key)
        if value not in (getattr(preset, key), None):
            raise ConfigError(f"algorithm.{key}", value, rule, "Leave it out, or set teacher.alone: false")
