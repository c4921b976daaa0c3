"""Presets of the section `algorithm`, and the clips that follow from other keys.

A preset fills the keys that the user has left out; the user's own keys override it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Clip sides by kind of ratio: GSPO's own, and those of its GRPO baseline (arXiv 2507.18071, section 5).
CLIP_DEFAULTS = {"seq": (3e-4, 4e-4), "seq_token": (3e-4, 4e-4), "token": (0.2, 0.27)}
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
    return implied
