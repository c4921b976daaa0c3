"""The figures of a step, by their public names, from the sums that its micro-batches left and from its rows.

No clock and no metrics client: times and exports are the loop's. Neighbours: gspo_core.figures and gspo_core.stats do
the arithmetic, trainer.py gathers the sums.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from gspo_core.figures import age_stats, noise_share, reward_stats
from gspo_core.stats import Stats, figures
from services.common.algorithm import AlgorithmConfig
from services.learner.batch import StepBatch
from services.learner.rows import Row

SKIP_REASONS = ("failed", "truncated", "stale")
_CLIPPED = ("clipped_low_sequences", "clipped_high_sequences", "clipped_low_tokens", "clipped_high_tokens")


def row_figures(rows: Sequence[Row]) -> dict[str, float]:
    """What the rows say by themselves: rewards, lengths, what was skipped and why."""
    skipped = Counter(row.skipped for row in rows)
    lengths = [int(row.mask.sum()) for row in rows]
    counted = {
        **{f"skipped_{reason}": float(skipped[reason]) for reason in SKIP_REASONS},
        "response_tokens_mean": math.fsum(lengths) / max(1, len(rows)),
        "truncated_share": sum(row.outcome == "truncated" for row in rows) / max(1, len(rows)),
    }
    scored = [row for row in rows if row.reward is not None]
    if not scored:
        return counted
    rewards_B = torch.tensor([row.reward for row in scored], dtype=torch.float64)
    reward = figures(reward_stats(rewards_B, torch.tensor([row.group for row in scored])))
    del reward["reward_max"]
    return counted | reward


def batch_figures(batch: StepBatch, learner_version: int) -> dict[str, float]:
    """How much was trained on, and how old it was."""
    age = figures(age_stats(batch.version_BT, batch.mask_BT, learner_version))
    return {
        "tokens": float(batch.mask_BT.sum()),
        "sequences": float(len(batch)),
        "groups": float(len({row.group for row in batch.rows})),
        "age_mean": age["token_age_mean"],
        "age_max": age["token_age_max"],
    }


def objective_figures(stats: Stats) -> dict[str, float]:
    """What the loss saw, over all optimizer steps of the step."""
    seen = figures(stats)
    clipped = {name: seen[name] for name in _CLIPPED}
    return {
        "clipped_sequences": clipped["clipped_low_sequences"] + clipped["clipped_high_sequences"],
        "clipped_sequences_low": clipped["clipped_low_sequences"],
        "clipped_sequences_high": clipped["clipped_high_sequences"],
        "clipped_tokens": clipped["clipped_low_tokens"] + clipped["clipped_high_tokens"],
        **{name: seen[name] for name in ("log_ratio_mean", "log_ratio_std", "log_ratio_max")},
        **{name: seen[name] for name in ("advantage_mean", "advantage_std", "k1", "k3", "entropy")},
    }


def mismatch_figures(algorithm: AlgorithmConfig, stats: Stats) -> dict[str, float]:
    """Noise between generator and learner at equal weights; nothing where no token is of the learner's version."""
    if not float(stats.get("mismatch.count", 0.0)):
        return {}
    seen = figures(stats)
    sigma_token, sigma_sequence = seen["mismatch_std"], seen["sequence_mismatch_std"]
    # The ratio that the clip looks at is a token's under `token`, a sequence's under the others.
    sigma = sigma_token if algorithm.importance_sampling == "token" else sigma_sequence
    low, high = algorithm.clip
    share = noise_share(torch.tensor([sigma]), pg_clip_low=low, pg_clip_high=high)
    return {"sigma_token": sigma_token, "sigma_sequence": sigma_sequence, "noise_share": float(share)}
