"""Every figure of a step, computed again from the step's log by other means. Two ranks: test_trainer_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.learner.storage.step_log import StepLog
from tests.support.training.figure_cases import CASES, STEP, figure_config, make_figure_models, train_case
from tests.support.training.figure_reference import assert_figures_of_the_log


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_figure_models(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("case", CASES)
def test_every_figure_of_a_step_follows_from_its_log(folder: Path, tmp_path: Path, case: str) -> None:
    """Mini-batches without a gradient and skipped rollouts included; a figure that is not computed here fails."""
    figures = train_case(folder, case, tmp_path)
    assert_figures_of_the_log(figures, StepLog(tmp_path).path(STEP), folder, figure_config(folder, case))
    assert case != "mask" or figures["skipped_behavior"] > 0
