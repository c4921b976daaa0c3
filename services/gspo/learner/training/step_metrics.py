"""The metrics of a step under their public names, from the sums of its micro-batches and from its rows.

Times come from the learner's step clock.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence

import torch

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.evaluation import MOST_PARTS
from gspo.learner.assembly.rows import Row
from gspo.learner.model.batch import StepBatch
from gspo.learner.training.objective import StepTargets
from gspo_core.figures import age_stats, independent_sigma, noise_share, reward_stats
from gspo_core.stats import Stats, figures

SKIP_REASONS = ("failed", "truncated", "stale")
_LOSS_FIGURES = ("outside_clip_sequences", "dual_clipped_tokens", "k1", "k3", "reference_kl", "entropy")
_MOMENTS = ("log_ratio", "token_log_ratio", "advantage")


def row_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Metrics of the rows alone: rewards, lengths, and skipped rollouts by reason."""
    skipped = Counter(row.skipped for row in rows)
    lengths = [int(row.mask.sum()) for row in rows]
    counted = {
        **{f"skipped_{reason}": float(skipped[reason]) for reason in SKIP_REASONS},
        **{f"skipped_tokens_{reason}": float(_skipped_tokens(rows, reason)) for reason in SKIP_REASONS},
        "response_tokens_mean": math.fsum(lengths) / max(1, len(rows)),
        "truncated_share": sum(row.outcome == "truncated" for row in rows) / max(1, len(rows)),
        **_conversation_metrics(rows),
    }
    scored = [row for row in rows if row.reward is not None]
    if not scored:
        return counted
    rewards_B = torch.tensor([row.reward for row in scored], dtype=torch.float64)
    reward = figures(reward_stats(rewards_B, torch.tensor([row.group for row in scored])))
    reward |= {"reward_min": float(rewards_B.min()), "reward_max": float(rewards_B.max())}
    return counted | reward | _part_means(scored)


def _conversation_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Turns, tool calls and how conversations ended; empty if every rollout is one answer."""
    talked = [row for row in rows if row.turns_json]
    if not talked:
        return {}
    ends = Counter(row.outcome for row in rows)
    done = [row.num_turns for row in talked if row.outcome == "environment_done"]
    return {
        **({"turns_done_mean": sum(done) / len(done)} if done else {}),
        "turns_mean": sum(row.num_turns for row in talked) / len(talked),
        "tool_calls_mean": sum(row.num_tool_calls for row in talked) / len(talked),
        "malformed_calls_mean": sum(row.num_malformed_calls for row in talked) / len(talked),
        "cut_turns_mean": sum(row.num_cut_turns for row in talked) / len(talked),
        **{f"ended_{outcome}": number / len(rows) for outcome, number in sorted(ends.items())},
    }


def _part_means(scored: Sequence[Row]) -> dict[str, float]:
    """Means of the reward's parts by name, if it has several."""
    values: dict[str, list[float]] = {}
    for row in scored:
        parts = json.loads(row.parts_json)
        for part in parts if len(parts) > 1 else []:
            if part["value"] is not None:
                values.setdefault(part["name"], []).append(part["value"])
    return {f"part_{name}_mean": math.fsum(part) / len(part) for name, part in list(values.items())[:MOST_PARTS]}


def _skipped_tokens(rows: Sequence[Row], reason: str) -> int:
    """Sampled tokens of skipped rollouts; under stale also those that left the mask of another rollout."""
    tokens = sum(row.num_sampled for row in rows if row.skipped == reason)
    if reason == "stale":
        tokens += sum(row.num_sampled - int(row.mask.sum()) for row in rows if row.skipped is None)
    return tokens


def batch_metrics(batch: StepBatch, learner_version: int) -> dict[str, float]:
    """How much was trained on, and how old it was."""
    age = figures(age_stats(batch.version_BT, batch.mask_BT, learner_version))
    return {
        "tokens": float(batch.mask_BT.sum()),
        "sequences": float(len(batch)),
        "groups": float(len({row.group for row in batch.rows})),
        "age_mean": age["token_age_mean"],
        "age_max": age["token_age_max"],
    }


def correction_metrics(batch: StepBatch, targets: StepTargets) -> dict[str, float]:
    """Weights of the behavior correction, and the tokens before and after it; empty without one."""
    if not targets.stats:
        return {}
    seen = figures(targets.stats)
    sequences, tokens = float(targets.mask_BT.any(-1).sum()), float(targets.mask_BT.sum())
    return {
        **{name: seen[name] for name in ("behavior_weight_mean", "behavior_weight_std", "behavior_outside")},
        "skipped_behavior": len(batch) - sequences,
        "skipped_tokens_behavior": float(batch.mask_BT.sum()) - tokens,
        "sequences": sequences,
        "tokens": tokens,
    }


def objective_metrics(stats: Stats) -> dict[str, float]:
    """Ratios, clipping, advantages and divergences over all optimizer steps of the step."""
    seen = figures(stats)
    clipped: dict[str, float] = {}
    for unit in ("sequences", "tokens"):
        low, high = seen[f"clipped_low_{unit}"], seen[f"clipped_high_{unit}"]
        clipped |= {f"clipped_{unit}": low + high, f"clipped_{unit}_low": low, f"clipped_{unit}_high": high}
    moments = {f"{name}_{part}": seen[f"{name}_{part}"] for name in _MOMENTS for part in ("mean", "std", "max")}
    return clipped | moments | {name: seen[name] for name in _LOSS_FIGURES if name in seen}


def mismatch_metrics(algorithm: AlgorithmConfig, stats: Stats, length_B: torch.Tensor) -> dict[str, float]:
    """Noise between generator and learner at equal weights; empty if no token was compared.

    Args:
        length_B: Counted tokens of each sequence; a sequence without any is left out of the shares.
    """
    if not float(stats.get("mismatch.count", 0.0)):
        return {}
    seen = figures(stats)
    sigma_token, sigma_sequence = seen["mismatch_std"], seen["sequence_mismatch_std"]
    low, high = algorithm.clip
    # The clip compares a token's ratio under `token`, a sequence's under the others.
    by_token = algorithm.importance_sampling == "token"
    measured = torch.tensor([sigma_token if by_token else sigma_sequence])
    independent_B = measured if by_token else independent_sigma(sigma_token, length_B[length_B > 0])
    return {
        "sigma_token": sigma_token,
        "sigma_sequence": sigma_sequence,
        "mismatch_tokens": float(stats["mismatch.count"]),
        "noise_share": float(noise_share(measured, pg_clip_low=low, pg_clip_high=high)),
        "noise_share_independent": float(noise_share(independent_B, pg_clip_low=low, pg_clip_high=high)),
    }
