"""Presets of the section `algorithm`, and the clips that follow from other keys.

A preset fills the keys that the user has left out; the user's own keys override it.
"""

import math
from collections.abc import Mapping
from typing import Any

# Clip sides by kind of ratio: GSPO's own, and those of its GRPO baseline (arXiv 2507.18071, section 5).
CLIP_DEFAULTS = {"seq": (3e-4, 4e-4), "seq_token": (3e-4, 4e-4), "token": (0.2, 0.27)}
# (lowest, highest) weight by level. verl's presets have the bounds of a geometric mean (decoupled_geo_rs), of which a
# drift of 0.001 a token is outside. Those of tokens and products are as wide as verl's weights (rollout_is_threshold).
BEHAVIOR_BOUNDS = {"token": (0.5, 2.0), "geometric": (0.999, 1.001), "product": (0.5, 2.0)}
# An estimator that means one reward_norm.
ESTIMATOR_NORMS = {"grpo": "group", "rloo": "leave_one_out"}
# Bounds of other objectives, for ratios of any kind. For cispo, MiniMax-M1 has no lower bound (arXiv 2506.13585), and
# ScaleRL's weights reach 5 (arXiv 2510.13786). Those of dppo are in verl's script for its paper (arXiv 2602.04879).
OBJECTIVE_BOUNDS = {"cispo": (1.0, 4.0), "dppo_tv": (0.15, 0.15), "dppo_kl": (0.05, 0.05)}
# The least lower and the largest upper bound of a sequence's exact weight. Beyond them one answer counts for a hundred
# others, and the bounds are some in name only.
PRODUCT_BOUNDS = (0.01, 100.0)
# Keys that a loss of the user's own replaces.
OBJECTIVE_KEYS = (
    *("importance_sampling", "ratio_of", "objective", "dual_clip_loss"),
    *("pg_clip", "pg_clip_low", "pg_clip_high", "pg_clip_reference_length"),
)
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
    # Understanding R1-Zero-Like Training, arXiv 2503.20783: no division by the group's std, nor by an answer's length.
    "dr-grpo": {
        "adv_estimator": "grpo",
        "reward_shift": True,
        "importance_sampling": "token",
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "pg_clip_low": 0.2,
        "pg_clip_high": 0.2,
    },
    # DAPO, arXiv 2503.14476, eq. 8 and section 4.1; its length penalty covers the last fifth of an answer.
    "dapo": {
        "adv_estimator": "grpo",
        "importance_sampling": "token",
        "loss_agg_mode": "token-mean",
        "pg_clip_low": 0.2,
        "pg_clip_high": 0.28,
        "filter_zero_spread": True,
        "num_mini_batches": 16,
    },
    # MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.
    "cispo": {
        "adv_estimator": "grpo",
        "importance_sampling": "token",
        "objective": "cispo",
        "loss_agg_mode": "token-mean",
    },
    # Back to Basics, arXiv 2402.14740, eq. 7: REINFORCE on the sum of an answer's log-probs, one update a batch.
    "rloo": {
        "adv_estimator": "rloo",
        "importance_sampling": "token",
        "loss_agg_mode": "seq-mean-token-sum",
        "pg_clip_low": 0.2,
        "pg_clip_high": 0.27,
        "num_mini_batches": 1,
    },
}
# Keys of ROLL's documented block that make its algorithm, and no sizes.
_ROLL_BLOCK = (
    *("adv_estimator", "importance_sampling", "loss_agg_mode", "whiten_advantages", "advantage_clip"),
    *("dual_clip_loss", "reward_clip", "reward_norm"),
)
# Keys of GSPO that decide about a loss of another name.
_GSPO = ("importance_sampling", "loss_agg_mode")
# DAPO's buffer of 4,096 tokens is so much of its 20,480.
_PENALISED_SHARE = 5


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


