"""The section `algorithm`: the objective under the names that the field uses.

gspo_core computes it, from plain numbers that the learner reads here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    model_validator,
)

from gspo.common.config.fields import FilePath, Owner, Section, is_stored
from gspo.common.config.presets import (
    BEHAVIOR_BOUNDS,
    CLIP_DEFAULTS,
    DUAL_CLIP_DEFAULT,
    ESTIMATOR_NORMS,
    OBJECTIVE_BOUNDS,
    OBJECTIVE_KEYS,
    PRODUCT_BOUNDS,
    filled_from_preset,
)
from gspo.common.errors import ConfigError

RewardNorm = Literal["group", "batch", "running", "leave_one_out"]
_KL_LOSS = Owner("algorithm.use_kl_loss: true", attrgetter("use_kl_loss"), switch="use_kl_loss")
_TOKEN_KL = Owner("algorithm.add_token_level_kl: true", attrgetter("add_token_level_kl"), switch="add_token_level_kl")
_OVERLONG = Owner("algorithm.overlong_buffer", lambda section: section.overlong_buffer is not None)
_CORRECTION = Owner("algorithm.behavior_correction: mask", lambda section: section.behavior_correction != "none")
_LOWER_BOUND = Owner(
    "algorithm.behavior_correction: mask",
    lambda section: section.behavior_correction != "none" and not section.only_caps,
)
_RETURNS = Owner("algorithm.adv_estimator: reinforce", lambda section: section.adv_estimator not in ESTIMATOR_NORMS)
_SEQUENCES = Owner("algorithm.importance_sampling: seq", lambda section: section.importance_sampling != "token")
_SEQUENCE_CLIP = Owner(
    "algorithm.objective: clip and algorithm.importance_sampling: seq", attrgetter("clips_sequences")
)


_NO_OWN_LOSS = Owner(
    "algorithm.loss.path, whose function is the whole loss of a token",
    lambda section: not section.has_own_loss,
    is_rival=True,
)


class LossConfig(Section):
    """A loss of your own, in place of ratio, objective and clip; the learner's process runs its code."""

    path: FilePath | None = Field(
        None, description="Python file with the loss of each token; the run directory keeps a copy, loss.py"
    )
    entry: str = Field("loss", description="Name of the function in that file")
    reference: bool = Field(
        False, description="Keep the original model, and pass its log-probs to the function as reference_BT"
    )

    OWNER = Owner("algorithm.loss.path", lambda loss: loss.path is not None, ("path",))


