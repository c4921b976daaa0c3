"""The metrics of a step under their public names, from the sums of its micro-batches and from its rows.

Times come from the learner's step clock.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.evaluation import MOST_PARTS
from gspo.common.telemetry.source_figures import SOURCE_FIGURES, source_figure
from gspo.learner.assembly.rows import Row
from gspo.learner.model.batch import StepBatch
from gspo.learner.objective.own_loss import OWN_FIGURE
from gspo.learner.objective.step_loss import StepTargets
from gspo_core.figures import age_stats, independent_sigma, noise_clip, normal_noise_share, reward_stats
from gspo_core.stats import Stats, figures
from gspo_core.token_losses import clip_sides

SKIP_REASONS = ("failed", "truncated", "stale")
_LOSS_FIGURES = ("outside_clip_sequences", "dual_clipped_tokens", "k1", "k3", "reference_kl", "teacher_kl", "entropy")
_CORRECTION_FIGURES = ("behavior_weight_mean", "behavior_weight_std", "behavior_outside")
_ROUTING_FIGURES = ("experts_changed",)
_MOMENTS = ("log_ratio", "token_log_ratio", "advantage")
# Sums whose values at the step's first weights have figures of their own, under this prefix.
_AT_START, _START = ("outside_clip_sequences", "log_ratio"), "start_"


def row_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Metrics of the rows alone: rewards, lengths, and skipped rollouts by reason."""
    skipped = Counter(row.skipped for row in rows)
    lengths = [int(row.mask.sum()) for row in rows]
    counted = {
        **{f"skipped_{reason}": float(skipped[reason]) for reason in SKIP_REASONS},
        **{f"skipped_tokens_{reason}": float(_skipped_tokens(rows, reason)) for reason in SKIP_REASONS},
        "response_tokens_mean": math.fsum(lengths) / max(1, len(rows)),
        "truncated_share": sum(row.outcome == "truncated" for row in rows) / max(1, len(rows)),
        **_branch_metrics(rows),
        **_conversation_metrics(rows),
    }
    return counted | _reward_metrics(rows) | _source_metrics(rows)


def _reward_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Figures of the rewards; empty if no row has one."""
    scored = [row for row in rows if row.reward is not None]
    if not scored:
        return {}
    rewards_B = torch.tensor([row.reward for row in scored], dtype=torch.float64)
    reward = figures(reward_stats(rewards_B, torch.tensor([row.group for row in scored])))
    reward |= {"reward_min": float(rewards_B.min()), "reward_max": float(rewards_B.max())}
    return reward | _part_means(scored)


def _source_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """The figures of each source that has a name."""
    by_source: dict[str, list[Row]] = {}
    for row in rows:
        by_source.setdefault(row.source, []).append(row)
    by_source.pop("", None)
    of_sources: dict[str, float] = {}
    for source, own in by_source.items():
        seen = _reward_metrics(own) | {
            "groups": float(len({row.group for row in own})),
            "response_tokens_mean": math.fsum(int(row.mask.sum()) for row in own) / len(own),
        }
        of_sources |= {source_figure(source, name): seen[name] for name in SOURCE_FIGURES if name in seen}
    return of_sources


def _branch_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Branches of a rollout; empty if each has one."""
    numbers = [1 + len(row.branch_starts) for row in rows]
    return {"branches_mean": sum(numbers) / len(numbers)} if max(numbers, default=1) > 1 else {}


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
        "turn_tokens_mean": sum(int(row.mask.sum()) for row in talked) / sum(row.num_turns for row in talked),
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
        **_weight_figures(seen),
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


def objective_metrics(stats: Stats) -> dict[str, float]:
    """Ratios, clipping, advantages, divergences and masked outliers over all optimizer steps of the step.

    Under a loss of the user's own nothing is clipped by a key: such figures are absent, and the loss's own are there.
    """
    seen = figures(stats)
    clipped: dict[str, float] = {name: mean for name, mean in seen.items() if name.startswith(OWN_FIGURE)}
    for unit in ("sequences", "tokens") if "clipped_low_tokens" in seen else ():
        low, high = seen[f"clipped_low_{unit}"], seen[f"clipped_high_{unit}"]
        clipped |= {f"clipped_{unit}": low + high, f"clipped_{unit}_low": low, f"clipped_{unit}_high": high}
    moments = {f"{name}_{part}": seen[f"{name}_{part}"] for name in _MOMENTS for part in ("mean", "std", "max")}
    others = {name: seen[name] for name in (*_LOSS_FIGURES, *_ROUTING_FIGURES) if name in seen}
    return clipped | moments | others | _weight_figures(seen)


def mismatch_metrics(algorithm: AlgorithmConfig, stats: Stats, length_B: torch.Tensor) -> dict[str, float]:
    """Noise between generator and learner at equal weights; empty if no token was compared.

    Args:
        length_B: Counted tokens of each sequence; a sequence without any is left out of the shares.
    """
    if not float(stats.get("mismatch.count", 0.0)):
        return {}
    seen = figures(stats)
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


def at_start(stats: Stats) -> Stats:
    """Of the sums of the step's first applied update, those that are figures of the step's first weights."""
    return {f"{_START}{key}": value for key, value in stats.items() if key.rpartition(".")[0] in _AT_START}


def clip_metrics(
    algorithm: AlgorithmConfig, stats: Stats, length_B: torch.Tensor, mismatch: Mapping[str, float], *, is_fresh: bool
) -> dict[str, float]:
    """Why sequences are outside the clip: parts of outside_clip_sequences that add up to it.

    The first update has the step's first weights, so noise and lag put its sequences outside. The rest of the step is
    movement. Noise is known where every token is of the newest version, since then there is no lag, and where it
    was measured. Under recompute, the first ratio is 1, and neither is part of it. Unknown parts are absent.

    Args:
        stats: With those of `at_start`.
        mismatch: The figures of `mismatch_metrics`.
        is_fresh: Whether the newest version sampled every counted token.
    """
    if not algorithm.clips_sequences:
        return {}
    seen, sides = figures(stats), {}
    start = seen["start_outside_clip_sequences"]
    if algorithm.pg_clip_reference_length is not None:
        low_B, high_B = clip_sides(length_B[length_B > 0], *algorithm.clip, algorithm.pg_clip_reference_length)
        sides = {"clip_low_mean": float(low_B.mean()), "clip_high_mean": float(high_B.mean())}
    parts = {"outside_clip_movement": seen["outside_clip_sequences"] - start}
    noise = start if is_fresh else mismatch.get("noise_share")
    if algorithm.old_logprobs == "inference" and noise is not None:
        parts |= {"outside_clip_noise": noise, "outside_clip_lag": start - noise}
    return {**sides, **parts, "outside_clip_at_start": start, "log_ratio_std_at_start": seen["start_log_ratio_std"]}
