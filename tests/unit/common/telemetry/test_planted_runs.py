"""Recorded runs: each planted fault is named within its ten steps, and a healthy run has no finding on learning.

`python -m tests.planted` records them; tests/integration/planted/test_planted_runs.py makes them anew.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.planted.faults import FAULTS
from tests.planted.judged import judge
from tests.support.repository.source_files import ROOT

RUNS: dict[str, Any] = json.loads((ROOT / "tests/planted/figures.json").read_text())


@pytest.mark.parametrize("name", FAULTS)
def test_the_rules_say_of_a_recorded_run_what_was_planted(name: str) -> None:
    judge(name, RUNS[name])
