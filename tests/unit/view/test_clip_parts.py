"""The clip of an answer and its parts, from rows worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.view.clip_parts import answer_clip, why_off

ALGORITHM = AlgorithmConfig(pg_clip_low=0.1, pg_clip_high=0.2)


def row(*, learner: float, **columns: Any) -> dict[str, Any]:
    """Three counted tokens that version 4 sampled, and an observation; the log-ratio of each token is `learner`."""
    return {
        "step": 5,
        "skipped": None,
        "advantage": 1.0,
        "mini_batch": 0,
        "mask": [True, True, False, True],
        "logp": [-1.0, -2.0, 0.0, -3.0],
        "learner_logp": [-1.0 + learner, -2.0 + learner, 0.0, -3.0 + learner],
        "version": [4, 4, -1, 4],
        **columns,
    }


def test_the_ratio_is_the_mean_over_counted_tokens() -> None:
    clip = answer_clip(ALGORITHM, row(learner=0.05))
    assert clip.log_ratio == pytest.approx(0.05)
    assert clip.verdict == "inside the clip"


@pytest.mark.parametrize(
    ("learner", "advantage", "verdict"),
    [
        (0.3, 1.0, "above the clip: no gradient"),
        (0.3, -1.0, "above the clip: its advantage keeps the gradient"),
        (-0.3, -1.0, "below the clip: no gradient"),
        (-0.3, 1.0, "below the clip: its advantage keeps the gradient"),
        (-0.105, 1.0, "inside the clip"),
    ],
)
def test_the_clip_takes_the_gradient_on_one_side_of_each_sign(learner: float, advantage: float, verdict: str) -> None:
    assert answer_clip(ALGORITHM, row(learner=learner, advantage=advantage)).verdict == verdict


def test_sides_follow_the_length_where_the_run_says_so() -> None:
    algorithm = AlgorithmConfig(pg_clip_low=0.1, pg_clip_high=0.2, pg_clip_reference_length=12)
    assert answer_clip(algorithm, row(learner=0.3)).verdict == "inside the clip", "12 / 3 tokens: twice as wide"


def test_noise_alone_where_the_newest_version_sampled_and_the_update_was_the_first() -> None:
    clip = answer_clip(ALGORITHM, row(learner=0.05))
    assert clip.parts == {"noise": pytest.approx(0.05), "lag": 0.0, "movement": 0.0}
    assert clip.why == ""


def test_parts_that_records_do_not_tell_apart_are_together() -> None:
    older = answer_clip(ALGORITHM, row(learner=0.05, version=[3, 4, -1, 4]))
    assert older.parts == {"noise and lag": pytest.approx(0.05), "movement": 0.0}
    later = answer_clip(ALGORITHM, row(learner=0.05, mini_batch=1))
    assert later.parts == {"noise and movement": pytest.approx(0.05)}
    assert "not the first of the step" in later.why
    both = answer_clip(ALGORITHM, row(learner=0.05, mini_batch=1, version=[3, 4, -1, 4]))
    assert list(both.parts) == ["noise, lag and movement"]


def test_reasons_for_no_clip() -> None:
    assert why_off(ALGORITHM, row(learner=0.0)) == ""
    assert "not trained: failed" in why_off(ALGORITHM, row(learner=0.0, skipped="failed"))
    assert "learner.token_records" in why_off(ALGORITHM, row(learner=0.0, learner_logp=None))
    assert "whole answers" in why_off(AlgorithmConfig(importance_sampling="token"), row(learner=0.0))
    assert "old_logprobs" in why_off(AlgorithmConfig(old_logprobs="recompute"), row(learner=0.0))
