"""The part of the clip in each answer of a group, from step file and token records: the ratio and its causes.

docs/clips.md has the three causes: the engines' noise, the lag of the sampling weights, and the policy's
movement within a step. Records hold log-probs at an answer's own update alone, so not every answer shows all three.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspo.common.config.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class AnswerClip:
    """The clip of one answer.

    Attributes:
        log_ratio: log s_i, the mean of the counted tokens' log-ratios.
        verdict: Whether the clip took the answer's gradient, in words.
        parts: Cause -> its part of log_ratio, as far as the records tell them apart.
        why: The reason where they do not tell all apart; empty otherwise.
    """

    log_ratio: float
    verdict: str
    parts: dict[str, float]
    why: str


def why_off(algorithm: AlgorithmConfig, row: Mapping[str, Any]) -> str:
    """The reason for which an answer shows no clip; empty where it has one."""
    if row["skipped"]:
        return f"it was not trained: {row['skipped']}"
    if not row.get("learner_logp"):
        return "its step has no token records (learner.token_records)"
    if not algorithm.clips_sequences or algorithm.ratio_of != "rollout":
        return "the run does not clip the ratios of whole answers"
    if algorithm.old_logprobs != "inference":
        return "the old log-probs were computed again (algorithm.old_logprobs), and the log does not have them"
    return ""


def answer_clip(algorithm: AlgorithmConfig, row: Mapping[str, Any]) -> AnswerClip:
    """The clip of an answer for which `why_off` has no reason.

    Args:
        row: A row of the step file, with the columns of its token record.
    """
    counted = [place for place, counts in enumerate(row["mask"]) if counts]
    log_ratio = math.fsum(row["learner_logp"][place] - row["logp"][place] for place in counted) / max(1, len(counted))
    low, high = _sides(algorithm, len(counted))
    ratio = math.exp(min(log_ratio, 60.0))
    verdict = "inside the clip"
    if not 1 - low <= ratio <= 1 + high:
        side = "above" if ratio > 1 else "below"
        takes = (row["advantage"] > 0) == (ratio > 1) and row["advantage"] != 0
        verdict = f"{side} the clip: {'no gradient' if takes else 'its advantage keeps the gradient'}"
    oldest = min((row["version"][place] for place in counted), default=row["step"] - 1)
    return AnswerClip(log_ratio, verdict, *_parts(algorithm, row, log_ratio, is_newest=oldest == row["step"] - 1))


def _sides(algorithm: AlgorithmConfig, length: int) -> tuple[float, float]:
    """Both sides of the clip for an answer of so many tokens, as gspo_core.token_losses.clip_sides has them."""
    low, high = algorithm.clip
    reference = algorithm.pg_clip_reference_length
    scale = 1.0 if reference is None else math.sqrt(reference / max(1, length))
    return min(1.0, low * scale), high * scale


def _parts(
    algorithm: AlgorithmConfig, row: Mapping[str, Any], log_ratio: float, *, is_newest: bool
) -> tuple[dict[str, float], str]:
    """The parts of a log-ratio, and why some are not apart."""
    if row["mini_batch"] > 0 or algorithm.ppo_epochs > 1:
        why = "its update was not the first of the step, and the records have the log-probs of that update alone"
        return ({"noise and movement": log_ratio} if is_newest else {"noise, lag and movement": log_ratio}), why
    if is_newest:
        return {"noise": log_ratio, "lag": 0.0, "movement": 0.0}, ""
    return {"noise and lag": log_ratio, "movement": 0.0}, "older weights sampled a part of it"
