"""Whole training steps on a device that refuses a mix of devices (tests/support/card/tensors.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.card.cases import CASES, figures_of, make_models
from tests.support.training.started_ranks import rank_environment

# Relative and absolute. The card attends as a GPU without bfloat16's attention does, and a CPU in another order.
_CLOSE, _CLOSE_IN_BFLOAT16 = (1e-3, 1e-5), (0.1, 0.1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def on_card(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of every case, in a process that has the device."""
    torch.set_num_threads(1)  # the expected figures, where tests run side by side
    out = tmp_path_factory.mktemp("cases")
    # torch warns of a barrier in a group that does not know its device.
    words = [
        "-W",
        "error:barrier",
        "-m",
        "tests.support.training.rank_program",
        "tests.support.card.cases",
        str(models),
        str(out),
    ]
    done = subprocess.run(
        [sys.executable, *words, *CASES],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.parametrize("case", CASES)
def test_a_step_on_a_card_has_the_figures_of_the_cpu(on_card: Path, models: Path, case: str) -> None:
    figures = json.loads((on_card / f"{case}.json").read_text())
    assert "error" not in figures, figures["error"]
    expected = figures_of(case, models)
    relative, absolute = _CLOSE_IN_BFLOAT16 if case == "bfloat16" else _CLOSE
    assert figures.keys() == expected.keys()
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value, rel=relative, abs=absolute), name
