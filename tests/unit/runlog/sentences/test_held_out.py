"""Held-out results in words: errors, differences within them, and a best version that noise chose."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gspo.common.config.schema import Config
from gspo.runlog.run_log import EvaluationRecord
from gspo.runlog.sentences.held_out import NO_DIFFERENCE, best_choice, change_in_words, difference, in_words


@pytest.fixture
def minimal() -> dict[str, Any]:
    return {
        "name": "small",
        "model": {"path": "."},
        "data": {"prompts": "p.jsonl"},
        "reward": {"functions": [{"path": "r.py"}]},
        "run": {"total_steps": 60},
    }


def test_a_difference_within_two_standard_errors_is_none() -> None:
    before, after = {"sampled_mean": 0.5, "sampled_stderr": 0.03}, {"sampled_mean": 0.59, "sampled_stderr": 0.04}
    change = difference(before, after)
    assert change == pytest.approx((0.09, 0.05))
    assert change is not None and change_in_words(*change) == NO_DIFFERENCE
    assert change_in_words(0.11, 0.05) == "+0.110 ± 0.050"
    assert change_in_words(-0.2, 0.05) == "-0.200 ± 0.050"
    assert difference(before, {"sampled_mean": 0.59}) == pytest.approx((0.09, None))
    assert change_in_words(0.09, None) == ""
    assert difference(before, {}) is None
    assert (in_words(0.5, 0.03), in_words(0.5, None)) == ("0.500 ± 0.030", "0.500")


def record(version: int, score: float, error: float, file: str = "", num_prompts: float = 64.0) -> EvaluationRecord:
    figures = {"sampled_mean": score, "sampled_stderr": error, "num_prompts": num_prompts}
    return EvaluationRecord(file=file, version=version, step=version, unix_s=0.0, score=score, figures=figures)


def configured(minimal: dict[str, Any], **evaluation: Any) -> Config:
    keys = {"prompts": "e.jsonl", "keep_best": "sampled_mean", **evaluation}
    return Config.model_validate(minimal | {"evaluation": keys})


def test_a_best_version_that_others_are_near_to_is_chosen_by_noise(minimal: dict[str, Any]) -> None:
    records = [record(0, 0.2, 0.03), record(20, 0.55, 0.03), record(40, 0.6, 0.04), record(60, 0.35, 0.03)]
    choice = best_choice(records, configured(minimal))
    assert choice is not None
    assert choice.rivals == (20,)
    assert choice.line == (
        "40 (sampled_mean 0.600 ± 0.040); chosen by noise, for version 20 is within two standard errors"
    )
    two = best_choice([*records, record(80, 0.58, 0.04)], configured(minimal))
    assert two is not None and two.by_noise.endswith("for versions 20, 80 are within two standard errors")
    clear = best_choice([*records[:1], *records[2:]], configured(minimal))
    assert clear is not None and clear.line == "40 (sampled_mean 0.600 ± 0.040)"
    assert best_choice(records[:0], configured(minimal)) is None
    assert best_choice(records, configured(minimal, keep_best=None)) is None


def test_a_score_of_the_first_prompts_alone_says_so_and_has_their_error(minimal: dict[str, Any]) -> None:
    last = EvaluationRecord(
        file="", version=60, step=60, unix_s=0.0, score=0.94,
        figures={"sampled_mean": 0.951, "sampled_stderr": 0.01, "num_prompts": 256.0},
    )  # fmt: skip
    choice = best_choice([record(0, 0.3, 0.05), last], configured(minimal, limit_between=64))
    assert choice is not None
    assert choice.error == pytest.approx(0.02)
    assert choice.basis == "of the first 64 prompts alone (evaluation.limit_between)"


def test_the_error_of_a_weighted_mean_follows_from_those_of_its_files(minimal: dict[str, Any]) -> None:
    sources = [{"name": "a", "prompts": "a.jsonl", "weight": 3}, {"name": "b", "prompts": "b.jsonl"}]
    files = {"a": "a.jsonl", "b": "b.jsonl"}
    config = Config.model_validate(
        minimal | {"data": {"sources": sources}, "evaluation": {"prompts": files, "keep_best": "sampled_mean"}}
    )
    choice = best_choice([record(10, 0.5, 0.02, "a"), record(10, 0.9, 0.04, "b")], config)
    assert choice is not None
    assert choice.score == pytest.approx(0.6)
    assert choice.error == pytest.approx(math.hypot(3 * 0.02, 0.04) / 4)
    assert choice.basis == "the weighted mean of a and b"


def test_a_file_that_the_key_does_not_name_is_named(minimal: dict[str, Any]) -> None:
    files = {"easy": "a.jsonl", "hard": "b.jsonl"}
    records = [record(10, 0.5, 0.02, "easy"), record(10, 0.1, 0.02, "hard")]
    of_first = best_choice(records, configured(minimal, prompts=files))
    assert of_first is not None and of_first.basis == "of easy"
    named = best_choice(records, configured(minimal, prompts=files, keep_best="hard/sampled_mean"))
    assert named is not None and named.line == "10 (hard/sampled_mean 0.100 ± 0.020)"
