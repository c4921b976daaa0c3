"""The keys of data.curriculum: what contradicts them is refused, and a resume keeps the order of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo.common.config.loading import check_resume, parse_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError


def read(curriculum: str = "spread", **sections: Any) -> Config:
    keys: dict[str, Any] = {
        "name": "r",
        "model": {"path": "m"},
        "reward": {"functions": [{"builtin": "exact_match"}]},
        "run": {"total_steps": 3},
        **sections,
    }
    keys["data"] = {"prompts": "p.jsonl", "curriculum": curriculum, **sections.get("data", {})}
    return parse_config(keys, Path())


def test_it_is_off_by_default_and_has_a_least_share() -> None:
    assert read("none").data.revisit_passes == 4
    assert read(data={"revisit_passes": 2}).data.revisit_passes == 2


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"revisit_passes": 1}}, r"data.revisit_passes: 1 is not allowed"),
        ({"curriculum": "hard"}, r"data.curriculum: hard is not allowed"),
        ({"run": {"total_epochs": 2}}, r"run.total_epochs: 2.0 counts passes over the prompts, and under"),
        (
            {"teacher": {"path": "t", "alone": True}, "algorithm": {"add_token_level_kl": True}},
            r"data.curriculum: spread follows the rewards, which have no part",
        ),
        (
            {"algorithm": {"adv_estimator": "reinforce", "reward_norm": "batch"}},
            r"data.curriculum: spread avoids groups with equal rewards, and under algorithm.reward_norm: batch",
        ),
        ({"algorithm": {"adv_estimator": "reinforce", "reward_norm": None}}, r"under algorithm.reward_norm: null"),
    ],
)
def test_what_contradicts_a_curriculum_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(**sections)


def test_a_resume_keeps_the_number_of_slots() -> None:
    check_resume(read("none"), read("none", staleness={"max_lag": 2}))
    check_resume(read(), read(run={"total_steps": 9}))
    with pytest.raises(InputError, match=r"^staleness.max_lag: cannot change on resume .* was 1 and is now 2"):
        check_resume(read(), read(staleness={"max_lag": 2}))
    with pytest.raises(InputError, match=r"^data.curriculum: cannot change on resume"):
        check_resume(read("none"), read())
