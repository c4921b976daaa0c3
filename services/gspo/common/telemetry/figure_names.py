"""The names of a step's figures (docs/metrics.md has their meanings), for rules that a user writes."""

import re

# Of the evaluations on the first held-out file, in the steps that have one.
MEASURED_FIGURES = ("held_out_mean",)
_WITH_MOMENTS = ("log_ratio", "token_log_ratio", "advantage", "reward")
FIGURES = frozenset(
    name
    for line in (
        "clipped_sequences clipped_sequences_low clipped_sequences_high clipped_tokens clipped_tokens_low",
        "clipped_tokens_high outside_clip_sequences outside_clip_noise outside_clip_lag outside_clip_movement",
        "outside_clip_at_start outside_clip_at_end log_ratio_std_at_start clip_low_mean clip_high_mean",
        "dual_clipped_tokens experts_changed sigma_token sigma_sequence mismatch_tokens noise_share",
        "noise_share_independent noise_clip mismatch_age k1 k3 reference_kl teacher_kl entropy zero_spread_groups",
        "loss grad_norm learning_rate mini_batches_not_applied tokens sequences groups groups_filtered groups_failed",
        "groups_stale dropped_rollouts dropped_tokens behavior_weight_mean behavior_weight_geomean",
        "behavior_weight_std behavior_outside age_mean age_max response_tokens_mean truncated_share eos_share",
        "same_text_share same_phrase_share reward_length_correlation reward_min branches_mean turn_tokens_mean",
        "turns_mean tool_calls_mean malformed_calls_mean cut_turns_mean turns_done_mean rollouts_at_once tokens_per_s",
        "gpus tokens_per_s_per_gpu learner_tokens_per_s_per_gpu learner_flops_per_s learner_mfu mfu",
        "train_flops generation_flops step_s wait_s wait_issue_s wait_queue_s wait_generation_s wait_reward_s",
        "wait_intake_s wait_push_s wait_evaluation_s wait_old_s log_s train_s publish_s hold_s shift_s",
        "probe_s clip_split_s version_beside_s checkpoint_s record_s checkpoint_beside_s",
        *(f"{name}_mean {name}_std {name}_max" for name in _WITH_MOMENTS),
    )
    for name in line.split()
)
# The names of figures in logs and rules that were written before.
_FORMER_NAMES = {
    "cards": "gpus",
    "tokens_per_s_per_card": "tokens_per_s_per_gpu",
    "learner_tokens_per_s_per_card": "learner_tokens_per_s_per_gpu",
}
# Figures whose names come from the configuration, or from a function.
_NAMED = re.compile(
    r"part_.+_mean|source_.+/.+|loss_.+_mean|wait_reward_by_.+_s|ended_.+|dropped_response_tokens_(mean|max)"
    r"|skipped_(tokens_)?(failed|truncated|stale|behavior)"
)


def present_name(figure: str) -> str:
    """The name that a figure has today."""
    return _FORMER_NAMES.get(figure, figure)


def is_figure(name: str) -> bool:
    """Whether steps or evaluations may have a figure of this name."""
    return name in FIGURES or name in MEASURED_FIGURES or _NAMED.fullmatch(name) is not None