class AlgorithmConfig(Section):
    """Group Sequence Policy Optimization and its relatives."""

    OWNED: ClassVar[Mapping[str, tuple[Owner, ...]]] = dict.fromkeys(OBJECTIVE_KEYS, (_NO_OWN_LOSS,))
    RENAMED: ClassVar[Mapping[str, tuple[str, str, str, str]]] = {
        "behavior_level": (
            "sequence",
            "geometric",
            "has two meanings: the geometric mean of the tokens' weights here, and their product in TRL and verl",
            "Set geometric, which it was here, or product, which they mean",
        ),
        "loss_agg_mode": (
            "seq-mean-turn-mean",
            "seq-mean-token-sum-turn-norm",
            "took no mean over a turn: it divides the sum over a conversation's tokens by its number of turns",
            "Set seq-mean-token-sum-turn-norm, which it was, or seq-mean-turn-mean-token-mean, a mean over turns",
        ),
    }
    preset: Literal["gspo", "roll-gspo", "grpo", "dr-grpo", "dapo", "cispo", "rloo"] = Field(
        "gspo", description="Preset of the keys below; explicit keys override it"
    )
    adv_estimator: Literal["grpo", "rloo", "reinforce"] = Field(
        "grpo",
        description="Rewards normalised in their group (grpo), less the mean of the group's other rewards (rloo), or a "
        "return-to-go without a group baseline (reinforce)",
    )
    importance_sampling: Literal["seq", "seq_token", "token"] = Field(
        "seq", description="Ratio of the sequence (GSPO), of the sequence with token gradients, or of each token (GRPO)"
    )
    ratio_of: Annotated[Literal["rollout", "branch"], _SEQUENCES] = Field(
        "rollout", description="Tokens that share a ratio of seq or seq_token: the whole rollout's, or each branch's"
    )
    objective: Literal["clip", "cispo", "dppo_tv", "dppo_kl"] = Field(
        "clip",
        description="Loss of a token: its clipped ratio (clip), its log-prob with a clipped weight (cispo), or its "
        "ratio unless it has moved beyond a divergence (dppo_tv, dppo_kl)",
    )
    rollout_batch_size: PositiveInt = Field(64, description="Groups (prompts) in a step")
    num_return_sequences_in_group: PositiveInt = Field(8, description="Rollouts of one prompt")
    prompt_length: PositiveInt = Field(2048, description="Longest prompt, in tokens")
    response_length: PositiveInt = Field(4096, description="Longest answer, in tokens")
    rollout_length: PositiveInt | None = Field(
        None,
        description="Tokens of all branches of a rollout together, contexts included; null: those of one branch, "
        "prompt_length + response_length",
    )
    num_mini_batches: PositiveInt = Field(4, description="Optimizer steps that a batch is cut into")
    ppo_epochs: PositiveInt = Field(1, description="Passes over a batch")
    pg_clip: PositiveFloat | None = Field(None, le=1, description="Both sides of the clip at once")
    pg_clip_low: PositiveFloat | None = Field(
        None,
        le=1,
        description="Ratios below 1 - pg_clip_low are clipped; 3e-4 for seq, 0.2 for token. Under dppo a divergence",
    )
    pg_clip_high: PositiveFloat | None = Field(
        None, description="Ratios above 1 + pg_clip_high are clipped; 4e-4 for seq, 0.27 for token. Under dppo as above"
    )
    pg_clip_reference_length: Annotated[PositiveInt | None, _SEQUENCE_CLIP] = Field(
        None,
        description="Answer length, in tokens, that the sides of the clip are meant for. An answer of L tokens has "
        "sides sqrt(pg_clip_reference_length / L) times as wide. null: the same for every length, as in the paper",
    )
    dual_clip_loss: bool | float = Field(
        False, description="Bound the loss of negative advantages at c times the advantage; true: c = 1.4"
    )
    loss_agg_mode: Literal[
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "token-mean",
        "seq-mean-token-sum-norm",
        "seq-mean-token-sum-turn-norm",
        "seq-mean-turn-mean-token-mean",
    ] = Field("seq-mean-token-mean", description="Aggregation of token losses")
    old_logprobs: Literal["inference", "recompute"] = Field(
        "inference",
        description="Denominator of the ratio: the engine's log-probs, or a forward pass at the step's first weights",
    )
    routing_replay: Literal["none", "learner", "engine"] = Field(
        "none",
        description="Experts of a mixture in a step's passes: those of the present router (none), or of the pass of "
        "old_logprobs: recompute (learner). engine is an error that says why",
    )
    behavior_correction: Literal["none", "truncate", "mask"] = Field(
        "none",
        description="Weight advantages by old over behavior (recompute alone), truncated or masked. Under inference, "
        "mask compares the present policy with behavior",
    )
    behavior_level: Annotated[Literal["token", "geometric", "product"], _CORRECTION] = Field(
        "geometric",
        description="Weight of each token, of each sequence by the geometric mean over its tokens, or of each sequence "
        "by their product",
    )
    behavior_low: Annotated[float | None, _LOWER_BOUND] = Field(
        None,
        ge=0,
        le=1,
        description="Lower bound of that weight (mask, and truncate of a product); 0.999 for geometric, else 0.5. At "
        "least 0.01 for a product",
    )
    behavior_high: Annotated[float | None, _CORRECTION] = Field(
        None,
        ge=1,
        description="Upper bound of that weight; 1.001 for geometric, else 2. At most 100 for a product",
    )
    use_kl_loss: bool = Field(False, description="Add a KL term to the original model to the loss")
    kl_loss_coef: Annotated[NonNegativeFloat, _KL_LOSS] = Field(0.001, description="Factor of that term")
    kl_kind: Annotated[Literal["k1", "k2", "k3"], _KL_LOSS] = Field("k3", description="Estimator of that term")
    entropy_coef: NonNegativeFloat = Field(0.0, description="Factor of an entropy bonus in the loss")
    add_token_level_kl: bool = Field(
        False, description="Subtract kl_coef times k1 to the reference from each token's reward"
    )
    kl_coef: Annotated[NonNegativeFloat, _TOKEN_KL] = Field(0.001, description="Factor of that subtraction")
    reward_norm: RewardNorm | None = Field(
        None,
        description="Moments that rewards are normalised with. adv_estimator: grpo means group, rloo leave_one_out",
    )
    reward_shift: bool = Field(False, description="Only subtract the mean")
    reward_scale: bool = Field(False, description="Only divide by the standard deviation")
    reward_clip: PositiveFloat | None = Field(None, description="Bound of a normalised reward")
    gamma: Annotated[float, _RETURNS] = Field(
        1.0, gt=0, le=1, description="Discount of the return-to-go; under reinforce alone"
    )
    whiten_advantages: bool = Field(False, description="Normalise advantages over all tokens of the batch")
    advantage_clip: PositiveFloat | None = Field(None, description="Bound of an advantage")
    mask_truncated: bool = Field(False, description="Leave truncated answers out, with their rewards")
    mask_truncated_completions: bool = Field(
        False,
        description="Mask the loss of truncated answers alone, as TRL: their rewards stay in their groups' moments",
    )
    overlong_buffer: PositiveInt | None = Field(
        None, description="Tokens before response_length in which the reward decreases; null: no penalty"
    )
    overlong_penalty: Annotated[PositiveFloat, _OVERLONG] = Field(
        1.0, description="Penalty at response_length; it grows linearly over the buffer"
    )
    filter_zero_spread: bool = Field(False, description="Replace groups with equal rewards")
    max_refill: PositiveInt = Field(
        10,
        description="Batches of groups that may fail or be filtered for one step. Then the step uses the existing "
        "groups, or the run ends if there are none",
    )
    loss: LossConfig = Field(default_factory=LossConfig)

    @model_validator(mode="wrap")
    @classmethod
    def _fill_from_preset(cls, keys: Any, parsed: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Keys of the preset do not count as written where another section has an owner of theirs."""
        if not isinstance(keys, dict):
            return parsed(keys)
        if is_stored(info) and keys.get("behavior_correction", "none") == "none":
            # Older runs have bounds there too, whose default was another one.
            keys = {key: value for key, value in keys.items() if not key.startswith("behavior_")}
        section = parsed(filled_from_preset(keys))
        section.model_fields_set.intersection_update(keys)
        return section

    def default_of(self, key: str) -> Any:
        """As in Section: that of the preset, or of a loss of one's own."""
        return getattr(type(self).model_validate({"preset": self.preset, "loss": self.loss.model_dump()}), key)

    def problems(self) -> Iterator[ConfigError]:
        of_update = chain(self._objective_problems(), self._reward_problems())
        return chain(of_update, self._correction_problems(), self._other_problems())

    def _objective_problems(self) -> Iterator[ConfigError]:
        if self.pg_clip is not None and (self.pg_clip_low is not None or self.pg_clip_high is not None):
            yield self.wrong(
                "pg_clip", "sets both sides, and pg_clip_low or pg_clip_high is set too", "Keep one of the two ways"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            yield self.wrong("dual_clip_loss", "as c must be above 1", "Set a larger one, true or false")
        if self.objective != "clip" and self.dual_clip is not None:
            yield self.wrong(
                "dual_clip_loss",
                f"bounds the clipped ratio, and objective: {self.objective} has bounds of its own",
                "Leave it out, or set objective: clip",
            )
        if not self.bounds_divergence:
            return
        if self.importance_sampling != "token":
            yield self.wrong(
                "objective",
                f"bounds how far single tokens move, and importance_sampling is {self.importance_sampling}",
                "Set importance_sampling: token",
            )
        if self.old_logprobs != "inference":
            yield self.wrong(
                "objective",
                "measures from the policy that sampled, and old_logprobs: recompute puts a later one in its place",
                "Set old_logprobs: inference",
            )

    def _reward_problems(self) -> Iterator[ConfigError]:
        if self.reward_shift and self.reward_scale:
            yield self.wrong(
                "reward_shift", "with reward_scale: true is both 'only'", "Leave both out to shift and scale"
            )
        norm = ESTIMATOR_NORMS.get(self.adv_estimator, self.reward_norm)
        if self.reward_norm != norm:
            yield self.wrong(
                "reward_norm",
                f"contradicts adv_estimator: {self.adv_estimator}, which means {norm}",
                "Leave reward_norm out, or set adv_estimator: reinforce",
            )
        key = "reward_shift" if self.reward_shift else "reward_scale"
        if getattr(self, key) and self.reward_norm is None:
            yield self.wrong(key, "needs moments, and reward_norm is null", "Set it to group, batch or running")
        if getattr(self, key) and self.reward_norm == "leave_one_out":
            yield self.wrong(
                key,
                "changes the meaning of moments, and reward_norm leave_one_out only subtracts a mean",
                "Leave it out",
            )
        if self.num_return_sequences_in_group > 1:
            return
        if self.reward_norm in ("group", "leave_one_out"):
            yield self.wrong(
                "num_return_sequences_in_group",
                "leaves nothing to compare within a group: every advantage would be 0",
                "Set at least 2, or adv_estimator: reinforce with another reward_norm",
            )
        if self.filter_zero_spread:
            yield self.wrong(
                "filter_zero_spread",
                "drops every group where num_return_sequences_in_group is 1, since one reward has no spread",
                "Set at least 2, or leave filter_zero_spread out",
            )

    def _correction_problems(self) -> Iterator[ConfigError]:
        if self.behavior_correction == "truncate" and self.old_logprobs != "recompute":
            yield self.wrong(
                "behavior_correction",
                "weights by recomputed log-probs over the engine's, and that weight is the ratio under inference",
                "Set old_logprobs: recompute, or objective: cispo, whose clip truncates it",
            )
        if self.behavior_level != "product" or self.behavior_bounds is None:
            return
        lowest, highest = PRODUCT_BOUNDS
        low, high = self.behavior_bounds
        if low < lowest:
            yield self.wrong(
                "behavior_low",
                f"is below {lowest:g}, and behavior_level: product gives long answers weights that small",
                f"Set it to at least {lowest:g}, or set behavior_level: geometric",
            )
        if high > highest:
            yield self.wrong(
                "behavior_high",
                f"is above {highest:g}, and behavior_level: product gives long answers weights that large",
                f"Set it to at most {highest:g}, or set behavior_level: geometric",
            )

    def _other_problems(self) -> Iterator[ConfigError]:
        if self.mask_truncated and self.mask_truncated_completions:
            yield self.wrong(
                "mask_truncated_completions",
                "keeps the rewards of truncated answers, and mask_truncated: true leaves them out",
                "Leave one of the two out",
            )
        if self.routing_replay == "engine":
            yield self.wrong(
                "routing_replay",
                "needs the engine's experts. vLLM's enable_return_routed_experts needs Model Runner V2, and that needs "
                "Triton. It returns experts only with a finished request, and rollouts go on over pushes of new "
                "weights. They are 384 bytes a token for Qwen3-30B-A3B: 48 layers of 8 experts",
                "Set it to learner, which replays the experts of the step's first weights",
            )
        if self.routing_replay == "learner" and self.old_logprobs != "recompute":
            yield self.wrong(
                "routing_replay",
                "replays the experts behind the old log-probs, and under old_logprobs: inference these are the "
                "engine's, with experts that the learner does not know",
                "Set old_logprobs: recompute, or routing_replay: none",
            )
        if self.num_rollouts < self.num_mini_batches:
            yield self.wrong(
                "num_mini_batches",
                f"is more than the {self.num_rollouts} rollouts of a step, and each needs one",
                "Lower it",
            )
        if self.rollout_length is not None and self.rollout_length < self.longest_branch:
            yield self.wrong(
                "rollout_length",
                f"is less than one branch may have, prompt_length + response_length = {self.longest_branch}",
                f"Set at least {self.longest_branch}, or leave it out",
            )
        if self.overlong_buffer is not None and self.overlong_buffer > self.response_length:
            yield self.wrong(
                "overlong_buffer",
                f"is longer than response_length {self.response_length}, at whose end it lies",
                "Lower it",
            )

    @property
    def longest_branch(self) -> int:
        """Tokens of the longest prompt with the longest answer: the most that the engine reads at once."""
        return self.prompt_length + self.response_length

    @property
    def longest_rollout(self) -> int:
        """Tokens of all branches of a rollout, at most: those that the learner reads in one micro-batch."""
        return self.rollout_length or self.longest_branch

    @property
    def longest_answer(self) -> int:
        """Tokens of a rollout after its prompt, at most, with the contexts of further branches."""
        return self.rollout_length or self.response_length

    @property
    def clip(self) -> tuple[float, float]:
        """(low, high) sides of the clip, below and above a ratio of 1; under dppo divergences."""
        if self.pg_clip is not None:
            return self.pg_clip, self.pg_clip
        low, high = OBJECTIVE_BOUNDS.get(self.objective, CLIP_DEFAULTS[self.importance_sampling])
        return self.pg_clip_low or low, self.pg_clip_high or high

    @property
    def has_own_loss(self) -> bool:
        """Whether the loss of a token is the user's function."""
        return self.loss.path is not None

    @property
    def clips_ratio(self) -> bool:
        """Whether a token or a sequence is taken out by its ratio."""
        return self.objective == "clip" and not self.has_own_loss

    @property
    def clips_sequences(self) -> bool:
        """Whether the clip takes out whole sequences, by their own ratios."""
        return self.clips_ratio and self.importance_sampling != "token"

    @property
    def bounds_divergence(self) -> bool:
        """Whether the bounds are divergences of a token, and no sides of a ratio."""
        return self.objective.startswith("dppo")

    @property
    def dual_clip(self) -> float | None:
        """The bound c of dual clip, None where it is off."""
        if isinstance(self.dual_clip_loss, bool):
            return DUAL_CLIP_DEFAULT if self.dual_clip_loss else None
        return float(self.dual_clip_loss)

    @property
    def behavior_bounds(self) -> tuple[float, float] | None:
        """(lowest, highest) weight of the behavior correction; None without one."""
        if self.behavior_correction == "none":
            return None
        low, high = BEHAVIOR_BOUNDS[self.behavior_level]
        low = low if self.behavior_low is None else self.behavior_low
        return 0.0 if self.only_caps else low, high if self.behavior_high is None else self.behavior_high

    @property
    def averages_turns(self) -> bool:
        """Whether the loss is a mean over the turns of each rollout."""
        return self.loss_agg_mode == "seq-mean-turn-mean-token-mean"

    @property
    def weighs_turns(self) -> bool:
        """Whether the number of a rollout's turns, or their lengths, have a part in the loss."""
        return self.averages_turns or self.loss_agg_mode == "seq-mean-token-sum-turn-norm"

    @property
    def only_caps(self) -> bool:
        """Whether the correction has no lower bound: one would raise the weight of tokens that the policy moved from.

        A product falls with an answer's length too, and has both.
        """
        return self.behavior_correction == "truncate" and self.behavior_level != "product"

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a training step."""
        return self.num_mini_batches * self.ppo_epochs

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the first policy is needed."""
        return self.use_kl_loss or self.add_token_level_kl or self.loss.reference

    @property
    def num_rollouts(self) -> int:
        """Rollouts of a step."""
        return self.rollout_batch_size * self.num_return_sequences_in_group

    def divides_over(self, num_parts: int) -> bool:
        """Whether every mini-batch has as many rollouts for each of so many ranks, or groups of ranks."""
        return not self.num_rollouts % (self.num_mini_batches * num_parts)
