"""The section `teacher`: a frozen larger model whose log-probs of the sampled tokens train the policy.

On-policy distillation. gspo_core has the formulas; the learner loads the model, or the reward service asks a server.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat

from gspo.common.config.fields import ON_RESUME, HttpAddress, ModelPath, Owner, Section, no_password, of_kind
from gspo.common.errors import NO_VALUE, ConfigError

if TYPE_CHECKING:
    from gspo.common.config.schema import Config

_FILES, _SERVER = of_kind("teacher.path", "path"), of_kind("teacher.address", "address")
_IN_ADVANTAGE = Owner("teacher.kl_in: advantage", lambda teacher: teacher.kl_in == "advantage")


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
    kl_discount: Annotated[float | None, _IN_ADVANTAGE] = Field(
        None,
        ge=0,
        le=1,
        description="Discount of that KL in the advantage, for each token further on; 0: a token answers for its own "
        "KL alone (on-policy distillation of Thinking Machines). null: algorithm.gamma",
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

    def problems(self) -> Iterator[ConfigError]:
        if self.address is not None and self.model is None:
            rule = "is missing: a server that serves another model must not teach"
            yield ConfigError("model", NO_VALUE, rule, "Set it to the name that `vllm serve` was given")

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


def _has_advantages(config: Config) -> bool:
    return not config.teacher.trains_by_loss_alone or config.algorithm.add_token_level_kl


def _needs_estimator(config: Config) -> bool:
    """Whether rewards count, or the estimator is the only one with a discount, or for one rollout of a prompt."""
    algorithm = config.algorithm
    is_needed = algorithm.gamma != 1 or algorithm.num_return_sequences_in_group == 1
    return not config.teacher.alone or (algorithm.adv_estimator == "reinforce" and is_needed)


def _masks_tokens(config: Config) -> bool:
    """Whether there are advantages, or the correction takes tokens out of every loss."""
    algorithm = config.algorithm
    masks = algorithm.behavior_correction == "mask" and algorithm.old_logprobs == "recompute"
    return _has_advantages(config) or masks


def _needs_old_logprobs(config: Config) -> bool:
    algorithm = config.algorithm
    return _masks_tokens(config) or algorithm.has_own_loss or algorithm.routing_replay == "learner"


_REWARDS = "teacher.alone: true, where rewards have no part in the advantages"
_ADVANTAGES = "teacher.alone: true with teacher.kl_in: loss, where every advantage is 0"
_OF_REWARDS = ("reward_norm", "reward_shift", "reward_scale", "reward_clip", "filter_zero_spread", "overlong_buffer")
_OF_ADVANTAGES = (
    *("importance_sampling", "ratio_of", "objective", "pg_clip", "pg_clip_low", "pg_clip_high", "dual_clip_loss"),
    *("pg_clip_reference_length", "gamma", "whiten_advantages", "advantage_clip"),
)
# Keys of algorithm that have no effect where rewards, or all advantages, count for nothing.
BESIDE_TEACHER: dict[str, tuple[Owner, ...]] = {
    f"algorithm.{key}": (Owner(text, is_there, is_rival=True),)
    for keys, text, is_there in (
        (("adv_estimator",), _REWARDS, _needs_estimator),
        (_OF_REWARDS, _REWARDS, lambda config: not config.teacher.alone),
        (_OF_ADVANTAGES, _ADVANTAGES, _has_advantages),
        (("behavior_correction",), _ADVANTAGES, _masks_tokens),
        (("old_logprobs",), _ADVANTAGES, _needs_old_logprobs),
    )
    for key in keys
}
