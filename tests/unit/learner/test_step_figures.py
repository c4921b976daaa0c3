"""Figures that the rows say by themselves, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from services.learner.step_figures import row_figures
from tests.tiny_model import make_tiny_model
from tests.unit.learner.training_rows import make_rows


def test_parts_of_the_reward_have_their_means(tmp_path: Path) -> None:
    def parts(right: float | None, form: float) -> str:
        return json.dumps([{"name": "right", "value": right}, {"name": "form", "value": form}])

    first, second, third, *_ = make_rows(make_tiny_model(tmp_path / "model"), num_groups=1)
    rows = [
        replace(first, parts_json=parts(1.0, 0.5)),
        replace(second, parts_json=parts(None, 0.25)),
        replace(third, parts_json=parts(0.0, 100.0), reward=None, failure="raised"),
    ]
    figures = row_figures(rows)
    assert (figures["part_right_mean"], figures["part_form_mean"]) == (1.0, pytest.approx(0.375))
    alone = json.dumps([{"name": "right", "value": 1.0}])
    assert not [name for name in row_figures([replace(first, parts_json=alone)]) if name.startswith("part_")]