def filled_from_preset(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The user's keys of the section with those of their preset; unchanged if there is no preset of that name.

    Switches that the preset leaves off stay unwritten: only a user writes one as off, beside the keys that it owns.
    """
    if keys.get("preset", "gspo") not in PRESETS:
        return dict(keys)
    preset = PRESETS[keys.get("preset", "gspo")]
    replaced = _replaced(keys, preset)
    return {
        **{key: value for key, value in preset.items() if key not in replaced and value not in (None, False)},
        **_implied(keys, preset),
        **keys,
    }


def _replaced(keys: Mapping[str, Any], preset: Mapping[str, Any]) -> set[str]:
    """Keys of a preset that another key of the user replaces."""
    replaced = set()
    if "pg_clip" in keys:
        replaced |= {"pg_clip_low", "pg_clip_high"}
    if {"pg_clip_low", "pg_clip_high"} & keys.keys():
        replaced.add("pg_clip")
    if "importance_sampling" in keys and "pg_clip" not in preset:
        # The clip follows the ratio's kind: 3e-4 on token ratios would clip nearly everything.
        replaced |= {"pg_clip_low", "pg_clip_high"}
    if keys.get("objective", "clip") != "clip":
        replaced |= {"pg_clip", "pg_clip_low", "pg_clip_high"}
    if "adv_estimator" in keys:
        replaced.add("reward_norm")
    if _has_own_loss(keys):
        replaced.update(OBJECTIVE_KEYS)
    return replaced


def _has_own_loss(keys: Mapping[str, Any]) -> bool:
    loss = keys.get("loss")
    return isinstance(loss, Mapping) and loss.get("path") is not None


def _implied(keys: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """Keys whose value follows from another one's."""
    implied: dict[str, Any] = {}
    if norm := ESTIMATOR_NORMS.get(keys.get("adv_estimator", preset["adv_estimator"])):
        implied["reward_norm"] = norm
    sides = {"pg_clip_low", "pg_clip_high"}
    is_inherited = "pg_clip" in preset and keys.get("objective", "clip") == "clip" and not _has_own_loss(keys)
    if is_inherited and "pg_clip" not in keys and sides & keys.keys():
        implied |= dict.fromkeys(sides, preset["pg_clip"])
    longest = keys.get("response_length", _CLIP_TOKENS)
    if preset is PRESETS["dapo"] and isinstance(longest, int):
        implied["overlong_buffer"] = max(1, longest // _PENALISED_SHARE)
    return implied | _implied_bounds(keys)


def _implied_bounds(keys: Mapping[str, Any]) -> dict[str, float]:
    """The bounds of a correction, by its level; those that have an effect."""
    correction, level = keys.get("behavior_correction"), keys.get("behavior_level", "geometric")
    if correction not in ("truncate", "mask") or level not in BEHAVIOR_BOUNDS:
        return {}
    low, high = BEHAVIOR_BOUNDS[level]
    only_caps = correction == "truncate" and level != "product"
    return {"behavior_high": high} if only_caps else {"behavior_low": low, "behavior_high": high}


def remarks(keys: Mapping[str, Any], clip: tuple[float, float]) -> list[str]:
    """Sentences about keys that have another system's or paper's name, and not its definition.

    Args:
        keys: The section's keys with their values.
        clip: (low, high) sides that follow from them.
    """
    if keys["preset"] != "gspo":
        return []
    papers = [("objective", "cispo"), ("adv_estimator", "rloo")]
    lines = [_of_paper(keys, key, name) for key, name in papers if _is_under_gspo(keys, key, name)]
    return lines + _of_roll(keys, clip)


def _is_under_gspo(keys: Mapping[str, Any], key: str, name: str) -> bool:
    gspo = PRESETS["gspo"]
    return keys.get(key) == name and any(keys.get(other) == gspo[other] for other in _GSPO)


def _of_paper(keys: Mapping[str, Any], key: str, name: str) -> str:
    gspo, paper = PRESETS["gspo"], PRESETS[name]
    ours = ", ".join(f"{other} {gspo[other]}" for other in _GSPO if keys.get(other) == gspo[other])
    theirs = ", ".join(f"{other} {paper[other]}" for other in _GSPO if keys.get(other) == gspo[other])
    return (
        f"algorithm.{key}: {name} has GSPO's {ours} here, and its paper {theirs}: algorithm.preset: {name} sets what "
        "the paper has"
    )


def _of_roll(keys: Mapping[str, Any], clip: tuple[float, float]) -> list[str]:
    roll, (low, high) = PRESETS["roll-gspo"], CLIP_DEFAULTS["seq"]
    if clip != (low, high) or any(keys.get(key) != roll[key] for key in _ROLL_BLOCK):
        return []
    clip_of_roll = f"{roll['pg_clip']:g}"
    line = (
        f"algorithm has the keys of ROLL's GSPO block without pg_clip, so the clip is the paper's {low:g} / {high:g}, "
        f"and ROLL's is {clip_of_roll}: algorithm.pg_clip: {clip_of_roll} or preset: roll-gspo sets ROLL's"
    )
    return [line]
