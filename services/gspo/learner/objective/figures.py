"""The figures of an objective under their public names, from the sums of a step's micro-batches."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.learner.model.batch import StepBatch
from gspo.learner.objective.own_loss import OWN_FIGURE
from gspo_core.figures import independent_sigma, mismatch_stats, noise_clip, noise_stats, normal_noise_share
from gspo_core.stats import Stats
from gspo_core.token_losses import clip_sides

_LOSS_FIGURES = ("outside_clip_sequences", "dual_clipped_tokens", "k1", "k3", "reference_kl", "teacher_kl", "entropy")
_CORRECTION_FIGURES = ("behavior_weight_mean", "behavior_weight_std", "behavior_outside")
_ROUTING_FIGURES = ("experts_changed",)
_MOMENTS = ("log_ratio", "token_log_ratio", "advantage")
# Sums whose values at a step's first or last weights have figures of their own, under these prefixes.
_AT_WEIGHTS = ("outside_clip_sequences", "log_ratio")
AT_START, AT_END = "start_", "end_"


def compared_stats(
    algorithm: AlgorithmConfig,
    logp_BT: Tensor,
    behavior_BT: Tensor,
    mask_BT: Tensor,
    counted_BT: Tensor,
    branch_BT: Tensor | None,
) -> Stats:
    """The mismatch of the tokens in a mask, and where a clip compares ratios, what it puts outside. All [B, T].

    Args:
        counted_BT: All tokens of the sequences.
    """
    stats = mismatch_stats(logp_BT, behavior_BT, mask_BT, branch_BT)
    if not algorithm.clips_ratio:
        return stats
    low, high = algorithm.clip
    return stats | noise_stats(
        logp_BT,
        behavior_BT,
        mask_BT,
        counted_BT,
        importance_sampling=algorithm.importance_sampling,
        pg_clip_low=low,
        pg_clip_high=high,
        pg_clip_reference_length=algorithm.pg_clip_reference_length,
        branch_BT=branch_BT,
    )


def correction_metrics(batch: StepBatch, mask_BT: Tensor) -> dict[str, float]:
    """The tokens before and after the behavior correction of a whole step, whose mask this is."""
    sequences, tokens = float(mask_BT.any(-1).sum()), float(mask_BT.sum())
    return {
        "skipped_behavior": len(batch) - sequences,
        "skipped_tokens_behavior": float(batch.mask_BT.sum()) - tokens,
        "sequences": sequences,
        "tokens": tokens,
    }


def _weight_figures(seen: Mapping[str, float]) -> dict[str, float]:
    """Figures of the behavior correction; empty without one."""
    if "behavior_log_weight" not in seen:
        return {}
    geometric_mean = math.exp(seen["behavior_log_weight"])
    return {**{name: seen[name] for name in _CORRECTION_FIGURES}, "behavior_weight_geomean": geometric_mean}


def objective_metrics(seen: Mapping[str, float]) -> dict[str, float]:
    """Ratios, clipping, advantages, divergences and masked outliers over all optimizer steps of the step.

    Under a loss of the user's own nothing is clipped by a key: such figures are absent, and the loss's own are there.
    """
    clipped: dict[str, float] = {name: mean for name, mean in seen.items() if name.startswith(OWN_FIGURE)}
    for unit in ("sequences", "tokens") if "clipped_low_tokens" in seen else ():
        low, high = seen[f"clipped_low_{unit}"], seen[f"clipped_high_{unit}"]
        clipped |= {f"clipped_{unit}": low + high, f"clipped_{unit}_low": low, f"clipped_{unit}_high": high}
    moments = {f"{name}_{part}": seen[f"{name}_{part}"] for name in _MOMENTS for part in ("mean", "std", "max")}
    others = {name: seen[name] for name in (*_LOSS_FIGURES, *_ROUTING_FIGURES) if name in seen}
    return clipped | moments | others | _weight_figures(seen)


def mismatch_metrics(
    algorithm: AlgorithmConfig, stats: Stats, seen: Mapping[str, float], length_B: Tensor
) -> dict[str, float]:
    """Noise between generator and learner at equal weights; empty if no token was compared.

    Args:
        seen: The figures of the stats.
        length_B: Counted tokens of each sequence; a sequence without any is left out of the shares.
    """
    if not float(stats.get("mismatch.count", 0.0)):
        return {}
    sigma_token, sigma_sequence = seen["mismatch_std"], seen["sequence_mismatch_std"]
    measured_metrics = {
        "sigma_token": sigma_token,
        "sigma_sequence": sigma_sequence,
        "mismatch_tokens": float(stats["mismatch.count"]),
    }
    if not algorithm.clips_ratio:
        return measured_metrics  # no other loss takes a token or a sequence out by its ratio
    length_B = length_B[length_B > 0]
    if algorithm.importance_sampling == "token":  # the clip compares the ratio of each token
        length_B = torch.ones(1)
    low_B, high_B = clip_sides(length_B, *algorithm.clip, algorithm.pg_clip_reference_length)
    independent_B = independent_sigma(sigma_token, length_B)
    normal = normal_noise_share(independent_B, pg_clip_low=low_B, pg_clip_high=high_B, mean=seen["mismatch_mean"])
    return {
        **measured_metrics,
        "noise_share": seen["noise_share"],
        "noise_share_independent": float(normal),
        "noise_clip": noise_clip(stats),
    }


def at_weights(when: str, stats: Stats) -> Stats:
    """Those sums of passes at a step's first or last weights that have figures of their own.

    Args:
        when: AT_START or AT_END.
    """
    return {f"{when}{key}": value for key, value in stats.items() if key.rpartition(".")[0] in _AT_WEIGHTS}


def clip_metrics(
    algorithm: AlgorithmConfig,
    seen: Mapping[str, float],
    length_B: Tensor,
    mismatch: Mapping[str, float],
    *,
    is_fresh: bool,
) -> dict[str, float]:
    """Why sequences are outside the clip at a step's last weights: parts of outside_clip_at_end that add up to it.

    Noise and lag put sequences outside at the step's first weights. The rest is the policy's movement, which is known
    where the same sequences were looked at before the first update and after the last one. Noise is known where every
    token is of the newest version, since then there is no lag, and where it was measured. Under recompute, the first
    ratio is 1, and neither is part of it. Unknown parts are absent.

    Args:
        seen: The figures of a step's stats, with those of `at_weights`. At the start these are of all sequences, or of
            the first applied update where there are none at the end.
        mismatch: The figures of `mismatch_metrics`.
        is_fresh: Whether the newest version sampled every counted token.
    """
    if not algorithm.clips_sequences:
        return {}
    sides, parts, start = {}, {}, seen["start_outside_clip_sequences"]
    if algorithm.pg_clip_reference_length is not None:
        low_B, high_B = clip_sides(length_B[length_B > 0], *algorithm.clip, algorithm.pg_clip_reference_length)
        sides = {"clip_low_mean": float(low_B.mean()), "clip_high_mean": float(high_B.mean())}
    if (end := seen.get("end_outside_clip_sequences")) is not None:
        parts = {"outside_clip_at_end": end, "outside_clip_movement": end - start}
    noise = start if is_fresh else mismatch.get("noise_share")
    if algorithm.old_logprobs == "inference" and noise is not None:
        parts |= {"outside_clip_noise": noise, "outside_clip_lag": start - noise}
    return {**sides, **parts, "outside_clip_at_start": start, "log_ratio_std_at_start": seen["start_log_ratio_std"]}
